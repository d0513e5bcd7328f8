"""A quantized model on disk: packed parts of every weight, the tensors kept as they were, plan, provenance, tokenizer.

fewbits.json               schema, plan, source and its hash, which file holds each weight's parts
weights-00001.safetensors  `NAME.PART` for every part; `NAME` for a kept tensor
config.json, tokenizer...  as the source had them
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits import formats, outcomes, planning
from fewbits.checkpoints.folder import read_json, read_text
from fewbits.errors import InputError
from fewbits.files import Staged
from fewbits.model import Weight

if TYPE_CHECKING:
    from torch import Tensor

    from fewbits.formats import Parts
    from fewbits.model import Model
    from fewbits.outcomes import Known, Stream
    from fewbits.planning import Plan
    from fewbits.progress import Progress

SCHEMA = 1
_SHARD_BYTES = 1 << 30
_HINT = "make it anew with `fewbits quantize`"


@dataclass(frozen=True)
class Provenance:
    source: str  # name of the folder or file, not its path
    sha256: str
    fewbits: str


class Artifact:
    """An artifact folder, opened; tensors are read when asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            about: Any = read_json(path / "fewbits.json", "a fewbits artifact is a folder with fewbits.json in it")
            if about["schema"] != SCHEMA:
                raise InputError(f"`{path}` has schema {about['schema']}, this fewbits reads schema {SCHEMA}", _HINT)
            self.weights = tuple(Weight(**{**row, "shape": (row["shape"][0], row["shape"][1])}) for row in about["weights"])
            self.rest: tuple[str, ...] = tuple(about["rest"])
            self._file_of: dict[str, str] = dict(about["files"])
            self.outcomes: dict[str, dict[str, Any]] = dict(about.get("outcomes", {}))  # how each weight's codes were chosen
            self.provenance = Provenance(**about["provenance"])
        except (KeyError, TypeError, ValueError, IndexError) as failure:
            raise InputError(f"`{path / 'fewbits.json'}` is damaged: {failure!r}", _HINT) from failure
        self._open: dict[str, Any] = {}

    @cached_property
    def plan(self) -> Plan:
        return planning.read(read_text(self.path / "plan.json", _HINT), self.weights)

    @cached_property
    def config(self) -> Any:
        from transformers import AutoConfig

        try:
            return AutoConfig.from_pretrained(self.path, local_files_only=True, trust_remote_code=False)
        except Exception as failure:
            raise InputError(f"`{self.path / 'config.json'}` cannot be read: {str(failure).splitlines()[0]}", _HINT) from failure

    @cached_property
    def tokenizer(self) -> Any:
        from fewbits.model import load_tokenizer

        return load_tokenizer(self.path)

    def parts(self, weight: Weight) -> Parts:
        fmt = formats.get(self.plan[weight.name].format)
        return {part: self._tensor(f"{weight.name}.{part}") for part in fmt.parts(weight.shape)}

    def tensor(self, name: str) -> Tensor:
        """One of `rest`."""
        return self._tensor(name)

    def decoded(self, weight: Weight) -> Tensor:
        """(rows, cols) float32: the values that every runtime should compute with."""
        from fewbits import kernels

        return kernels.decode(formats.get(self.plan[weight.name].format), self.parts(weight), weight.shape)

    def module(self) -> Any:
        """The float32 transformers module with decoded weights."""
        from fewbits.model import filled_module

        matrices = ((weight, self.decoded(weight)) for weight in self.weights)
        return filled_module(self.config, matrices, ((name, self.tensor(name)) for name in self.rest))

    def _tensor(self, name: str) -> Tensor:
        from safetensors import SafetensorError, safe_open

        if name not in self._file_of:
            raise InputError(f"`{self.path / 'fewbits.json'}` does not say where `{name}` is", _HINT)
        file = self._file_of[name]
        try:
            if file not in self._open:
                self._open[file] = safe_open(self.path / file, framework="pt")
            tensor: Tensor = self._open[file].get_tensor(name)
        except (SafetensorError, OSError) as failure:
            raise InputError(f"`{self.path / file}` cannot be read: {failure}", _HINT) from failure
        return tensor


def write(model: Model, plan: Plan, path: Path, quantized: Stream) -> Artifact:
    """Parts as they come, a shard at a time: never the whole model in memory. All or nothing: renamed when complete."""
    from importlib.metadata import version

    from safetensors.torch import save_file

    how: dict[str, dict[str, object]] = {}
    with Staged(path, marker="fewbits.json") as folder:
        folder.mkdir()
        model.checkpoint.save_assets(folder)
        file_of: dict[str, str] = {}
        held: dict[str, Tensor] = {}

        def flush() -> None:
            name = f"weights-{len(set(file_of.values())) + 1:05}.safetensors"
            save_file(held, folder / name)
            (folder / name).chmod(0o644)  # as the files beside it
            file_of.update(dict.fromkeys(held, name))
            held.clear()

        def hold(tensors: dict[str, Tensor]) -> None:
            held.update({name: tensor.contiguous() for name, tensor in tensors.items()})
            if sum(tensor.nbytes for tensor in held.values()) >= _SHARD_BYTES:
                flush()

        corrected: dict[str, Tensor] = {}
        for weight, outcome in quantized:
            hold({f"{weight.name}.{part}": tensor for part, tensor in outcome.parts.items()})
            how[weight.name] = {key: value for key, value in vars(outcome).items() if key not in {"parts", "bias"} and value}
            if outcome.bias is not None:
                corrected[f"{weight.name}.bias"] = outcome.bias
        for name in model.rest:
            hold({name: corrected[name] if name in corrected else model.tensor(name)})
        if held:
            flush()
        provenance = Provenance(model.path.name, model.fingerprint, version("fewbits"))
        about = {
            "schema": SCHEMA,
            "provenance": provenance.__dict__,
            "weights": [weight.__dict__ for weight in model.weights],
            "rest": list(model.rest),
            "files": file_of,
            "outcomes": how,
        }
        (folder / "plan.json").write_text(plan.to_json())
        (folder / "fewbits.json").write_text(json.dumps(about, indent=1))
    return Artifact(path)


def quantize(model: Model, plan: Plan, path: Path, progress: Progress[Weight], statistics: Known | None = None) -> Artifact:
    """Every weight by its plan, streamed into an artifact folder."""
    return write(model, plan, path, outcomes.independent(model, plan, statistics, progress))
