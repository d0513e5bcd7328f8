"""GGUF, which llama.cpp loads: weights, architecture, tokenizer, chat template and origin, in one file or in parts.

layouts.py  format -> type of GGUF     tensors.py  the tensors of a file     header.py  its metadata     parts.py  one file or several
"""

from __future__ import annotations

import shlex
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits.errors import InputError
from fewbits.model.gguf import architectures
from fewbits.store.scratch import scratch_folder
from fewbits.targets import Target
from fewbits.targets.gguf.layouts import Layout, layout
from fewbits.targets.running import PROMPT, Command

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fewbits.artifact import Artifact
    from fewbits.artifact.draft import Draft
    from fewbits.formats import Format
    from fewbits.formats.runtime.activations import Activation
    from fewbits.model.weights import Weight
    from fewbits.planning import Plan
    from fewbits.progress import Progress

__all__ = ["TARGET", "Gguf", "Layout", "first_part", "layout", "types"]

_STEM, _PLAN = "model", "plan.json"


class Gguf(Target):
    name = "gguf"
    about = "one file for llama.cpp and all that is built on it"
    runtime = "llama.cpp"
    # q1_0, q2_0, tq1_0 and tq2_0 are for models that were trained in one bit or three levels: `--formats` takes them
    candidates = (
        "iq1_s",
        "iq1_m",
        "iq2_xxs",
        "iq2_xs",
        "iq2_s",
        "q2_k",
        "iq3_xxs",
        "iq3_s",
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
        stored = layout(fmt)
        if stored is None:
            return f"GGUF has no type with the values of {fmt.name}"
        if weight.shape[1] % stored.block:
            return f"{weight.shape[1]} columns do not divide into {stored.type}'s blocks of {stored.block}, in which GGUF keeps {fmt.name}"
        if stored.type != "F32" and weight.name.endswith("token_type_embeddings"):
            return "llama.cpp adds it to the input as it is, in float32"
        return None

    def accepts_plan(self, plan: Plan, weights: Iterable[Weight]) -> str | None:
        from fewbits.targets.gguf.tensors import mixed_experts

        return mixed_experts(plan, weights)

    def nbytes(self, weight: Weight, fmt: Format, activation: Activation | None = None) -> int:
        stored = layout(fmt)
        return stored.nbytes(weight.shape) if stored else fmt.nbytes(weight.shape)

    def accepts_activation(self, weight: Weight, fmt: Format, activation: Activation) -> str | None:
        return "llama.cpp rounds activations to 8 bits by itself, in blocks of its own"

    def accepts_kv(self, kv: str) -> str | None:
        return "llama.cpp's KV cache type is chosen when it runs (`--cache-type-k`, `--cache-type-v`)"

    def activation_block(self, weight: Weight, fmt: Format) -> int | None:
        stored = layout(fmt)
        if stored is None or stored.block == 1:
            return None
        return 256 if stored.block == 256 else 32  # Q8_K for super-blocks, Q8_0 for all others (q2_0's 64 and q1_0's 128 too)

    def supports(self, config: Any, tokenizer: Any) -> str | None:
        from fewbits.model.gguf import vocabularies

        if reason := architectures.unsupported(config):
            return reason
        vocabularies.of(tokenizer, config.vocab_size)  # refuses a tokenizer that llama.cpp would silently apply in another way
        return None

    def overhead(self, draft: Draft) -> int:
        from fewbits.targets.gguf import parts
        from fewbits.targets.gguf.tensors import tensors

        every = list(tensors(draft))
        files = parts.split(every, self.split_bytes) if self.split_bytes else [parts.Part(tuple(every))]
        with scratch_folder() as scratch:
            headers = parts.header_bytes(draft, files, Path(scratch))
        beside = len(draft.plan.to_json().encode()) if self.split_bytes else 0
        return headers + beside + sum(parts.padded(tensor.nbytes) for tensor in every) - draft.plan.nbytes

    def write(self, artifact: Artifact, path: Path, progress: Progress[Any]) -> None:
        self._write(artifact, path, progress)

    def write_draft(self, draft: Draft, path: Path, progress: Progress[Any]) -> None:
        self._write(draft, path, progress)

    def _write(self, artifact: Artifact | Draft, path: Path, progress: Progress[Any]) -> None:
        from fewbits.targets.gguf import parts
        from fewbits.targets.gguf.tensors import tensors

        every = list(tensors(artifact))
        if not self.split_bytes:
            parts.write(artifact, [(path, parts.Part(tuple(every)))], progress)
            return
        path.mkdir()
        parts.write(artifact, [(path / part.name(_STEM), part) for part in parts.split(every, self.split_bytes)], progress)
        (path / _PLAN).write_text(artifact.plan.to_json())

    def written(self, path: Path) -> dict[str, str]:
        """By the names of tensors, and of transformers' weights if the architecture is in the table."""
        first = first_part(path)
        with suppress(InputError):
            return tensor_types(first) | types(first)
        return tensor_types(first)

    def written_as(self, weight: Weight, fmt: Format, activation: Activation | None = None) -> str:
        stored = layout(fmt)
        assert stored, fmt.name
        return stored.format

    def loaded_by(self, path: Path, shown: Path) -> Path:
        return shown / first_part(path).name if path.is_dir() else shown

    def how_to_run(self, shown: Path, context: int | None, embeds: bool) -> tuple[Command, ...]:
        file = shlex.quote(str(shown))
        if embeds:
            return (Command("embeddings with llama.cpp", f'llama-embedding -m {file} -p "{PROMPT}"'),)
        room = f" -c {context}" if context else ""
        return (
            Command("an endpoint and a page to chat on, with llama.cpp", f"llama-server -m {file}{room}"),
            Command("a chat in the terminal", f"llama-cli -m {file}{room}"),
            Command("with fewbits itself", f"fewbits run {file}"),
        )


def first_part(path: Path) -> Path:
    """The file by which llama.cpp loads a split model: the first one of the folder. A path that is a file is returned."""
    if not path.is_dir():
        return path
    firsts = sorted(path.glob("*-00001-of-*.gguf"))
    if len(firsts) != 1:
        raise InputError(f"`{path}` holds {len(firsts) or 'no'} first parts of a GGUF", "give the file `NAME-00001-of-NNNNN.gguf` itself")
    return firsts[0]


def types(path: Path) -> dict[str, str]:
    """The format of every weight of a file whose architecture is in the table, by the names of transformers."""
    from fewbits.model import Model
    from fewbits.model.gguf.checkpoint import GgufFile

    opened, held = Model(GgufFile(path)), tensor_types(path)  # whatever its suffix: while it is written it has another
    places = architectures.Places(opened.config)
    stored = {weight.name: {held[place.tensor] for place in places(weight.parameter) if place.tensor in held} for weight in opened.weights}
    return {name: " and ".join(sorted(names)) for name, names in stored.items() if names}  # the converter leaves BERT's pooler out


def tensor_types(path: Path) -> dict[str, str]:
    """The format of every tensor of a file, by the gguf package's reader, in the words of `layout(fmt).format`. Of a file with a type that
    the package does not know, by ours: it has llama.cpp alone for another judge."""
    import gguf

    from fewbits.model.gguf.checkpoint import open_reader
    from fewbits.targets.gguf.layouts import format_of

    opened = open_reader(path)
    tensors: list[Any] = [*opened.tensors]
    if {tensor.tensor_type.name for tensor in tensors} <= gguf.GGMLQuantizationType.__members__.keys():
        tensors = [tensor for file in opened.paths for tensor in gguf.GGUFReader(file).tensors]
    return {tensor.name: format_of(tensor.tensor_type.name) for tensor in tensors}


TARGET = Gguf()
