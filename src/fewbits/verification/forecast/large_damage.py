"""How much of a plan's predicted KL comes true where damage is large: the model itself, damaged as the plan will, is measured.

Every weight gets the rounding errors of its planned format, a part of them and more of them: three copies of the model with one kind of
damage in three strengths. What is expected and what is measured of each are a point of the curve (`sensitivity/curve.py`).

What is expected is the sum that plans are made by, over weights and rows. It misses what the errors of a weight's rows have in common:
few bits shrink weights, which costs up to a third more (2.5 bits, embedded model). Scales that are tuned afterwards take that away again.
So for a plan that will be tuned the weakest damage says what is expected of the others: the curve then holds how KL grows with damage, and
nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fewbits import formats, kernels
from fewbits.methods import rtn
from fewbits.sensitivity.curve import Curve, through
from fewbits.verification.forecast.side_by_side import Stream, compare_streams

if TYPE_CHECKING:
    from torch import Tensor

    from fewbits.calibration.folder import Statistics
    from fewbits.model import Model
    from fewbits.model.weights import Weight
    from fewbits.planning import Plan
    from fewbits.progress import Progress

_STRENGTHS = (0.4, 0.7, 1.0)  # of the rounding errors, which do more damage than the plan will: it has error feedback
_TOKENS = 4096  # to measure on


def measure_curve(
    model: Model,
    statistics: Statistics,
    plan: Plan,
    samples: Sequence[Sequence[int]],
    memory: int,
    progress: Progress[Any],
    tuned: bool = False,
) -> Curve:
    """`samples`: of the text that the statistics are of. `tuned`: scales will be."""
    damage = _Damage(model, statistics, plan)
    quantized = [weight for weight in model.weights if not formats.get(plan[weight.name].format).is_cast]
    streams = {str(s): Stream({weight.name: damage.maker(weight, s) for weight in quantized}) for s in _STRENGTHS}
    windows = [list(sample) for sample in samples[: max(1, _TOKENS // max(1, len(samples[0])))]]
    measured = compare_streams(model, windows, streams, memory, progress).measured
    kl = [float(np.mean(measured[str(s)].kl)) for s in _STRENGTHS]
    whole = kl[0] / _STRENGTHS[0] ** 2 if tuned else sum(damage.predicted.values())
    return through([(s**2 * whole, found) for s, found in zip(_STRENGTHS, kl, strict=True)])


class _Damage:
    """The rounding errors of one weight at a time: all strengths of a weight are asked for one after the other, block by block."""

    def __init__(self, model: Model, statistics: Statistics, plan: Plan) -> None:
        self._model, self._statistics, self._plan = model, statistics, plan
        self._errors: dict[str, tuple[Tensor, int]] = {}  # of weights that not every strength was asked for, and how many were
        self.predicted: dict[str, float] = {}

    def maker(self, weight: Weight, strength: float) -> Callable[[], Tensor]:
        return lambda: self._model.load(weight) + strength * self._error(weight)

    def _error(self, weight: Weight) -> Tensor:
        error, asked = self._errors.pop(weight.name, (None, 0))
        if error is None:
            error = self._rounded(weight)
        if asked + 1 < len(_STRENGTHS):
            self._errors[weight.name] = error, asked + 1
        return error

    def _rounded(self, weight: Weight) -> Tensor:
        fmt, known = formats.get(self._plan[weight.name].format), self._statistics.of(weight.name)
        w = self._model.load(weight)
        importance = known.importance() if known.has_importance else None
        error = kernels.decode(fmt, rtn.quantize(w, fmt, importance), weight.shape) - w
        # row by row, as the table's cells are: the curve begins where they end
        self.predicted[weight.name] = float(known.row_damage(error).sum()) if known.predicts_kl else 0.0
        return error
