"""A quantized model on disk, before it is exported: packed parts, the plan, where it came from, config and tokenizer.

    fewbits.json               schema, source and calibration hashes, formats and their versions, errors, verdicts, the hash of every file
    plan.json                  the format of every weight, and why
    weights-00001.safetensors  `NAME.PART` for every part; `NAME` for a kept tensor
    model.safetensors.index.json, config.json, tokenizer...  as transformers reads them: it loads the folder once fewbits is imported

Opening one checks that all of it is there and fits together; `Artifact.check` reads every byte.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits import formats, kernels, manifest, outcomes, planning
from fewbits.allocator import give_back
from fewbits.checkpoints import limits
from fewbits.checkpoints.folder import first_line, inside, read_json, read_text
from fewbits.errors import InputError
from fewbits.files import Staged, sha256_of, to_json
from fewbits.manifest import Manifest, Provenance
from fewbits.progress import silent
from fewbits.tensor_files import SafetensorError, TensorFile
from fewbits.tensor_types import DTYPES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from fewbits.formats import Parts
    from fewbits.model import Model, Weight
    from fewbits.outcomes import Known, Stream
    from fewbits.planning import Plan
    from fewbits.progress import Progress

__all__ = ["Artifact", "Provenance", "add_verdict", "calibration_hash", "copy", "quantize", "write"]

PLAN = "plan.json"
_SHARD_BYTES = 1 << 28  # held in memory until they are written


class Artifact:
    """An artifact folder, opened; tensors are read when asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest = manifest.read(path)
        self.weights, self.rest = self.manifest.weights, self.manifest.rest
        self.outcomes, self.provenance = dict(self.manifest.outcomes), self.manifest.provenance
        self._open: dict[str, TensorFile] = {}
        manifest.check_files(path, self.manifest)
        self.plan = planning.read(read_text(path / PLAN, manifest.HINT), self.weights)
        self._check_types()

    @property
    def errors(self) -> Mapping[str, float]:
        """By weight, how far its decoded values are from the float ones: relative, in the Frobenius norm."""
        return self.manifest.errors

    @property
    def verdicts(self) -> Mapping[str, Mapping[str, Any]]:
        """What each runtime that ran it gave, as `Verdict.to_dict` says it."""
        return self.manifest.verdicts

    @cached_property
    def config(self) -> Any:
        """As the source had it: who can load the weights is between config.json and transformers, and another target has its own say."""
        from transformers import AutoConfig

        from fewbits.model import check_fit

        file = self.path / "config.json"
        limits.check(read_json(file, manifest.HINT), len(self.manifest.shard_of), file)
        try:
            found = AutoConfig.from_pretrained(self.path, local_files_only=True, trust_remote_code=False)
        except Exception as failure:
            raise InputError(f"`{file}` cannot be read: {first_line(failure)}", manifest.HINT) from failure
        about = getattr(found, "quantization_config", None)
        if about is not None and about.get("quant_method") == manifest.METHOD:
            import torch

            del found.quantization_config
            found.dtype = next((getattr(torch, name) for name in about.get("published", {}).values() if name), None)
        check_fit(found, self.weights, self.rest, self.path)
        return found

    @cached_property
    def tokenizer(self) -> Any:
        from fewbits.model import load_tokenizer

        return load_tokenizer(self.path)

    def save_assets(self, folder: Path) -> None:
        """Everything but the weights and what is fewbits' own, as the source had it: for targets that are folders themselves."""
        own = {manifest.NAME, manifest.INDEX, PLAN, *self.manifest.shards}
        for file in sorted(self.path.iterdir()):
            if file.is_file() and file.name not in own:
                shutil.copyfile(inside(self.path, file), folder / file.name)
        config = manifest.source_config(read_json(self.path / "config.json", manifest.HINT))
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")

    def parts(self, weight: Weight) -> Parts:
        fmt = formats.get(self.plan[weight.name].format)
        return {part: self._tensor(f"{weight.name}.{part}") for part in fmt.parts(weight.shape)}

    def tensor(self, name: str) -> Tensor:
        """One of `rest`."""
        return self._tensor(name)

    def decoded(self, weight: Weight) -> Tensor:
        """(rows, cols) float32: the values that every runtime should compute with."""
        return kernels.decode(formats.get(self.plan[weight.name].format), self.parts(weight), weight.shape)

    def module(self) -> Any:
        """The float32 transformers module with decoded weights."""
        from fewbits.model import filled_module

        matrices = ((weight, self.decoded(weight)) for weight in self.weights)
        return filled_module(self.config, matrices, ((name, self.tensor(name)) for name in self.rest))

    def check(self, progress: Progress[Any] = silent) -> None:
        """Every byte: the hashes of the shards, and that all weights decode to finite values. An error names what is wrong.

        Not done on opening: it takes 2 ns a weight on one core, 0.3 s for 135 million and minutes for the largest.
        """
        shards = [name for name in self.manifest.files if name in self.manifest.shards]
        for name in progress(shards, len(shards), "checking hashes"):
            manifest.check_hash(self.path / name, self.manifest.files[name])
        for weight in progress(self.weights, len(self.weights), "checking weights"):
            if not _finite(self.decoded(weight)):
                fmt = self.plan[weight.name].format
                raise InputError(f"`{weight.name}` of `{self.path}` is not finite: a scale of its {fmt} is damaged", manifest.HINT)
        for name in self.rest:
            tensor = self.tensor(name)
            if tensor.is_floating_point() and not _finite(tensor):
                raise InputError(f"`{name}` of `{self.path}` is not finite", manifest.HINT)

    def _check_types(self) -> None:
        """From the headers alone: every tensor is there, every part as its format stores it."""
        for weight in self.weights:
            for part, spec in formats.get(self.plan[weight.name].format).parts(weight.shape).items():
                name = f"{weight.name}.{part}"
                dtype, shape = self._header(name)
                if (dtype, shape) != (spec.dtype, spec.shape):
                    stored, wanted = f"{dtype} {shape}", f"{spec.dtype} {spec.shape}"
                    raise InputError(f"`{name}` of `{self.path}` is {stored}; its format stores {wanted}", manifest.HINT)
        for name in self.rest:
            self._header(name)

    def _header(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Type and shape."""
        file = self._file(name)
        try:
            stored = file.dtype(name)
            return DTYPES.get(stored, stored), file.shape(name)
        except SafetensorError as failure:
            raise InputError(f"`{name}` is not in `{self.path / self.manifest.shard_of[name]}`", manifest.HINT) from failure

    def _tensor(self, name: str) -> Tensor:
        return self._file(name).tensor(name)

    def _file(self, name: str) -> TensorFile:
        if name not in self.manifest.shard_of:
            raise InputError(f"`{self.path}` does not say where `{name}` is", manifest.HINT)
        file = self.manifest.shard_of[name]
        try:
            if file not in self._open:
                self._open[file] = TensorFile(self.path / file)
        except (SafetensorError, OSError) as failure:
            raise InputError(f"`{self.path / file}` cannot be read: {failure}", manifest.HINT) from failure
        return self._open[file]


def write(model: Model, plan: Plan, path: Path, quantized: Stream, calibration: str | None = None) -> Artifact:
    """Parts as they come, a shard at a time: never the whole model in memory. All or nothing: renamed when complete.

    `calibration`: the hash of the text that the codes were fitted to, as `calibration_hash` gives it.
    """
    from safetensors.torch import save_file

    how: dict[str, dict[str, object]] = {}
    errors: dict[str, float] = {}
    with Staged(path, marker=manifest.NAME) as folder:
        folder.mkdir()
        model.checkpoint.save_assets(folder)
        shard_of: dict[str, str] = {}
        held: dict[str, Tensor] = {}

        def flush() -> None:
            name = f"weights-{len(set(shard_of.values())) + 1:05}.safetensors"
            save_file(held, folder / name, metadata={"format": "pt"})
            (folder / name).chmod(0o644)  # as the files beside it
            shard_of.update(dict.fromkeys(held, name))
            held.clear()
            give_back()

        def hold(tensors: dict[str, Tensor]) -> None:
            held.update({name: tensor.contiguous() for name, tensor in tensors.items()})
            if sum(tensor.nbytes for tensor in held.values()) >= _SHARD_BYTES:
                flush()

        corrected: dict[str, Tensor] = {}
        for weight, outcome in quantized:
            hold({f"{weight.name}.{part}": tensor for part, tensor in outcome.parts.items()})
            how[weight.name] = {key: value for key, value in vars(outcome).items() if key not in {"parts", "bias"} and value}
            errors[weight.name] = _error(model, plan, weight, outcome.parts)
            if outcome.bias is not None:
                corrected[f"{weight.name}.bias"] = outcome.bias
            give_back()
        for name in model.rest:
            hold({name: corrected[name] if name in corrected else model.tensor(name)})
        if held:
            flush()
        (folder / PLAN).write_text(plan.to_json())
        used = {entry.format: manifest.version_of(entry.format) for entry in plan.entries}
        origin = manifest.provenance(model.path.name, model.fingerprint, calibration)
        manifest.seal(folder, Manifest(model.weights, model.rest, origin, shard_of, used, how, errors))
    return Artifact(path)


def quantize(model: Model, plan: Plan, path: Path, progress: Progress[Weight], statistics: Known | None = None) -> Artifact:
    """Every weight by its plan, streamed into an artifact folder."""
    return write(model, plan, path, outcomes.independent(model, plan, statistics, progress), calibration_hash(statistics))


def copy(artifact: Artifact, folder: Path, plan: Plan, progress: Progress[Any]) -> None:
    """The same weights in a new folder, checked on the way. The plan may say other prices, and an older schema is brought up to date."""
    artifact.check(progress)
    folder.mkdir()
    artifact.save_assets(folder)
    shards = artifact.manifest.shards
    for name in progress(shards, len(shards), "copying"):
        shutil.copyfile(artifact.path / name, folder / name)
    (folder / PLAN).write_text(plan.to_json())
    used = {entry.format: manifest.version_of(entry.format) for entry in plan.entries}
    manifest.seal(folder, replace(artifact.manifest, formats=used))


def add_verdict(path: Path, verdict: Mapping[str, Any]) -> None:
    """Kept in the artifact's fewbits.json, in place of an earlier one of the same runtime. Whole or not at all; nothing else changes."""
    Artifact(path)  # what cannot be opened is not given a verdict
    file = path / manifest.NAME
    about = read_json(file, manifest.HINT)
    about["verdicts"] = about.get("verdicts", {}) | {str(verdict["runtime"]): dict(verdict)}
    with Staged(file) as staged:
        staged.write_text(to_json(about))


def calibration_hash(statistics: Known | None) -> str | None:
    """sha256 of the text that these statistics were taken of; of the file itself where that is all there is (an importance matrix)."""
    import hashlib

    from fewbits.calibration.importance_matrix import ImportanceMatrix
    from fewbits.calibration.storing import Statistics
    from fewbits.preparation import Rescaled

    if isinstance(statistics, Rescaled):
        statistics = statistics.original
    if isinstance(statistics, ImportanceMatrix):
        return sha256_of(statistics.path)
    if not isinstance(statistics, Statistics):
        return None
    runs = [str(run["data_sha256"]) for run in statistics.about["runs"]]
    return runs[0] if len(runs) == 1 else hashlib.sha256("\n".join(runs).encode()).hexdigest()


def _error(model: Model, plan: Plan, weight: Weight, parts: Parts) -> float:
    w = model.load(weight)
    norm = float(w.norm())
    away = float(kernels.decode(formats.get(plan[weight.name].format), parts, weight.shape).sub_(w).norm())
    return float(f"{away / norm:.4g}") if norm else away


def _finite(tensor: Tensor) -> bool:
    """By its extremes, which a NaN becomes: ten times as fast as asking every element."""
    return not tensor.numel() or all(extreme.isfinite() for extreme in tensor.aminmax())
