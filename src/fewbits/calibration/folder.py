"""Statistics on disk: a folder with two safetensors files per block, and a JSON file that describes them.

    statistics.json                 schema, hashes of model and data, samples, options, counts of experts, block and site of each weight
    input-00003.safetensors         `SITE:FIELD` of block 3: moments, ranges, histogram; a symmetric matrix as its upper triangle
    gradient-00003.safetensors      `WEIGHT:FIELD` of block 3
    input-00003-1.safetensors       of block 3, the experts that were recorded in a second pass
    input-00003-pooled.safetensors  `STACK:FIELD`: sums over all experts of a layer, from which those that saw little borrow

A site is an input that one or more weights read, named after the first of them. The output matrix and the embeddings are in a block after
the last one. The folders of two runs over the same model can be added (`merge`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fewbits.calibration import checks, pooled
from fewbits.calibration.histogram import Histogram
from fewbits.calibration.statistics import InputStatistics, Lookup, Moment, WeightStatistics
from fewbits.calibration.triangles import Triangles, pack
from fewbits.errors import InputError
from fewbits.store.files import Staged, sha256_of
from fewbits.store.mapped import Room
from fewbits.store.tensor_file import SafetensorError, TensorFile
from fewbits.store.untrusted import inside, read_json

if TYPE_CHECKING:
    from fewbits.model.weights import Weight

SCHEMA = 1
ABOUT = "statistics.json"
_HINT = "make it anew with `fewbits calibrate`"
_SUMS = {"count", "total", "square", "moment", "sensitivity", "gradient_square", "fisher_square", "fisher", "outputs", "usage"}
_SYMMETRIC = {"moment", "fisher"}
_SUMS_HELD = 1 << 30  # bytes of sums in memory while runs are merged; those of a large mixture go to mapped files
_UNREACHED = 0.5  # tokens that an expert counts for that was given none: the next text may have some
WHOLE_COLUMNS = 2048  # columns up to which triangles are unpacked when read: everything is then faster, for 67 MB a weight


class Statistics:
    """An opened folder of statistics; tensors are read when asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._shapes: dict[str, tuple[int, int]] = {}
        try:
            self.about: dict[str, Any] = dict(read_json(folder / ABOUT, "`fewbits calibrate` writes a folder with statistics.json in it"))
            if self.about["schema"] != SCHEMA:
                raise InputError(f"`{folder}` has schema {self.about['schema']}, this fewbits reads schema {SCHEMA}", _HINT)
            self._weights: dict[str, dict[str, Any]] = {str(name): _place(row) for name, row in self.about["weights"].items()}
            self.about["runs"] = [_run(run) for run in self.about["runs"]]
            self.about["experts"] = {str(name): [int(n) for n in counts] for name, counts in self.about.get("experts", {}).items()}
            self._borrowed = {str(stack): int(tokens) for stack, tokens in self.about.get("borrowed", {}).items()}
            self.about["model_sha256"] = str(self.about.get("model_sha256", ""))  # empty: matches no model
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as failure:
            raise InputError(f"`{folder / ABOUT}` is damaged: {failure!r}", _HINT) from failure

    def expect(self, weights: Iterable[Weight]) -> Statistics:
        """From now on, statistics that do not have the shape of these weights are refused when they are asked for."""
        self._shapes = {weight.name: weight.shape for weight in weights}
        return self

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._weights)

    @property
    def model_sha256(self) -> str:
        return str(self.about["model_sha256"])

    @cached_property
    def digest(self) -> str:
        """sha256 over all files: identifies the statistics that something was made with. Takes a second for every gigabyte or two."""
        digest = hashlib.sha256()
        for path in sorted(path for path in self.folder.iterdir() if path.is_file()):
            digest.update(f"{path.name} {sha256_of(path)}\n".encode())
        return digest.hexdigest()

    def of(self, weight: str, alone: bool = False) -> WeightStatistics:
        """An expert's with what it borrows from its layer (`pooled`), or its own `alone`."""
        place = self._weights.get(weight)
        if place is None:
            raise InputError(f"`{self.folder}` has no statistics of `{weight}`", "were they taken of another model?")
        block, part = place["block"], place["part"]
        inputs = {} if place["site"] is None else self._input_fields(weight)
        seen = input_of(dict(inputs)) if inputs else None
        gradient = self._fields("gradient", block, weight, part)
        lookup = self._fields("gradient", block, f"{weight}:lookup")
        for fields in (gradient, lookup):
            checks.check("gradient", fields, weight, self._shapes.get(weight))
        if lookup and "usage" not in lookup:
            raise InputError(f"the statistics of `{weight}` do not say how often each row was looked up", _HINT)
        if seen is not None and "fisher_square" in gradient and gradient["fisher_square"].shape[1] != seen.cols:
            raise InputError(f"the statistics of `{weight}` are of two different widths", _HINT)
        tokens, lent = seen.tokens() if seen else 0, 0
        stack = weight.rpartition(".")[0]
        if seen is not None and not alone and (lent := self._borrowed.get(stack, 0)):
            pools = [self._fields(kind, block, stack, pooled.PART) for kind in ("input", "gradient")]
            if not pools[0]:
                raise InputError(f"`{self.folder / file_name('input', block, pooled.PART)}` lacks `{stack}`", _HINT)
            for kind, fields in zip(("input", "gradient"), pools, strict=True):
                checks.check(kind, fields, stack, self._shapes.get(weight))
            seen = input_of(pooled.lent(inputs, pools[0], lent, pools[0]["count"]))
            gradient = pooled.lent(gradient, pools[1], lent, pools[0]["count"])
        if seen is not None and not seen.tokens():
            return WeightStatistics(None)  # an expert that no token was given to, in a layer that has nothing to lend
        counted = max(tokens, _UNREACHED) if lent else tokens
        return WeightStatistics(
            input=seen,
            sensitivity=gradient.get("sensitivity"),
            gradient_square=gradient.get("gradient_square"),
            fisher_square=gradient.get("fisher_square"),
            fisher=gradient.get("fisher"),
            outputs=gradient.get("outputs"),
            lookup=Lookup(lookup["usage"], lookup.get("fisher_square"), lookup.get("fisher")) if lookup else None,
            share=1.0 if seen is None else min(1.0, counted / max(1, self._tokens)),
            borrowed=lent / (tokens + lent) if lent else 0.0,
        )

    @property
    def _tokens(self) -> int:
        return sum(int(run.get("tokens", 0)) for run in self.about["runs"])

    def input(self, weight: str) -> InputStatistics:
        """Of what the weight read itself: nothing is borrowed."""
        return input_of(self._input_fields(weight))

    def _input_fields(self, weight: str) -> dict[str, Any]:
        place = self._weights[weight]
        fields = self._fields("input", place["block"], place["site"], place["part"])
        checks.check("input", fields, place["site"], self._shapes.get(weight))
        return fields

    def site(self, weight: str) -> str | None:
        """The site whose input this weight reads; None: an embedding."""
        site: str | None = self._weights[weight]["site"]
        return site

    def kv(self, block: int) -> dict[str, Tensor]:
        return self._fields("input", block, "kv")

    def _fields(self, kind: str, block: int, name: str, part: str = "") -> dict[str, Any]:
        path = self.folder / file_name(kind, block, part)
        if not path.is_file():
            return {}
        try:
            file, prefix = TensorFile(inside(self.folder, path)), f"{name}:"
            keys = [key for key in file.keys() if key.startswith(prefix) and ":" not in key.removeprefix(prefix)]  # noqa: SIM118
            return {key.removeprefix(prefix): _opened(key, file.tensor(key)) for key in keys}
        except (SafetensorError, OSError) as failure:
            raise InputError(f"`{path}` cannot be read: {failure}", _HINT) from failure


