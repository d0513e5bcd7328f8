"""Where damage is large, KL no longer grows with its square: how fast it does is measured on the model itself, damaged as the plan will.

Every weight gets the rounding errors of its planned format, a part of them and more of them: three copies of the model with one kind of
damage in three strengths. The KL of the weakest is where the others begin: from it the expansion says what theirs should be, and what they
are is a point of the curve (`sensitivity/curve.py`). How well the KL of rounding errors was predicted in the first place does not matter
here: the plan's own errors will be others, of error feedback.
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
    model: Model, statistics: Statistics, plan: Plan, samples: Sequence[Sequence[int]], memory: int, progress: Progress[Any]
) -> Curve:
    """`samples`: of the text that the statistics are of."""
    damage = _Damage(model, statistics, plan)
    quantized = [weight for weight in model.weights if not formats.get(plan[weight.name].format).is_cast]
    streams = {str(s): Stream({weight.name: damage.maker(weight, s) for weight in quantized}) for s in _STRENGTHS}
    windows = [list(sample) for sample in samples[: max(1, _TOKENS // max(1, len(samples[0])))]]
    measured = compare_streams(model, windows, streams, memory, progress).measured
    kl = [float(np.mean(measured[str(s)].kl)) for s in _STRENGTHS]
    return through([((s / _STRENGTHS[0]) ** 2 * kl[0], found) for s, found in zip(_STRENGTHS, kl, strict=True)])


class _Damage:
    """The rounding errors of one weight at a time: all strengths of a weight are asked for one after the other, block by block."""

    def __init__(self, model: Model, statistics: Statistics, plan: Plan) -> None:
        self._model, self._statistics, self._plan = model, statistics, plan
        self._errors: dict[str, tuple[Tensor, int]] = {}  # of weights that not every strength was asked for, and how many were

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
        return kernels.decode(fmt, rtn.quantize(w, fmt, importance), weight.shape) - w
