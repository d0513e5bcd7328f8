"""One block of the model, timed: both passes over a little text, and the measuring and rounding of a few of its weights.

Each is set against the forecast for the same work, and the quotient corrects the forecast of the whole.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from fewbits import methods, sensitivity
from fewbits.calibration.recorders import GradientRecorder, InputRecorder, finished, watched
from fewbits.calibration.statistics import WeightStatistics
from fewbits.model.blocks import Blocks
from fewbits.model.walk import Walk, batches
from fewbits.preflight.sizes import numbers_of
from fewbits.preflight.steps import EFFICIENCY, block_seconds, feedback_seconds, measured_seconds
from fewbits.preflight.work import Pace
from fewbits.store import threads
from fewbits.store.mapped import Room
from fewbits.store.scratch import scratch_folder

if TYPE_CHECKING:
    from fewbits.formats import Format
    from fewbits.methods import Outcome
    from fewbits.model import Model
    from fewbits.model.weights import Weight
    from fewbits.preflight.sizes import Sizes

TOKENS = 4096  # at most: two batches, one for each half of the samples
_SHARE = 0.02  # of the time that there is, for the two passes
_LEAST_SAMPLES = 2
_FORMATS = 4  # of those that will be measured


def pace(
    source: Model, ids: Sequence[Sequence[int]], candidates: Sequence[Format], method: str, sizes: Sizes, rate: float, within: float
) -> Pace:
    """`ids`: of the samples, some of which are run. `rate`: operations a second in a large product. `within`: seconds that the whole
    work may take."""
    blocks, rate = Blocks(source, sizes.work.buffer).expect_chain(), rate * EFFICIENCY
    inside = blocks.weights(0)
    for_one = block_seconds(sizes, inside, 1, rate)
    length = max(map(len, ids))
    tokens = min(TOKENS, max(_LEAST_SAMPLES * length, int(_SHARE * within / for_one)))
    some = list(ids[: max(_LEAST_SAMPLES, tokens // length)])
    seconds, known = _passes(blocks, some, sizes.work.buffer)
    calibrating = seconds / block_seconds(sizes, inside, sum(map(len, some)), rate)
    found = {"calibrating": calibrating, "tuning": calibrating}
    if weights := sorted((weight for weight in inside if weight.name in known), key=numbers_of)[-torch.get_num_threads() :]:
        found |= _rounding(source, weights, known, candidates, method, rate)
    return Pace(found)


def _passes(blocks: Blocks, ids: Sequence[Sequence[int]], memory: int) -> tuple[float, dict[str, WeightStatistics]]:
    """Seconds of the first block's passes forward and back, and the statistics of its weights. Gradients are random."""
    with scratch_folder() as scratch:
        walk = Walk(blocks, batches(ids), Room(Path(scratch), memory))
        hidden = walk.enter()
        weights = [weight for weight in blocks.weights(0) if weight.expert in (None, 0)]
        began = time.perf_counter()
        inputs = InputRecorder(watched(blocks, weights), True, walk.sums())
        with walk.block(0) as block, inputs.attached():
            block.run(hidden, None, inputs.next_batch)
        gradients = GradientRecorder(watched(blocks, weights), weights, True, walk.sums())
        with walk.block(0) as block, gradients.attached(), torch.enable_grad():
            for batch in walk.batches:
                gradients.next_batch(batch)
                x = batch.view(hidden).detach().requires_grad_()
                out = block.call(batch, x)
                torch.autograd.grad(out, x, torch.randn_like(out))
        seen = {name: statistics for statistics, readers in finished(inputs).values() for name in readers}
        seconds = time.perf_counter() - began
        known = {
            name: WeightStatistics(input=seen[name], **vars(found))
            for name, found in gradients.gradients.items()
            if name in seen and seen[name].tokens() and bool(found.sensitivity.sum() > 0)
        }
    return seconds, known


class _Seen:
    """Has what measuring asks of `Statistics`."""

    def __init__(self, known: dict[str, WeightStatistics]) -> None:
        self.of = known.__getitem__


def _rounding(
    source: Model, weights: Sequence[Weight], known: dict[str, WeightStatistics], candidates: Sequence[Format], method: str, rate: float
) -> dict[str, float]:
    fitting = [fmt for fmt in candidates if all(fmt.fits(weight.shape) is None for weight in weights)]
    some = fitting[:: max(1, len(fitting) // _FORMATS)]
    if not some:
        return {}
    found = {}
    began = time.perf_counter()
    rows = list(sensitivity.measured(source, _Seen(known), weights, some, method))  # type: ignore[arg-type]
    assert len(rows) == len(weights)
    found["measuring"] = (time.perf_counter() - began) / measured_seconds([(weight, len(some)) for weight in weights], rate)
    if method != "rtn":
        fmt, narrow = some[len(some) // 2], [weight for weight in weights if not threads.are_all_used(weight.shape)]

        def quantized(weight: Weight) -> Outcome:
            return methods.get(method).quantize(source.load(weight), fmt, known[weight.name])

        tried = narrow or weights[-1:]
        began = time.perf_counter()
        outcomes = list(threads.side_by_side(quantized, narrow) if narrow else map(quantized, tried))
        assert len(outcomes) == len(tried)
        found["quantizing"] = (time.perf_counter() - began) / feedback_seconds(tried, rate)
    return found