def _place(place: Any) -> dict[str, Any]:
    """Block, part and site of a weight, checked."""
    block, site, part = place["block"], place["site"], place.get("part", "")
    if not (isinstance(block, int) and 0 <= block < 100_000 and isinstance(site, str | None) and (part == "" or str(part).isdigit())):
        raise ValueError(f"a weight's statistics are in block {block!r} at {site!r}")
    return dict(place) | {"part": part}


def _run(run: Any) -> dict[str, Any]:
    counted = {key: int(run[key]) for key in ("samples", "tokens") if key in run}
    return dict(run) | counted | {"data_sha256": str(run["data_sha256"])}


def file_name(kind: str, block: int, part: str = "") -> str:
    return f"{kind}-{block:05}{f'-{part}' if part else ''}.safetensors"


def files_of(folder: Path, block: int) -> list[Path]:
    """All that hold statistics of this block."""
    return [
        path for kind in ("gradient", "input") for path in sorted(folder.glob(f"{kind}-{block:05}[-.]*")) if path.suffix == ".safetensors"
    ]


def save(folder: Path, kind: str, block: int, tensors: Mapping[str, Tensor]) -> None:
    from safetensors.torch import save_file

    save_file(dict(tensors), folder / file_name(kind, block))


def packed(statistics: Mapping[str, Mapping[str, Moment | None]]) -> dict[str, Tensor]:
    """The tensors of a file, by `NAME:FIELD`. Large symmetric matrices are packed in place, which overwrites those in `statistics`."""
    return {
        f"{name}:{field}": _packed(field, tensor)
        for name, fields in statistics.items()
        for field, tensor in fields.items()
        if tensor is not None
    }


def input_fields(statistics: InputStatistics) -> dict[str, Moment | None]:
    histogram = statistics.histogram.to_tensors() if statistics.histogram else {}
    plain = {key: value for key, value in vars(statistics).items() if key != "histogram"}
    return plain | {f"histogram_{key}": value for key, value in histogram.items()}


def input_of(fields: dict[str, Any]) -> InputStatistics:
    histogram = {key.removeprefix("histogram_"): fields.pop(key) for key in list(fields) if key.startswith("histogram_")}
    return InputStatistics(**fields, histogram=Histogram.from_tensors(histogram) if histogram else None)


