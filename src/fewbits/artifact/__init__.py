"""A model and a plan in, a folder with the quantized model out (an artifact), which targets then export.

    fewbits.json               schema, source and calibration hashes, formats and their versions, errors, verdicts, the hash of every file
    plan.json                  the format of every weight, and why
    weights-00001.safetensors  `NAME.PART` for every part of a weight; `NAME` for norms and biases
    model.safetensors.index.json, config.json, tokenizer...  for transformers, which loads the folder once fewbits is imported
    import-fewbits-first.safetensors                         and refuses it if it is not

Opening an artifact checks that its files are complete and fit together; `Artifact.check` reads every byte.

manifest.py       fewbits.json                                 machine.py      the machine that codes depend on
outcomes.py       the plan's codes of every weight             units.py        one weight, by a worker
tuned.py          scales of all weights tuned together        preparation.py  channels rescaled, ranges of activations
maker.py          all of it, for one plan                      accuracy_loop.py  plans made until a file is accurate enough
draft.py          an artifact without codes, for dry runs      written.py      hashes of exported files
stand_in.py       what makes transformers refuse the folder without fewbits
input_prices.py   what it costs to round the inputs of its weights
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits import formats, kernels, planning
from fewbits.artifact import manifest, stand_in
from fewbits.artifact.manifest import Manifest, Provenance
from fewbits.errors import InputError
from fewbits.model import limits
from fewbits.model.checkpoints import cards
from fewbits.model.gguf import metadata
from fewbits.progress import silent
from fewbits.store.dtypes import DTYPES
from fewbits.store.files import Staged, sha256_of, to_json
from fewbits.store.heap import return_free_memory
from fewbits.store.tensor_file import SafetensorError, TensorFile
from fewbits.store.untrusted import first_line, inside, read_json, read_text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from fewbits.artifact.outcomes import StatisticsSource, Stream
    from fewbits.formats import Parts
    from fewbits.model import Model
    from fewbits.model.weights import Weight
    from fewbits.planning import Plan
    from fewbits.progress import Progress

__all__ = ["Artifact", "Provenance", "add_verdict", "calibration_hash", "copy", "quantize", "write"]

PLAN = "plan.json"
SHARD_BYTES = 1 << 28  # held in memory until they are written


class Artifact:
    """An artifact folder, opened; tensors are read when asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest = manifest.read(path)
        self.weights, self.rest = self.manifest.weights, self.manifest.rest
        self.outcomes, self.provenance = dict(self.manifest.outcomes), self.manifest.provenance
        self._open: dict[str, TensorFile] = {}
        self.layout = self.manifest.layout
        manifest.check_files(path, self.manifest)
        self.plan = planning.read(read_text(path / PLAN, manifest.HINT), self.weights)
        self._check_types()

    @property
    def errors(self) -> Mapping[str, float]:
        """By weight, how far its decoded values are from the float ones: relative, in the Frobenius norm."""
        return self.manifest.errors

    @property
    def verdicts(self) -> Mapping[str, Mapping[str, Any]]:
        """By runtime, the latest verdict, as `Verdict.to_dict` gives it."""
        return self.manifest.verdicts

    @cached_property
    def config(self) -> Any:
        """The config of the source, without what was added to config.json for transformers to load the weights."""
        if self.layout and not (self.path / "config.json").is_file():
            return self._laid_out_config()
        from transformers import AutoConfig

        from fewbits.model.module import check_fit

        file = self.path / "config.json"
        limits.check(read_json(file, manifest.HINT), len(self.manifest.shard_of), file)
        try:
            config = AutoConfig.from_pretrained(self.path, local_files_only=True, trust_remote_code=False)
        except Exception as failure:
            raise InputError(f"`{file}` cannot be read: {first_line(failure)}", manifest.HINT) from failure
        about = getattr(config, "quantization_config", None)
        if about is not None and about.get("quant_method") == manifest.METHOD:
            import torch

            del config.quantization_config
            config.dtype = next((getattr(torch, name) for name in about.get("published", {}).values() if name), None)
        if self.layout is None:
            check_fit(config, self.weights, self.rest, self.path)
        return config

    def _laid_out_config(self) -> Any:
        """Of a source without a checkpoint."""
        from fewbits.model.gguf import settings

        return settings.config_of(metadata.values(self.path / metadata.FILE), len(self.manifest.shard_of), self.path)

    @property
    def metadata_file(self) -> Path | None:
        """A GGUF without tensors, whose metadata the next GGUF gets; None: the source was no GGUF."""
        file = self.path / metadata.FILE
        return file if file.is_file() else None

    @cached_property
    def tokenizer(self) -> Any:
        from fewbits.model.tokenizer import load_tokenizer

        return load_tokenizer(self.path)

    def save_assets(self, folder: Path) -> None:
        """Config, tokenizer and the like as the source had them, without the weights and fewbits' files: for targets that are folders."""
        left_out = {manifest.NAME, manifest.INDEX, PLAN, cards.NAME, *self.manifest.shards}
        for file in sorted(self.path.iterdir()):
            if file.is_file() and file.name not in left_out:
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
        """(rows, cols) float32: the values that a runtime computes with."""
        return kernels.decode(formats.get(self.plan[weight.name].format), self.parts(weight), weight.shape)

    def expect_modules(self) -> Artifact:
        """The same artifact; an error if its weights are not those of transformers' modules."""
        if self.layout:
            hint = f"`fewbits export --to {self.layout}` writes its file, and that runtime runs it"
            raise InputError(f"the weights of `{self.path}` are laid out for {self.layout}, not as transformers' modules", hint)
        return self

    def module(self) -> Any:
        """The float32 transformers module with decoded weights."""
        self.expect_modules()
        from fewbits.model.module import filled_module

        matrices = ((weight, self.decoded(weight)) for weight in self.weights)
        return filled_module(self.config, matrices, ((name, self.tensor(name)) for name in self.rest))

    def check(self, progress: Progress[Any] = silent) -> None:
        """Reads every byte: an error if the hash of a shard is wrong or a weight does not decode to finite values.

        Not done when an artifact is opened: it takes 2 ns a weight on one core, 0.3 s for 135 million and minutes for the largest.
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
        """From the headers alone: every tensor exists, and every part has the type and shape of its format."""
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
    """Writes parts as they come, a shard at a time: the model is never in memory as a whole. The folder is renamed when complete.

    `calibration`: the result of `calibration_hash`.
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
            (folder / name).chmod(0o644)  # like the other files
            shard_of.update(dict.fromkeys(held, name))
            held.clear()
            return_free_memory()

        def hold(tensors: dict[str, Tensor]) -> None:
            held.update({name: tensor.contiguous() for name, tensor in tensors.items()})
            if sum(tensor.nbytes for tensor in held.values()) >= SHARD_BYTES:
                flush()

        corrected: dict[str, Tensor] = {}
        for weight, outcome in quantized:
            hold({f"{weight.name}.{part}": tensor for part, tensor in outcome.parts.items()})
            how[weight.name] = {key: value for key, value in vars(outcome).items() if key not in {"parts", "bias"} and value}
            errors[weight.name] = _error(model, plan, weight, outcome.parts)
            if outcome.bias is not None:
                corrected[f"{weight.name}.bias"] = outcome.bias
            return_free_memory()
        for name in model.rest:
            hold({name: corrected[name] if name in corrected else model.tensor(name)})
        if held:
            flush()
        shard_of |= stand_in.write(folder, (getattr(model, "origin", None) or model).weights)
        (folder / PLAN).write_text(plan.to_json())
        used = {entry.format: manifest.version_of(entry.format) for entry in plan.entries}
        origin = manifest.provenance(model.published_as, model.fingerprint, calibration)
        manifest.seal(folder, Manifest(model.weights, model.rest, origin, shard_of, used, how, errors, layout=model.layout))
    return Artifact(path)


