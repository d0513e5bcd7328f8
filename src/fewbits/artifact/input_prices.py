"""What it is predicted to cost to round the inputs of a plan's matmuls as it says, and in slower ways."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from fewbits import formats
from fewbits.calibration.folder import Statistics
from fewbits.formats.runtime.activations import Activation, static_scale
from fewbits.planning.rounded_inputs import Input, Way
from fewbits.rewrites.statistics import Rescaled
from fewbits.sensitivity.prediction import activation_kl, clipping_kl, runtime_kl

if TYPE_CHECKING:
    from torch import Tensor

    from fewbits.calibration.statistics import WeightStatistics
    from fewbits.model import Model
    from fewbits.model.weights import Weight
    from fewbits.planning import Plan
    from fewbits.planning.target import Target
    from fewbits.progress import Progress

_HEADROOM = (1.25, 1.5, 2.0)  # what other text may reach beyond the range of calibration's


def priced(plan: Plan, model: Model, statistics: Rescaled | Statistics, target: Target, progress: Progress[Any]) -> list[Input]:
    """One for every tensor that is rounded and whose effect on the loss is known. The weights that read it share its way."""
    sites = statistics if isinstance(statistics, Statistics) else statistics.original
    readers: dict[str | None, list[Weight]] = {}
    for weight in model.weights:
        if plan[weight.name].activation and statistics.of(weight.name).predicts_kl:
            readers.setdefault(sites.site(weight.name), []).append(weight)
    return [_priced(plan, model, statistics, target, some) for some in progress(readers.values(), len(readers), "pricing rounded inputs")]


def _priced(plan: Plan, model: Model, statistics: Rescaled | Statistics, target: Target, readers: list[Weight]) -> Input:
    asked = plan[readers[0].name].activation
    assert asked is not None
    fixed = asked.granularity == "tensor"
    wider = [asked, *(_wider(asked, times) for times in _HEADROOM if fixed)]
    ways: list[Activation | None] = list(wider)
    dynamic = Activation(asked.format)
    if fixed and not any(target.accepts_activation(w, _format(plan, w), dynamic) for w in readers):
        ways.append(dynamic)
    ways.append(None)
    costs = [0.0] * len(ways)
    for weight in readers:
        w, known = model.load(weight), statistics.of(weight.name)
        block = target.activation_block(weight, _format(plan, weight))
        fitted = isinstance(statistics, Rescaled) and weight.name in statistics.rewrite.columns
        for place, kl in enumerate(_costs(w, known, ways, block, fitted)):
            costs[place] += kl
    best = min(range(len(wider)), key=costs.__getitem__)
    ways, costs = [ways[best], *ways[len(wider) :]], [costs[best], *costs[len(wider) :]]
    elements = sum(math.prod(weight.shape) for weight in readers)
    named = tuple(weight.name for weight in readers)
    return Input(named, elements, tuple(Way(way, kl) for way, kl in zip(ways, costs, strict=True)))


def _costs(w: Tensor, known: WeightStatistics, ways: list[Activation | None], block: int | None, fitted: bool) -> Iterator[float]:
    for way in ways:
        if way is not None:
            beyond = clipping_kl(w, known, way.largest * static_scale(way), fitted) if way.granularity == "tensor" else 0.0
            yield (activation_kl(w, known, way) or 0.0) + (beyond or 0.0)
        else:  # the runtime may round it by itself
            yield 0.0 if block is None else runtime_kl(w, known, block) or 0.0


def _wider(activation: Activation, times: float) -> Activation:
    return activation.widened(times)


def _format(plan: Plan, weight: Weight) -> formats.Format:
    return formats.get(plan[weight.name].format)
