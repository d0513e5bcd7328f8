"""How much more a plan will cost on each kind of text than on the text that it was calibrated with: the model itself, damaged much as the
plan will damage it, is run on a few windows of each.

Predictions are of calibration's text. Error feedback fits its errors to that text: they avoid the directions that its inputs have, and on
other text they do more damage than there. So the damaged model has errors of that shape (`error_feedback/expected.py`), fitted to one half
of the samples; its KL on the other half is what the text of calibration costs, and the KL of each kind over that is the factor of the kind.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from fewbits import formats, kernels
from fewbits.methods import gptq, rtn
from fewbits.methods.error_feedback.expected import after_feedback
from fewbits.verification.forecast.side_by_side import Stream, compare_streams
from fewbits.verification.metrics import by_domain

if TYPE_CHECKING:
    from torch import Tensor

    from fewbits.calibration.folder import Statistics
    from fewbits.model import Model
    from fewbits.model.weights import Weight
    from fewbits.planning import Plan
    from fewbits.progress import Progress

TOKENS = 4096  # of each kind, and twice as many of calibration's: about 3 % of standard error on the embedded model
_LEAST = 2  # windows, however long they are
_DAMAGED, _CALIBRATED = "damaged", ""
_DIGITS = 3  # of a factor: it is good to two


def worth_asking(judged: Sequence[str], held_out: bool) -> bool:
    """Whether there is text of another kind than that of calibration, or of several: else the factor is 1."""
    return bool(judged) and (held_out or len(set(judged)) > 1)


def measure_kinds(
    model: Model,
    statistics: Statistics,
    plan: Plan,
    fed_back: Collection[str],
    samples: Sequence[Sequence[int]],
    kinds: Mapping[str, Sequence[Sequence[int]]],
    memory: int,
    progress: Progress[Any],
) -> dict[str, float]:
    """KL of each kind over that of calibration's text. `fed_back`: weights whose codes will be chosen by error feedback; `samples`: of the
    half of calibration's samples that errors are not fitted to."""
    texts = {_CALIBRATED: samples, **kinds}
    windows = [list(window) for each in texts.values() for window in each]
    domains = [name for name, each in texts.items() for _ in each]
    quantized = [weight for weight in model.weights if not formats.get(plan[weight.name].format).is_cast]
    stream = Stream({w.name: partial(damaged, model, statistics, plan[w.name].format, w, w.name in fed_back) for w in quantized})
    measured = compare_streams(model, windows, {_DAMAGED: stream}, memory, progress).measured[_DAMAGED]
    kl = {name: float(np.mean(part.kl)) for name, part in by_domain(measured, windows, domains).items()}
    usual = kl.pop(_CALIBRATED)
    if not usual > 0 or not np.isfinite(list(kl.values())).all():  # nothing is rounded, or the model's logits are not finite
        return {}
    return {name: float(f"{found / usual:.{_DIGITS}g}") for name, found in kl.items()}


def some(windows: Sequence[Sequence[int]], tokens: int) -> list[Sequence[int]]:
    """Windows of about so many tokens, at equal distances from each other."""
    length = max(1, sum(map(len, windows)) // max(1, len(windows)))
    count = min(len(windows), max(_LEAST, tokens // length))
    return [windows[i * len(windows) // count] for i in range(count)]


def damaged(model: Model, statistics: Statistics, name: str, weight: Weight, fed_back: bool) -> Tensor:
    """The weight as the format of this name may leave it."""
    fmt, known, w = formats.get(name), statistics.of(weight.name), model.load(weight)
    importance = known.importance() if known.has_importance else None
    misses = w - kernels.decode(fmt, rtn.quantize(w, fmt, importance), weight.shape)
    return w - (after_feedback(misses, gptq.stakes(w), known) if fed_back else misses)
