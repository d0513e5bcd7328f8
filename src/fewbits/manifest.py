"""fewbits.json: what an artifact holds, who made it of what, and the hash of every file beside it. Loads no torch.

A schema is "major.minor". A minor adds what an older reader can do without: a newer one opens, and what is unknown in it is left out.
A major changes the meaning of what is there: a newer one is refused. Formats have versions of their own, for the layout of their parts.

The plan is not in here. plan.json is the one place that says which format a weight has, because it is the file that a person edits and
gives to `--plan`; its hash is here, so that one that was changed in place no longer passes for what the weights were made by.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fewbits import formats, kernels, machines
from fewbits.checkpoints import limits
from fewbits.checkpoints.folder import inside, plain, read_json
from fewbits.errors import InputError
from fewbits.files import sha256_of, to_json
from fewbits.machines import Machine
from fewbits.model import Weight

if TYPE_CHECKING:
    from fewbits.planning import Plan

NAME = "fewbits.json"
INDEX = "model.safetensors.index.json"  # transformers' own: which file holds each tensor
SCHEMA = (2, 0)
HINT = "fetch it again, or make it anew with `fewbits quantize`"
METHOD = "fewbits"  # what config.json calls it: transformers finds the quantizer by it
_Row = TypeVar("_Row")


@dataclass(frozen=True)
class Provenance:
    source: str  # name of the folder or file, not its path
    sha256: str
    fewbits: str
    kernels: int | None = None  # version of the kernels' interface; None: made before it was written down
    calibration: str | None = None  # sha256 of the text that codes were fitted to; None: none was used
    machine: Machine | None = None  # that fitted them; None: none was used, and any machine gives these bytes


@dataclass(frozen=True)
class Stored:
    """One file of the folder, as it was when it was written."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    weights: tuple[Weight, ...]
    rest: tuple[str, ...]
    provenance: Provenance
    shard_of: Mapping[str, str]  # which file holds each tensor
    formats: Mapping[str, int] = field(default_factory=dict)  # those in use, with the version of their layout
    outcomes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # how each weight's codes were chosen
    errors: Mapping[str, float] = field(default_factory=dict)  # by weight: |decoded - float| / |float|, in the Frobenius norm
    verdicts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # by runtime, the latest
    files: Mapping[str, Stored] = field(default_factory=dict)  # all but fewbits.json itself; empty: schema 1 wrote none down
    schema: tuple[int, int] = SCHEMA

    @property
    def shards(self) -> tuple[str, ...]:
        return tuple(sorted(set(self.shard_of.values())))


def provenance(source: str, sha256: str, calibration: str | None = None) -> Provenance:
    return Provenance(source, sha256, version("fewbits"), kernels.ABI, calibration, machines.here() if calibration else None)


def said(origin: Provenance, plan: Plan) -> dict[str, str]:
    """What a file says of where it comes from. As long whatever was done, so that its size is known before: where no text was used, the
    hash of an empty one stands for it."""
    return {
        "fewbits.version": origin.fewbits,
        "fewbits.source": origin.source,
        "fewbits.source_sha256": origin.sha256,
        "fewbits.calibration_sha256": origin.calibration or hashlib.sha256(b"").hexdigest(),
        "fewbits.plan_sha256": hashlib.sha256(plan.to_json().encode()).hexdigest(),
    }


def version_of(format_name: str) -> int:
    """Of the layout of a format's parts. One that does not say has its first."""
    return formats.get(format_name).version


def read(folder: Path) -> Manifest:
    path = folder / NAME
    content = read_json(path, "a fewbits artifact is a folder with fewbits.json in it")
    try:
        schema = _schema(content["schema"], folder)
        shard_of = dict(content["files"]) if schema[0] == 1 else dict(read_json(folder / INDEX, HINT)["weight_map"])
        files = {} if schema[0] == 1 else {name: _known(Stored, row) for name, row in content["files"].items()}
        found = Manifest(
            weights=tuple(_known(Weight, row | {"shape": (row["shape"][0], row["shape"][1])}) for row in content["weights"]),
            rest=tuple(content["rest"]),
            provenance=_provenance(content["provenance"]),
            shard_of=shard_of,
            formats={name: int(number) for name, number in content.get("formats", {}).items()},
            outcomes=dict(content.get("outcomes", {})),
            errors=dict(content.get("errors", {})),
            verdicts=dict(content.get("verdicts", {})),
            files=files,
            schema=schema,
        )
        _check_rows(found)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as failure:
        raise InputError(f"`{path}` is damaged: {failure!r}", HINT) from failure
    for name in {*found.shard_of.values(), *found.files}:
        if not plain(name):  # an artifact must not lead out of its folder
            raise InputError(f"`{path}` names a file outside its folder: {name[:300]!a}", "do not trust this artifact")
    if schema[0] > 1 and (unsaid := sorted({INDEX, *found.shards} - found.files.keys())):
        raise InputError(f"`{path}` has no hash of `{unsaid[0]}`", HINT)
    for name, number in found.formats.items():
        if name not in formats.all():
            raise InputError(f"`{folder}` holds {name}, a format that this fewbits does not know", "update fewbits")
        if number > (ours := version_of(name)):
            raise InputError(f"`{folder}` holds {name} in version {number}, this fewbits reads version {ours}", "update fewbits")
    return found


