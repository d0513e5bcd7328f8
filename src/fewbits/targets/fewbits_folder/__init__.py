"""The artifact folder itself: every format, activation and KV cache, run by torch as the plan says."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits.formats.runtime.activations import not_in_blocks
from fewbits.store.scratch import scratch_folder
from fewbits.targets import Target
from fewbits.targets.running import Command

if TYPE_CHECKING:
    from fewbits.artifact import Artifact
    from fewbits.artifact.draft import Draft
    from fewbits.formats import Format
    from fewbits.formats.runtime.activations import Activation
    from fewbits.model.weights import Weight
    from fewbits.progress import Progress


# Upper bounds in bytes for the text that describes the tensors: for each tensor its rows in the header and in the index, beside its name;
# for each weight its row in fewbits.json, with its error and how its codes were chosen; once the hashes of files, the additions to
# config.json and the verdicts that are added later.
_PER_TENSOR, _PER_WEIGHT, _ONCE = 180, 700, 8192


class Fewbits(Target):
    name = "fewbits"
    about = "a folder for torch: every format, and rounded activations and KV cache, emulated exactly"
    file_name = "model.fewbits"
    runtime = "torch"
    candidates = (
        "int3_g32",
        "int4_g128",
        "int4_g64",
        "int4_g32",
        "int4_g32_asym",
        "int6_g32",
        "fp8_e4m3_channel",
        "int8_channel",
        "int8_g32",
        "fp16",
    )
    marker = "fewbits.json"

    def accepts(self, weight: Weight, fmt: Format) -> str | None:
        return None

    def accepts_activation(self, weight: Weight, fmt: Format, activation: Activation) -> str | None:
        return not_in_blocks(weight, activation)

    def accepts_kv(self, kv: str) -> str | None:
        return None

    def nbytes(self, weight: Weight, fmt: Format, activation: Activation | None = None) -> int:
        return fmt.nbytes(weight.shape)

    def activation_block(self, weight: Weight, fmt: Format) -> int | None:
        return None  # torch computes in float unless the plan rounds activations

    def supports(self, config: Any, tokenizer: Any) -> str | None:
        return None

    def overhead(self, draft: Draft) -> int:
        with scratch_folder() as scratch:
            draft.model.checkpoint.save_assets(Path(scratch))
            beside = sum(file.stat().st_size for file in Path(scratch).iterdir())
        rest = sum(tensor.nbytes for tensor in map(draft.tensor, draft.rest))
        tensors = [*draft.rest, *(f"{each.name}.{part}" for each in draft.weights for part in self._parts(draft, each))]
        described = sum(2 * len(name) + _PER_TENSOR for name in tensors) + sum(3 * len(each.name) + _PER_WEIGHT for each in draft.weights)
        return beside + rest + described + len(draft.plan.to_json()) + _ONCE

    def _parts(self, draft: Draft, weight: Weight) -> dict[str, Any]:
        from fewbits import formats

        return dict(formats.get(draft.plan[weight.name].format).parts(weight.shape))

    def written(self, path: Path) -> dict[str, str]:
        from fewbits.artifact import Artifact  # opening it compares the header of every part with its format

        return {entry.weight: entry.format for entry in Artifact(path).plan.entries}

    def written_as(self, weight: Weight, fmt: Format, activation: Activation | None = None) -> str:
        return fmt.name

    def how_to_run(self, shown: Path, context: int | None, embeds: bool) -> tuple[Command, ...]:
        folder = str(shown)
        auto = "AutoModel" if embeds else "AutoModelForCausalLM"
        lines = ("import fewbits  # so that transformers knows the weights", f"from transformers import {auto}",
                 f"model = {auto}.from_pretrained({folder!r})")  # fmt: skip
        loading = Command("with transformers, in Python", "\n".join(lines), "python")
        return (loading,) if embeds else (Command("a chat with fewbits' own kernels", f"fewbits run {shlex.quote(folder)}"), loading)

    def write(self, artifact: Artifact, path: Path, progress: Progress[Any]) -> None:
        from fewbits import artifact as artifacts
        from fewbits import planning

        # the sizes in its plan may be those of another target
        plan = planning.read(artifact.plan.to_json(), artifact.weights, self)
        artifacts.copy(artifact, path, plan, progress)


TARGET = Fewbits()