def merge(folders: list[Path], out: Path) -> Statistics:
    """Two or more runs over the same model as one: sums are added, extremes are compared, inputs stored in full are concatenated."""
    parts = [Statistics(folder) for folder in folders]
    first = parts[0]
    for other in parts[1:]:
        if other.model_sha256 != first.model_sha256:
            raise InputError(f"`{other.folder}` is of another model than `{first.folder}`", "merge statistics of one model")
        if other._weights != first._weights:
            raise InputError(f"`{other.folder}` was taken with other options than `{first.folder}`", "use the same options for both")
        if _expert_counts(other) != _expert_counts(first):
            raise InputError(f"`{other.folder}` counts other experts than `{first.folder}`", "merge statistics of one model")
    with Staged(out, marker=ABOUT) as folder:
        folder.mkdir()
        for path in sorted(first.folder.glob("*.safetensors")):
            _merge_files([part.folder / path.name for part in parts], folder / path.name)
        runs = [run for part in parts for run in part.about["runs"]]
        experts = {
            name: [sum(c) for c in zip(*(part.about["experts"][name] for part in parts), strict=True)] for name in first.about["experts"]
        }
        borrowed = {stack: max(part._borrowed.get(stack, 0) for part in parts) for stack in first._borrowed}
        (folder / ABOUT).write_text(json.dumps(first.about | {"runs": runs, "experts": experts, "borrowed": borrowed}, indent=1))
    return Statistics(out)


def _expert_counts(statistics: Statistics) -> dict[str, int]:
    return {name: len(counts) for name, counts in statistics.about["experts"].items()}


def _merge_files(paths: list[Path], out: Path) -> None:
    from safetensors.torch import save_file

    for path in paths:
        if not path.is_file():
            raise InputError(f"`{path}` is missing", "use the same options for all runs")
    merged, room = _loaded(paths[0]), Room(out.parent, _SUMS_HELD)
    copied: set[str] = set()  # sums that are no longer views of the first file, and may be added to in place
    for path in paths[1:]:
        other = _loaded(path)
        if other.keys() != merged.keys():
            raise InputError(f"`{path}` holds other tensors than `{paths[0]}`", "use the same options for all runs")
        histograms = [key.removesuffix("_counts") for key in merged if key.endswith(":histogram_counts")]
        joined = {name: _histogram(merged, name) for name in histograms}
        for name, histogram in joined.items():
            histogram.merge(_histogram(other, name))
        for key, tensor in other.items():
            field = key.rpartition(":")[2]
            _check_alike(field, merged[key], tensor)
            if field in _SUMS:
                into = merged[key] if key in copied else room.new(tensor.shape, tensor.dtype)
                merged[key] = torch.add(merged[key], tensor, out=into)
                copied.add(key)
            else:
                merged[key] = _joined(field, merged[key], tensor)
        for name, histogram in joined.items():
            merged |= {f"{name}_{field}": tensor for field, tensor in histogram.to_tensors().items()}
    save_file(merged, out)


def _loaded(path: Path) -> dict[str, Tensor]:
    """The tensors of a file, checked as `Statistics.of` does: a sum of two runs must not hide what is wrong with one."""
    try:
        file = TensorFile(inside(path.parent, path))
        tensors = {key: file.tensor(key) for key in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as failure:
        raise InputError(f"`{path}` cannot be read: {failure}", _HINT) from failure
    groups: dict[str, dict[str, Any]] = {}
    for key, tensor in tensors.items():
        name, _, field = key.rpartition(":")
        groups.setdefault(name, {})[field] = _opened(key, tensor)
    for name, fields in groups.items():
        if name != "kv":
            checks.check(path.name.partition("-")[0], fields, name)
    return tensors


def _check_alike(field: str, one: Tensor, other: Tensor) -> None:
    if one.shape[1:] != other.shape[1:] or (field in _SUMS and one.shape != other.shape):
        raise InputError(f"{field} has {tuple(one.shape)} values in one run and {tuple(other.shape)} in another", _HINT)


def _joined(field: str, one: Tensor, other: Tensor) -> Tensor:
    if field.endswith("low"):
        return torch.minimum(one, other)
    if field.endswith("high"):
        return torch.maximum(one, other)
    if field in {"first", "first_half", "extremes", "some", "some_half"}:
        return torch.cat([one, other])
    assert field.startswith("histogram_"), field
    return one


def _histogram(tensors: dict[str, Tensor], name: str) -> Histogram:
    return Histogram.from_tensors({field: tensors[f"{name}_{field}"] for field in ("counts", "reach")})


def _packed(field: str, tensor: Any) -> Tensor:
    stored: Tensor = tensor.contiguous() if field not in _SYMMETRIC else tensor.stored if isinstance(tensor, Triangles) else pack(tensor)
    return stored


def _opened(key: str, stored: Tensor) -> Any:
    """A field as `checks` and `statistics` take it: a symmetric matrix as triangles, or in full if it is not wide."""
    if key.rpartition(":")[2] not in _SYMMETRIC:
        return stored
    try:
        triangles = Triangles(stored)
        return triangles.full() if triangles.shape[1] <= WHOLE_COLUMNS else triangles
    except ValueError as failure:
        raise InputError(f"`{key}` is {failure}", _HINT) from failure
