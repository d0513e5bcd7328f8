"""Sizes of a model that the steps of the work share; in bytes unless said otherwise."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from fewbits import formats
from fewbits.calibration import output_moments
from fewbits.calibration.passes import passes
from fewbits.calibration.triangles import SMALL_COLUMNS
from fewbits.errors import InputError
from fewbits.formats.runtime import kv
from fewbits.model import Model
from fewbits.model.walk import SHARE_OF_SUMS
from fewbits.planning import budgets, footprint

if TYPE_CHECKING:
    from fewbits.model.gguf.model import GgufModel
    from fewbits.model.weights import Weight
    from fewbits.planning import Plan
    from fewbits.preflight.work import Work
    from fewbits.targets import Target

    Source = Model | GgufModel

FLOAT, DOUBLE, HALF = 4, 8, 2  # bytes


@dataclass(frozen=True)
class Sizes:
    source: Source
    target: Target
    work: Work
    plan: Plan | None

    @property
    def weights(self) -> Iterable[Weight]:
        return self.source.weights

    @cached_property
    def numbers(self) -> int:
        return sum(numbers_of(weight) for weight in self.weights)

    @cached_property
    def multiplied(self) -> float:
        """Weights that a token is multiplied with: all but embeddings and the experts that are not chosen."""
        return sum(numbers_of(weight) * self.met(weight) for weight in self.weights if weight.kind != "embedding" or weight.tied_to)

    def met(self, weight: Weight) -> float:
        """The share of tokens that it is multiplied with."""
        count = footprint.experts(self.text) if weight.expert is not None else 0
        return (kv.largest(self.text, "num_experts_per_tok") or count) / count if count else 1.0

    @cached_property
    def blocks(self) -> dict[str, list[Weight]]:
        """The weights of each block, by its name; those outside of blocks under ``."""
        blocks: dict[str, list[Weight]] = {}
        for weight in self.weights:
            inside = re.match(r".*?\.\d+(?=\.)", weight.name)
            blocks.setdefault(inside[0] if inside else "", []).append(weight)
        return blocks

    @property
    def layers(self) -> int:
        return len(self.blocks) - ("" in self.blocks)

    @cached_property
    def moments(self) -> int:
        """Second moments in the largest block."""
        return max(sum(moments_of(weight) + output_moments.nbytes(weight) for weight in block) for block in self.blocks.values())

    @cached_property
    def packed_apart(self) -> int:
        """Second moments that are copied to triangles before they are written: those of few columns."""
        return max(sum(moments_of(w) // 2 for w in block if w.shape[1] <= SMALL_COLUMNS) for block in self.blocks.values())

    @cached_property
    def block(self) -> int:
        """The largest block in float32, or the weights outside of blocks: they are in memory one after the other."""
        return FLOAT * max(sum(map(numbers_of, block)) for block in self.blocks.values())

    @cached_property
    def packed(self) -> int:
        """All weights in the plan's formats."""
        if self.plan is None:
            return min(HALF * self.numbers, self._asked)
        return sum(max(entry.nbytes, formats.get(entry.format).nbytes(entry.shape)) for entry in self.plan.entries)

    @cached_property
    def _asked(self) -> int:
        size = budgets.parse_size(self.work.size) if self.work.size else None
        if isinstance(size, budgets.BitsPerWeight):
            return math.ceil(size.bits * self.numbers / 8)
        return size.nbytes if isinstance(size, budgets.FileBytes) else HALF * self.numbers

    @cached_property
    def beside(self) -> int:
        """What an output holds beside the weights: norms and biases, tokenizer, config, the plan and a description of each weight."""
        path = self.source.path
        files = [file for file in path.iterdir() if file.is_file() and file.suffix not in (".safetensors", ".bin")] if path.is_dir() else []
        files = files or self.source.checkpoint.files()[:1]  # of a GGUF, the tokenizer is in the header
        rest = sum(FLOAT * self.source.tensor(name).numel() for name in self.source.rest)
        return rest + 2 * sum(min(file.stat().st_size, 64 << 20) for file in files) + 2048 * sum(1 for _ in self.weights) + (1 << 20)

    @cached_property
    def session(self) -> int:
        """Memory of a runtime for one window, beside the weights."""
        try:
            shape = footprint.shape(self.text)
        except (InputError, AttributeError):  # a model whose KV cache cannot be counted: for one window it is small
            return 0
        return footprint.memory(shape, 0, footprint.Use(self.work.length)).total

    @property
    def text(self) -> Any:
        """The config of the language model; of a GGUF perhaps just its settings."""
        return kv.text_config(self.source.config)

    @cached_property
    def state(self) -> tuple[int, int]:
        """Numbers of a token between two blocks: those that every block writes anew, and all."""
        from fewbits.model.blocks import state_columns

        checkpoint = getattr(self.source, "origin", self.source)
        known = state_columns(checkpoint) if isinstance(checkpoint, Model) else None
        return known or (int(getattr(self.text, "hidden_size", 0)),) * 2

    @property
    def vocabulary(self) -> int:
        return int(getattr(self.text, "vocab_size", 0))

    @cached_property
    def largest(self) -> int:
        return max(numbers_of(weight) for weight in self.weights)

    def passes(self, block: list[Weight]) -> int:
        """How often the samples go through it while its statistics are taken."""
        return len(passes(block, int(self.work.buffer * SHARE_OF_SUMS)))

    def statistics_of(self, block: list[Weight]) -> float:
        """Multiplications for a token: forward with second moments, then another time forward and back. Passes after the first multiply
        with their own experts alone on the way forward, and with all of them on the way back."""
        inside = [(weight, self.met(weight)) for weight in block if weight.kind != "embedding" or weight.tied_to]
        dense = sum(numbers_of(weight) for weight, _ in inside if weight.expert is None)
        experts = sum(numbers_of(weight) * met for weight, met in inside if weight.expert is not None)
        sums = [(2 * weight.shape[1] ** 2 + output_moments.numbers(weight)) * met for weight, met in inside if weight.kind != "embedding"]
        more = self.passes(block) - 1
        return 3 * (dense + experts) + sum(sums) + more * (3 * dense + 2 * experts) + (experts if more else 0)


def numbers_of(weight: Weight) -> int:
    return weight.shape[0] * weight.shape[1]


def moments_of(weight: Weight) -> int:
    """Bytes of the second moments of its inputs: columns squared in float32, for two halves of the samples."""
    return 2 * FLOAT * weight.shape[1] ** 2
