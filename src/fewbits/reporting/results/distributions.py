"""Histograms of the values of weights and of their inputs, the range that was chosen for them, and the share that lies outside.

Of a large weight every n-th row is counted. Histograms are coarse, for the eye: nothing is computed from them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fewbits import formats, kernels
from fewbits.calibration.folder import Statistics
from fewbits.progress import silent
from fewbits.reporting.schema import Distribution, Histogram, Input
from fewbits.store.heap import return_free_memory

if TYPE_CHECKING:
    from fewbits.artifact import Artifact
    from fewbits.artifact.outcomes import StatisticsSource
    from fewbits.calibration.statistics import InputStatistics
    from fewbits.formats import Format, Parts
    from fewbits.formats.runtime.activations import Activation
    from fewbits.model import Model
    from fewbits.model.weights import Weight
    from fewbits.progress import Progress

BINS = 64
MOST = 256  # weights that are shown: those of the largest predicted KL
_VALUES = 1 << 18  # of each that are counted
_FAR = 4.0  # standard deviations: of a normal distribution 1 value in 16,000 lies beyond
_MASSIVE = 20.0  # times the median channel's largest value


def of(model: Model, artifact: Artifact, statistics: StatisticsSource | None, progress: Progress[Any] = silent) -> tuple[Distribution, ...]:
    chosen = sorted(model.weights, key=lambda weight: -_cost(artifact, weight))[:MOST]
    names = {weight.name for weight in chosen}
    weights = [weight for weight in model.weights if weight.name in names]
    spread = []
    for weight in progress(weights, len(weights), "looking at values"):
        spread.append(_of(model, artifact, statistics, weight))
        return_free_memory()
    return tuple(spread)


def _cost(artifact: Artifact, weight: Weight) -> float:
    """The predicted KL, or the squared error where the plan predicts none."""
    entry = artifact.plan[weight.name]
    return entry.kl if entry.kl is not None else (artifact.errors.get(weight.name) or 0.0) ** 2


def _of(model: Model, artifact: Artifact, statistics: StatisticsSource | None, weight: Weight) -> Distribution:
    whole = model.load(weight)
    low, high = (float(value) for value in whole.aminmax())
    step = -(-whole.numel() // _VALUES)
    w = whole[::step]
    entry = artifact.plan[weight.name]
    fmt = formats.get(entry.format)
    parts = {
        name: part[::step] if part.dim() and part.shape[0] == weight.shape[0] else part for name, part in artifact.parts(weight).items()
    }
    decoded = kernels.decode(fmt, parts, (w.shape[0], w.shape[1]))
    std = float(whole.std()) if whole.numel() > 1 else 0.0
    ends = (min(low, float(decoded.min())), max(high, float(decoded.max())))
    error = artifact.errors.get(weight.name)
    return Distribution(
        weight=weight.name,
        format=entry.format,
        sampled=w.numel(),
        before=_histogram(w, *ends),
        after=_histogram(decoded, *ends),
        low=_digits(low),
        high=_digits(high),
        std=_digits(std),
        far=_digits(float(((w - w.mean()).abs() > _FAR * std).float().mean())),
        clipped=_clipped(w, fmt, parts),
        error=None if error is None else _digits(error),
        input=_input(weight, statistics, entry.activation),
    )


def _clipped(w: Tensor, fmt: Format, parts: Parts) -> float | None:
    """The share that lies more than half a step beyond the outermost code of its group: nearer values round to that code anyway."""
    if fmt.levels is None:  # a cast clips nothing; points of a codebook have no outermost one
        return None
    levels = sorted(level for level in fmt.levels if level == level and abs(level) != float("inf"))
    _, grid = fmt.unpack(parts)
    scale, offset = fmt.affine(grid)
    x = w if offset is None else w - offset
    ends = torch.stack([levels[0] * scale, levels[-1] * scale])  # a negative scale swaps them
    steps = torch.stack([(levels[1] - levels[0]) * scale, (levels[-1] - levels[-2]) * scale]).abs()
    lower, upper = ends.amin(0), ends.amax(0)
    half = torch.where(scale < 0, steps.flip(0), steps) / 2
    outside = (x < lower - half[0]) | (x > upper + half[1])
    return _digits(float(outside.float().mean()))


def _input(weight: Weight, statistics: StatisticsSource | None, activation: Activation | None) -> Input | None:
    if not isinstance(statistics, Statistics) or weight.name not in statistics.names:  # rescaled channels have no histogram
        return None
    if statistics.site(weight.name) is None:
        return None
    inputs = statistics.input(weight.name)
    if inputs.histogram is None or not inputs.tokens():
        return None
    low, high = float(inputs.low.min()), float(inputs.high.max())
    range, how = _range(activation)
    per_channel = inputs.absmax
    massive = int((per_channel > _MASSIVE * per_channel.median().clamp(min=1e-30)).sum())
    return Input(_coarse(inputs, low, high), _digits(low), _digits(high), range, how, massive, inputs.cols)


def _range(activation: Activation | None) -> tuple[tuple[float, float] | None, str]:
    if activation is None:
        return None, "the plan leaves the input in float, which a runtime may round to 8 bits block by block, as it comes"
    if not activation.static or activation.scale is None:
        return None, f"{activation.name}: a scale for every token, as it comes"
    if activation.symmetric:
        reach = activation.largest * activation.scale
        return (-_digits(reach), _digits(reach)), f"{activation.name}, by {activation.range}"
    low, high = ((end - activation.zero) * activation.scale for end in (-128, 127))
    return (_digits(low), _digits(high)), f"{activation.name} with a zero point, by {activation.range}"


def _histogram(values: Tensor, low: float, high: float) -> Histogram:
    high = high if high > low else low + 1.0
    counts = torch.histc(values.float(), BINS, low, high)
    return Histogram(_digits(low), _digits(high), tuple(int(count) for count in counts))


def _coarse(inputs: InputStatistics, low: float, high: float) -> Histogram:
    """The fine histogram of calibration in `BINS` bins between the least and the greatest value."""
    fine = inputs.histogram
    assert fine is not None
    high = high if high > low else low + 1.0
    place = ((fine.centres - low) / (high - low) * BINS).long().clamp(0, BINS - 1)
    counts = torch.zeros(BINS, dtype=torch.int64).index_add_(0, place, fine.counts)
    return Histogram(_digits(low), _digits(high), tuple(counts.tolist()))


def _digits(value: float) -> float:
    return float(f"{value:.5g}")
