"""A static activation's range by what it costs in the end: the one of least predicted KL, over all weights that read the tensor.

Other estimators see values; this one knows which tokens and outputs matter. A first token a thousand times larger than all others is
clipped where the loss does not mind it, and kept where it does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fewbits.sensitivity.predicting import activation_kl

if TYPE_CHECKING:
    from torch import Tensor

    from fewbits.activations import Activation
    from fewbits.calibration.statistics import WeightStatistics

NAME = "loss"  # as the plan calls it
_STEPS, _PER_OCTAVE = 33, 4  # from the largest value down to 1/256 of it
_TOKENS = 128


def calibrated(activation: Activation, readers: Sequence[tuple[Tensor, WeightStatistics]]) -> Activation | None:
    """With the scale that costs these weights least; None: nothing is known of the loss."""
    seen = readers[0][1].input
    if seen is None or any(not stats.predicts_kl or stats.input is None for _, stats in readers):
        return None
    low, high = min(float(seen.low.min()), 0.0), max(float(seen.high.max()), 0.0)
    tried = []
    for step in range(_STEPS):
        share = 2.0 ** (-step / _PER_OCTAVE)
        trial = activation.calibrated(low * share, high * share)
        tried.append((sum(activation_kl(w, stats, trial, _TOKENS) or 0.0 for w, stats in readers), step, trial))
    return min(tried, key=lambda entry: entry[:2])[2]