def _check_rows(found: Manifest) -> None:
    """What a dataclass takes from JSON without asking."""
    for weight in found.weights:
        words = all(isinstance(word, str) for word in (weight.name, weight.kind, weight.dtype, weight.tied_to or "", weight.together or ""))
        if not words or not all(isinstance(side, int) and 0 < side <= 1 << 31 for side in weight.shape):
            raise ValueError(f"`{weight.name}` is {weight.shape} of kind {weight.kind!r}")
    for name, stored in found.files.items():
        if not (isinstance(stored.bytes, int) and isinstance(stored.sha256, str)):
            raise ValueError(f"`{name}` has {stored.bytes!r} bytes")
    if not all(isinstance(name, str) for name in (*found.rest, *found.shard_of, *found.shard_of.values())):
        raise ValueError("a name is a text")


def check_files(folder: Path, found: Manifest) -> None:
    """Every file is there and has its size; all but the shards have their hash, which takes a millisecond a megabyte."""
    for name, stored in found.files.items():
        check_size(folder / name, stored)
        if name not in found.shards:
            if stored.bytes > limits.TABLE:
                raise InputError(f"`{folder / name}` has {stored.bytes:,} bytes and holds no weights", "do not trust this artifact")
            check_hash(folder / name, stored)


def check_size(path: Path, stored: Stored) -> None:
    inside(path.parent, path)
    if not path.is_file():
        raise InputError(f"`{path}` is missing", HINT)
    if (size := path.stat().st_size) != stored.bytes:
        raise InputError(f"`{path}` has {size:,} bytes, {NAME} says {stored.bytes:,}", HINT)


def check_hash(path: Path, stored: Stored) -> None:
    if (digest := sha256_of(path)) != stored.sha256:
        raise InputError(f"`{path}` was changed: its sha256 is {digest[:12]}..., {NAME} says {stored.sha256[:12]}...", HINT)


def seal(folder: Path, found: Manifest) -> None:
    """Writes what is made of the rest: the index, config.json for transformers, and fewbits.json with the hash of every other file."""
    size = sum((folder / shard).stat().st_size for shard in found.shards)
    index = {"metadata": {"total_size": size}, "weight_map": dict(found.shard_of)}
    (folder / INDEX).write_text(json.dumps(index, indent=1))
    _announce(folder / "config.json")
    files = {
        path.name: Stored(path.stat().st_size, sha256_of(path)) for path in sorted(folder.iterdir()) if path.is_file() and path.name != NAME
    }
    about = {
        "schema": ".".join(map(str, SCHEMA)),
        "provenance": asdict(found.provenance),
        "formats": dict(sorted(found.formats.items())),
        "files": {name: asdict(stored) for name, stored in files.items()},
        "verdicts": dict(found.verdicts),
        "weights": [asdict(weight) for weight in found.weights],
        "rest": list(found.rest),
        "errors": dict(found.errors),
        "outcomes": dict(found.outcomes),
    }
    (folder / NAME).write_text(to_json(about))


def _announce(path: Path) -> None:
    """transformers looks into config.json for who can load the weights. It would also compute in the type that they were published in:
    the kernels sum in float32, and a CPU is slow at halves, so float32 is what it finds unless the user asks for another."""
    config = source_config(json.loads(path.read_text(encoding="utf-8")))
    published = {key: config.pop(key) for key in ("dtype", "torch_dtype") if key in config}
    about = {"quant_method": METHOD, "schema": ".".join(map(str, SCHEMA)), "published": published}
    path.write_text(json.dumps(config | {"dtype": "float32", "quantization_config": about}, indent=2) + "\n", encoding="utf-8")


def source_config(config: dict[str, Any]) -> dict[str, Any]:
    """The content of config.json as the source had it: what `seal` put in is taken out."""
    about = config.get("quantization_config")
    if not isinstance(about, dict) or about.get("quant_method") != METHOD:
        return config
    published: dict[str, Any] = about.get("published", {})
    return {key: value for key, value in config.items() if key not in ("quantization_config", "dtype")} | published


def _provenance(row: Mapping[str, Any]) -> Provenance:
    machine = row.get("machine")
    return replace(_known(Provenance, row), machine=_known(Machine, machine) if machine else None)


def _schema(said: Any, folder: Path) -> tuple[int, int]:
    major, _, minor = str(said).partition(".")
    schema = int(major), int(minor or 0)
    ours = ".".join(map(str, SCHEMA))
    if schema[0] > SCHEMA[0]:
        raise InputError(f"`{folder}` has schema {said}, this fewbits reads up to schema {ours}", "update fewbits, or make it anew")
    if schema[0] < 1:
        raise ValueError(f"there is no schema {said}")
    return schema


def _known(kind: type[_Row], row: Mapping[str, Any]) -> _Row:
    """Of a row only what this version has fields for: a newer minor may say more."""
    return kind(**{each.name: row[each.name] for each in fields(kind) if each.name in row})  # type: ignore[arg-type]
