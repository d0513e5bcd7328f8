"""GGUF, what llama.cpp loads: weights, architecture, tokenizer, chat template and where it all came from, in one file or in parts.

layouts.py  format -> type of GGUF     tensors.py  the tensors of a file     header.py  its metadata     writing.py  file or parts
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits import architectures
from fewbits.errors import InputError
from fewbits.scratch import scratch_folder
from fewbits.targets import Target
from fewbits.targets.gguf.layouts import Layout, lacking, layout

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fewbits.activations import Activation
    from fewbits.artifact import Artifact
    from fewbits.drafting import Draft
    from fewbits.formats import Format
    from fewbits.model import Weight
    from fewbits.planning import Plan
    from fewbits.progress import Progress

__all__ = ["TARGET", "Gguf", "Layout", "first_part", "layout", "types"]

_STEM, _PLAN = "model", "plan.json"


class Gguf(Target):
    name = "gguf"
    about = "one file for llama.cpp and all that is built on it"
    runtime = "llama.cpp"
    candidates = (
        "q2_k",
        "q3_k",
        "mxfp4",
        "iq4_xs",
        "nvfp4",
        "q4_k",
        "q4_0",
        "iq4_nl",
        "q4_1",
        "q5_0",
        "q5_k",
        "q5_1",
        "q6_k",
        "q8_0",
        "fp16",
        "bf16",
    )
    file_name = f"{_STEM}.gguf"
    takes_drafts = True

    def __init__(self, split_bytes: int | None = None) -> None:
        """`split_bytes`: of tensors in each of several files. The output is then a folder of them, with the plan beside them."""
        self.split_bytes = split_bytes
        if split_bytes is not None:
            self.file_name, self.marker = _STEM, _PLAN

    def accepts(self, weight: Weight, fmt: Format) -> str | None:
        if weight.kind == "convolution":
            return "convolutions are not written as GGUF yet"
        own = layout(fmt)
        if own is None:
            return lacking(fmt) or f"GGUF has no type with the values of {fmt.name}"
        if weight.shape[1] % own.block:
            return f"{weight.shape[1]} columns do not divide into {own.type}'s blocks of {own.block}, in which GGUF keeps {fmt.name}"
        if own.type != "F32" and weight.name.endswith("token_type_embeddings"):
            return "llama.cpp adds it to the input as it is, in float32"
        return None

    def accepts_plan(self, plan: Plan, weights: Iterable[Weight]) -> str | None:
        """Why a plan cannot be written although each of its formats can; None if it can."""
        from fewbits.targets.gguf.tensors import mixed_stack

        return mixed_stack(plan, weights)

    def nbytes(self, weight: Weight, fmt: Format, activation: Activation | None = None) -> int:
        own = layout(fmt)
        return own.nbytes(weight.shape) if own else fmt.nbytes(weight.shape)

    def accepts_activation(self, weight: Weight, fmt: Format, activation: Activation) -> str | None:
        return "llama.cpp rounds activations to 8 bits by itself, in blocks of its own"

    def accepts_kv(self, kv: str) -> str | None:
        return "llama.cpp's KV cache type is chosen when it runs (`--cache-type-k`, `--cache-type-v`)"

    def activation_block(self, weight: Weight, fmt: Format) -> int | None:
        own = layout(fmt)
        if own is None or own.block == 1:
            return None
        return 256 if own.block == 256 else 32  # ggml pairs a super-block with Q8_K and every other block, nvfp4's 64 too, with Q8_0

    def supports(self, config: Any, tokenizer: Any) -> str | None:
        from fewbits import vocabularies

        if reason := architectures.unsupported(config):
            return reason
        vocabularies.of(tokenizer, config.vocab_size)  # refuses what llama.cpp would silently split otherwise
        return None

    def overhead(self, draft: Draft) -> int:
        from fewbits.targets.gguf import writing
        from fewbits.targets.gguf.tensors import tensors

        found = list(tensors(draft))
        parts = writing.split(found, self.split_bytes) if self.split_bytes else [writing.Part(tuple(found))]
        with scratch_folder() as scratch:
            headers = writing.header_bytes(draft, parts, Path(scratch))
        beside = len(draft.plan.to_json().encode()) if self.split_bytes else 0
        return headers + beside + sum(writing.padded(tensor.nbytes) for tensor in found) - draft.plan.nbytes

    def write(self, artifact: Artifact, path: Path, progress: Progress[Any]) -> None:
        self._write(artifact, path, progress)

    def write_draft(self, draft: Draft, path: Path, progress: Progress[Any]) -> None:
        self._write(draft, path, progress)

    def _write(self, artifact: Artifact | Draft, path: Path, progress: Progress[Any]) -> None:
        from fewbits.targets.gguf import writing
        from fewbits.targets.gguf.tensors import tensors

        found = list(tensors(artifact))
        if not self.split_bytes:
            writing.write(artifact, [(path, writing.Part(tuple(found)))], progress)
            return
        path.mkdir()
        parts = writing.split(found, self.split_bytes)
        writing.write(artifact, [(path / part.name(_STEM), part) for part in parts], progress)
        (path / _PLAN).write_text(artifact.plan.to_json())

    def written(self, path: Path) -> dict[str, str]:
        return types(first_part(path))

    def written_as(self, weight: Weight, fmt: Format, activation: Activation | None = None) -> str:
        own = layout(fmt)
        assert own, fmt.name
        return own.format


def first_part(path: Path) -> Path:
    """What llama.cpp is given to load a split model: its first file. A file is itself."""
    if not path.is_dir():
        return path
    found = sorted(path.glob("*-00001-of-*.gguf"))
    if len(found) != 1:
        raise InputError(f"`{path}` holds {len(found) or 'no'} first parts of a GGUF", "give the file `NAME-00001-of-NNNNN.gguf` itself")
    return found[0]


def types(path: Path) -> dict[str, str]:
    """Weight -> format of what lies in a file, by the gguf package's own reader. A plan's format is found as `layout(fmt).format`."""
    import gguf

    from fewbits.checkpoints.gguf_file import GgufFile
    from fewbits.model import Model
    from fewbits.targets.gguf.layouts import format_of

    opened = Model(GgufFile(path))  # by its content: while it is written its name is another
    parts = [gguf.GGUFReader(file).tensors for file in opened.checkpoint.files()]
    held = {tensor.name: format_of(tensor.tensor_type.name) for part in parts for tensor in part}
    places = architectures.Places(opened.config)
    stored = {weight.name: {held[place.tensor] for place in places(weight.parameter)} for weight in opened.weights}
    return {name: " and ".join(sorted(found)) for name, found in stored.items()}


TARGET = Gguf()