def quantize(model: Model, plan: Plan, path: Path, progress: Progress[Weight], statistics: StatisticsSource | None = None) -> Artifact:
    """Every weight by its plan, streamed into an artifact folder."""
    from fewbits.artifact import outcomes

    return write(model, plan, path, outcomes.independent(model, plan, statistics, progress), calibration_hash(statistics))


def copy(artifact: Artifact, folder: Path, plan: Plan, progress: Progress[Any]) -> None:
    """The same weights in a new folder, checked on the way, in the newest schema. The sizes in `plan` may be those of another target."""
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
    """Stored in the artifact's fewbits.json, in place of an earlier one of the same runtime."""
    Artifact(path)  # raises if the artifact is damaged
    file = path / manifest.NAME
    about = read_json(file, manifest.HINT)
    about["verdicts"] = about.get("verdicts", {}) | {str(verdict["runtime"]): dict(verdict)}
    with Staged(file) as staged:
        staged.write_text(to_json(about))


def calibration_hash(statistics: StatisticsSource | None) -> str | None:
    """sha256 of the text that was calibrated with; of an importance matrix, whose text is unknown, the sha256 of the file."""
    import hashlib

    from fewbits.calibration.folder import Statistics
    from fewbits.calibration.importance_matrix import ImportanceMatrix
    from fewbits.rewrites.statistics import Rescaled

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
    """By its minimum and maximum, which are NaN if any element is: ten times as fast as testing every element."""
    return not tensor.numel() or all(extreme.isfinite() for extreme in tensor.aminmax())
