"""The error budget: how rounding errors add up from block to block, as predicted and as measured.

The float model and the quantized one are run side by side. After each block a copy of the quantized model's hidden states goes on through
float blocks: its KL at the end is what the blocks up to there cost. Predicted is the sum of the plan's entries for the same weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fewbits import calibration
from fewbits import model as models
from fewbits.artifact import Artifact
from fewbits.calibration import Paths, split
from fewbits.errors import InputError
from fewbits.model.blocks import Blocks
from fewbits.progress import silent
from fewbits.verification.forecast.block_errors import Accumulation, BlockError
from fewbits.verification.forecast.side_by_side import Stream, compare_streams

if TYPE_CHECKING:
    from torch import Tensor

    from fewbits.model import Model
    from fewbits.model.weights import Weight
    from fewbits.progress import Progress

_ALL = "all blocks"
_ROWS = 24  # at most: each is a copy that runs all blocks after it, and 100 of them would cost more than everything else


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
    source, made = models.open(model, offline), Artifact(Path(artifact)).expect_modules()
    if made.provenance.sha256 != source.fingerprint:
        raise InputError(f"`{artifact}` was not made from `{model}`", "give the model that it was made from")
    return accumulate(source, made, split.held_out_windows(source, data, None, tokens), memory, progress)


def accumulate(model: Model, artifact: Artifact, windows: Sequence[Sequence[int]], memory: int, progress: Progress[Any]) -> Accumulation:
    blocks = Blocks(model)
    outer, inner = blocks.outer_weights, [blocks.weights(index) for index in range(len(blocks))]

    def decoded(weight: Weight) -> Callable[[], Tensor]:
        return lambda: artifact.decoded(weight)

    # the outer weights are quantized in every stream: a tied embedding is at both ends of the model
    at_the_ends = {weight.name: decoded(weight) for weight in outer}
    inside = {weight.name: decoded(weight) for block in inner for weight in block}
    streams = {_ALL: Stream(at_the_ends | inside)}
    step = -(-len(blocks) // _ROWS)
    ends = [-1, *range(step - 1, len(blocks) - 1, step), len(blocks) - 1]
    for index in ends[:-1]:
        streams[str(index)] = Stream(at_the_ends, parent=_ALL, start=index + 1)
    comparison = compare_streams(model, windows, streams, memory, progress, watch=(_ALL,))
    rows, so_far = [], 0.0
    for before, index in zip([-2, *ends], ends, strict=False):
        weights = [weight for block in range(before + 1, index + 1) for weight in (outer if block < 0 else inner[block])]
        entries = [artifact.plan[weight.name].kl for weight in weights]
        known = [kl for kl in entries if kl is not None]
        predicted = math.fsum(known) if len(known) == len(entries) else math.nan
        so_far += predicted
        stream = _ALL if index == len(blocks) - 1 else str(index)
        measured, error = float(np.mean(comparison.measured[stream].kl)), comparison.errors[_ALL].get(index, 0.0)
        rows.append(BlockError(index, len(weights), _known(predicted), _known(so_far), measured, error))
    return Accumulation(len(comparison.measured[_ALL].kl), tuple(rows))


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value
