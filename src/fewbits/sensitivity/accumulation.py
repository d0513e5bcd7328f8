"""The error budget: how rounding errors add up from block to block, as predicted and as measured.

One pass with two streams side by side: the float model, and the model with every block up to here quantized. After each block a branch
leaves the second one and goes on in float: its KL at the end is what the blocks up to there cost. Predicted is the sum of the plan's
entries for the same weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fewbits import calibration, preparation
from fewbits import model as models
from fewbits.artifact import Artifact
from fewbits.blocks import Blocks
from fewbits.calibration import Paths
from fewbits.errors import InputError
from fewbits.progress import silent
from fewbits.sensitivity.streams import Stream, walk

if TYPE_CHECKING:
    from torch import Tensor

    from fewbits.model import Model, Weight
    from fewbits.progress import Progress

_ALL = "all blocks"
_ROWS = 24  # at the most: each is a branch that runs all blocks after it, and 100 of them would cost more than all else


@dataclass(frozen=True)
class Row:
    block: int  # -1: what is in no block (embedding, output); of a deep model the last of several that are looked at together
    weights: int
    predicted: float | None  # KL of its weights; None: the plan was not made from measurements
    predicted_so_far: float | None
    measured_so_far: float  # KL of the model with the blocks up to this one quantized
    hidden_error: float  # of what the block gives: squared, relative, mean over tokens


@dataclass(frozen=True)
class Accumulation:
    tokens: int
    rows: tuple[Row, ...]

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


def error_budget(
    model: str | Path,
    artifact: str | Path,
    *,
    data: Paths = (),
    tokens: int = 4096,
    memory: int = calibration.MEMORY,
    offline: bool = False,
    progress: Progress[Any] = silent,
) -> Accumulation:
    """`fewbits compare MODEL --blocks ARTIFACT`."""
    source, made = models.open(model, offline), Artifact(Path(artifact))
    if made.provenance.sha256 != source.fingerprint:
        raise InputError(f"`{artifact}` was not made from `{model}`", "give the model that it was made from")
    return accumulate(source, made, preparation.held_out_windows(source, data, None, tokens), memory, progress)


def accumulate(model: Model, artifact: Artifact, windows: Sequence[Sequence[int]], memory: int, progress: Progress[Any]) -> Accumulation:
    blocks = Blocks(model)
    outer, inner = blocks.outer_weights, [blocks.weights(index) for index in range(len(blocks))]

    def decoded(weight: Weight) -> Callable[[], Tensor]:
        return lambda: artifact.decoded(weight)

    # the outer weights are changed in every stream: a tied embedding is both ends of the model
    at_the_ends = {weight.name: decoded(weight) for weight in outer}
    inside = {weight.name: decoded(weight) for block in inner for weight in block}
    streams = {_ALL: Stream(at_the_ends | inside)}
    step = -(-len(blocks) // _ROWS)
    ends = [-1, *range(step - 1, len(blocks) - 1, step), len(blocks) - 1]
    for index in ends[:-1]:
        streams[str(index)] = Stream(at_the_ends, parent=_ALL, start=index + 1)
    found = walk(model, windows, streams, memory, progress, watch=(_ALL,))
    rows, so_far = [], 0.0
    for before, index in zip([-2, *ends], ends, strict=False):
        weights = [weight for block in range(before + 1, index + 1) for weight in (outer if block < 0 else inner[block])]
        entries = [artifact.plan[weight.name].kl for weight in weights]
        known = [kl for kl in entries if kl is not None]
        predicted = math.fsum(known) if len(known) == len(entries) else math.nan
        so_far += predicted
        stream = _ALL if index == len(blocks) - 1 else str(index)
        measured, error = float(np.mean(found.measured[stream].kl)), found.errors[_ALL].get(index, 0.0)
        rows.append(Row(index, len(weights), _known(predicted), _known(so_far), measured, error))
    return Accumulation(len(found.measured[_ALL].kl), tuple(rows))


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value
