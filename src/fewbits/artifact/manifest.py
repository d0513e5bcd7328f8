"""fewbits.json: the contents of an artifact, its origin, and the hash of every other file in the folder. Loads no torch.

A schema is "major.minor". A minor version adds fields that older readers ignore. A major version changes the meaning of fields: newer ones
than this are refused. Formats have their own versions, for the layout of their parts.

The plan is not in here. plan.json alone says which format a weight has, because it is the file that a person edits and gives to `--plan`.
Its hash is here, so that an artifact whose plan.json was changed in place is refused.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fewbits import formats
from fewbits.artifact import machine as machines
from fewbits.artifact.machine import Machine
from fewbits.devices import processor
from fewbits.errors import InputError
from fewbits.model.weights import Weight
from fewbits.store import untrusted
from fewbits.store.files import sha256_of, to_json
from fewbits.store.untrusted import inside, plain, read_json

if TYPE_CHECKING:
    from fewbits.planning import Plan

NAME = "fewbits.json"
INDEX = "model.safetensors.index.json"  # transformers' own: which file holds each tensor
SCHEMA = (2, 0)
HINT = "fetch it again, or make it anew with `fewbits quantize`"
METHOD = "fewbits"  # the name in config.json by which transformers finds the quantizer
_Record = TypeVar("_Record")


@dataclass(frozen=True)
class Provenance:
    source: str  # owner/name of a model of the hub, else the name of the folder or file, not its path
    sha256: str
    fewbits: str
    kernels: int | None = None  # version of the kernels' interface; None: an older artifact, which does not store it
    calibration: str | None = None  # sha256 of the calibration text; None: none was used
    machine: Machine | None = None  # where it was calibrated; None: it was not, and any machine gives these bytes


@dataclass(frozen=True)
class FileRecord:
    """Size and hash of a file when it was written."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    weights: tuple[Weight, ...]
    rest: tuple[str, ...]
    provenance: Provenance
    shard_of: Mapping[str, str]  # which file holds each tensor
    formats: Mapping[str, int] = field(default_factory=dict)  # formats in use, with the version of their layout
    outcomes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # how each weight's codes were chosen
    errors: Mapping[str, float] = field(default_factory=dict)  # by weight: |decoded - float| / |float|, in the Frobenius norm
    verdicts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # by runtime, the latest
    files: Mapping[str, FileRecord] = field(default_factory=dict)  # all but fewbits.json itself; empty in schema 1
    layout: str | None = None  # the target whose names and order of rows the weights have; None: those of the transformers module
    schema: tuple[int, int] = SCHEMA

    @property
    def shards(self) -> tuple[str, ...]:
        return tuple(sorted(set(self.shard_of.values())))


def provenance(source: str, sha256: str, calibration: str | None = None) -> Provenance:
    return Provenance(source, sha256, version("fewbits"), processor.ABI, calibration, machines.here() if calibration else None)


def said(origin: Provenance, plan: Plan) -> dict[str, str]:
    """The origin as metadata of an exported file. Its length does not depend on the values, so that sizes are known beforehand: without
    calibration the hash is that of an empty text."""
    return {
        "fewbits.version": origin.fewbits,
        "fewbits.source": origin.source,
        "fewbits.source_sha256": origin.sha256,
        "fewbits.calibration_sha256": origin.calibration or hashlib.sha256(b"").hexdigest(),
        "fewbits.plan_sha256": hashlib.sha256(plan.to_json().encode()).hexdigest(),
    }


def graph_metadata(origin: Provenance, plan: Plan) -> dict[str, str]:
    """The same for a graph, whose metadata has no room for a whole plan."""
    counts = sorted(Counter(entry.format for entry in plan.entries).items())
    return said(origin, plan) | {
        "fewbits.plan": ", ".join(f"{count} x {name}" for name, count in counts),
        "fewbits.bits_per_weight": f"{plan.bits_per_weight:.4f}",
    }


def version_of(format_name: str) -> int:
    """Of the layout of a format's parts."""
    return formats.get(format_name).version


def read(folder: Path) -> Manifest:
    path = folder / NAME
    content = read_json(path, "a fewbits artifact is a folder with fewbits.json in it")
    try:
        schema = _schema(content["schema"], folder)
        shard_of = dict(content["files"]) if schema[0] == 1 else dict(read_json(folder / INDEX, HINT)["weight_map"])
        files = {} if schema[0] == 1 else {name: _known(FileRecord, row) for name, row in content["files"].items()}
        manifest = Manifest(
            weights=tuple(_known(Weight, row | {"shape": (row["shape"][0], row["shape"][1])}) for row in content["weights"]),
            rest=tuple(content["rest"]),
            provenance=_provenance(content["provenance"]),
            shard_of=shard_of,
            formats={name: int(number) for name, number in content.get("formats", {}).items()},
            outcomes=dict(content.get("outcomes", {})),
            errors=dict(content.get("errors", {})),
            verdicts=dict(content.get("verdicts", {})),
            files=files,
            layout=None if content.get("layout") is None else str(content["layout"]),
            schema=schema,
        )
        _check_rows(manifest)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as failure:
        raise InputError(f"`{path}` is damaged: {failure!r}", HINT) from failure
    for name in {*manifest.shard_of.values(), *manifest.files}:
        if not plain(name):  # an artifact must not lead out of its folder
            raise InputError(f"`{path}` names a file outside its folder: {name[:300]!a}", "do not trust this artifact")
    if schema[0] > 1 and (unsaid := sorted({INDEX, *manifest.shards} - manifest.files.keys())):
        raise InputError(f"`{path}` has no hash of `{unsaid[0]}`", HINT)
    for name, number in manifest.formats.items():
        if name not in formats.all():
            raise InputError(f"`{folder}` holds {name}, a format that this fewbits does not know", "update fewbits")
        if number > (ours := version_of(name)):
            raise InputError(f"`{folder}` holds {name} in version {number}, this fewbits reads version {ours}", "update fewbits")
    return manifest


def _check_rows(manifest: Manifest) -> None:
    """Types that a dataclass does not check."""
    for weight in manifest.weights:
        words = all(isinstance(word, str) for word in (weight.name, weight.kind, weight.dtype, weight.tied_to or "", weight.together or ""))
        if not words or not all(isinstance(side, int) and 0 < side <= 1 << 31 for side in weight.shape):
            raise ValueError(f"`{weight.name}` is {weight.shape} of kind {weight.kind!r}")
    for name, stored in manifest.files.items():
        if not (isinstance(stored.bytes, int) and isinstance(stored.sha256, str)):
            raise ValueError(f"`{name}` has {stored.bytes!r} bytes")
    if not all(isinstance(name, str) for name in (*manifest.rest, *manifest.shard_of, *manifest.shard_of.values())):
        raise ValueError("a name is a text")


def check_files(folder: Path, manifest: Manifest) -> None:
    """Every file exists and has its size, and all but the shards have their hash (a millisecond per megabyte)."""
    for name, stored in manifest.files.items():
        check_size(folder / name, stored)
        if name not in manifest.shards:
            if stored.bytes > untrusted.TABLE:
                raise InputError(f"`{folder / name}` has {stored.bytes:,} bytes and holds no weights", "do not trust this artifact")
            check_hash(folder / name, stored)


def check_size(path: Path, stored: FileRecord) -> None:
    inside(path.parent, path)
    if not path.is_file():
        raise InputError(f"`{path}` is missing", HINT)
    if (size := path.stat().st_size) != stored.bytes:
        raise InputError(f"`{path}` has {size:,} bytes, {NAME} says {stored.bytes:,}", HINT)


def check_hash(path: Path, stored: FileRecord) -> None:
    if (digest := sha256_of(path)) != stored.sha256:
        raise InputError(f"`{path}` was changed: its sha256 is {digest[:12]}..., {NAME} says {stored.sha256[:12]}...", HINT)


def seal(folder: Path, manifest: Manifest) -> None:
    """Completes the folder: the index, config.json for transformers, and fewbits.json with the hash of every other file."""
    size = sum((folder / shard).stat().st_size for shard in manifest.shards)
    index = {"metadata": {"total_size": size}, "weight_map": dict(manifest.shard_of)}
    (folder / INDEX).write_text(json.dumps(index, indent=1))
    if manifest.layout is None:
        _announce(folder / "config.json")
    files = {
        path.name: FileRecord(path.stat().st_size, sha256_of(path))
        for path in sorted(folder.iterdir())
        if path.is_file() and path.name != NAME
    }
    about = {
        "schema": ".".join(map(str, SCHEMA)),
        "provenance": asdict(manifest.provenance),
        "formats": dict(sorted(manifest.formats.items())),
        "files": {name: asdict(stored) for name, stored in files.items()},
        "verdicts": dict(manifest.verdicts),
        "weights": [asdict(weight) for weight in manifest.weights],
        "rest": list(manifest.rest),
        "errors": dict(manifest.errors),
        "outcomes": dict(manifest.outcomes),
    } | ({"layout": manifest.layout} if manifest.layout else {})
    (folder / NAME).write_text(to_json(about))


def _announce(path: Path) -> None:
    """Tells transformers in config.json that fewbits loads these weights. It would also compute in the published type, but the kernels sum
    in float32 and a CPU is slow at 16 bits: so the type is float32, unless the user asks for another."""
    config = source_config(json.loads(path.read_text(encoding="utf-8")))
    published = {key: config.pop(key) for key in ("dtype", "torch_dtype") if key in config}
    about = {"quant_method": METHOD, "schema": ".".join(map(str, SCHEMA)), "published": published}
    path.write_text(json.dumps(config | {"dtype": "float32", "quantization_config": about}, indent=2) + "\n", encoding="utf-8")


def source_config(config: dict[str, Any]) -> dict[str, Any]:
    """The content of config.json without what `seal` added."""
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


def _known(kind: type[_Record], row: Mapping[str, Any]) -> _Record:
    """Only the fields that this version knows: a newer minor version may have more."""
    return kind(**{each.name: row[each.name] for each in fields(kind) if each.name in row})  # type: ignore[arg-type]
