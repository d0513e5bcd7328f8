"""Which inputs of matmuls are rounded as asked, and which are not because that would cost too much.

What it costs to round an input is predicted from calibration, and these KLs add up. A few inputs can cost more than all others together:
one with massive activations at the first position, under a scale that must hold them, has no steps left for anything else. The sum is
kept within a limit by reading inputs in a slower way, those first where that saves most KL per weight that is multiplied:

    a scale from calibration     a scale per token     not rounded at all: the weight stays quantized, the product is in float
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fewbits import formats

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fewbits.formats.runtime.activations import Activation
    from fewbits.model.weights import Weight
    from fewbits.planning import Plan
    from fewbits.planning.target import Target

_NAMED = 8  # inputs that the remark names
LIMIT = 0.005  # KL, and so about half a percent of perplexity: 8-bit weights and what the forecast misses have the other half of one


@dataclass(frozen=True)
class Way:
    """One way to read an input, and the KL that this is predicted to cost."""

    activation: Activation | None  # None: it is not rounded
    kl: float


@dataclass(frozen=True)
class Input:
    """A tensor that one or more matmuls read. They read it the same way: runtimes fuse them."""

    weights: tuple[str, ...]
    elements: int  # of these weights: what a slower way makes slower
    ways: tuple[Way, ...]  # the fastest first, which is the one that was asked for


@dataclass(frozen=True)
class Choice:
    """The way in which every input is read."""

    inputs: tuple[Input, ...]
    places: tuple[int, ...]  # of its way among the ways of each input
    limit: float

    @property
    def kl(self) -> float:
        return math.fsum(each.ways[place].kl for each, place in zip(self.inputs, self.places, strict=True))

    @property
    def exempt(self) -> tuple[Input, ...]:
        return tuple(each for each, place in zip(self.inputs, self.places, strict=True) if place)

    def of(self) -> dict[str, tuple[Input, Way]]:
        """By weight."""
        chosen = zip(self.inputs, self.places, strict=True)
        return {weight: (each, each.ways[place]) for each, place in chosen for weight in each.weights}

    def applied(self, plan: Plan, weights: Iterable[Weight], target: Target) -> Plan:
        """The plan with these ways: bytes and reasons of weights whose inputs are read in a slower one change too."""
        chosen, entries = self.of(), []
        by_name = {weight.name: weight for weight in weights}
        for entry in plan.entries:
            if entry.weight in chosen:
                read, way = chosen[entry.weight]
                entry = replace(entry, activation=way.activation)
                if way is not read.ways[0]:
                    nbytes = target.nbytes(by_name[entry.weight], formats.get(entry.format), way.activation)
                    entry = replace(entry, nbytes=nbytes, reason=f"{entry.reason}; {reason(read, way)}")
            entries.append(entry)
        return replace(plan, entries=tuple(entries))

    def remark(self) -> str | None:
        """For the reader of the result; None: no input was exempted."""
        if not self.exempt:
            return None
        asked = self.inputs[0].ways[0].activation
        before = math.fsum(each.ways[0].kl for each in self.inputs)
        costly = sorted(self.exempt, key=lambda each: -each.ways[0].kl)
        named = ", ".join(f"{each.weights[0]} ({_figure(each.ways[0].kl)})" for each in costly[:_NAMED])
        more = f" and {len(costly) - _NAMED} more, in plan.json" if len(costly) > _NAMED else ""
        return (
            f"{len(self.exempt)} of {len(self.inputs)} inputs are not rounded to {asked.name if asked else 'float'}, because with them "
            f"that would cost KL {_figure(before)}, without them {_figure(self.kl)} (`--activations-kl {self.limit:g}`; inf rounds all): "
            f"{named}{more}"
        )


def choose(inputs: Sequence[Input], limit: float = LIMIT) -> Choice:
    """Inputs leave the way that was asked for until the rest costs no more than the limit, or nothing is left to gain."""
    places = [0] * len(inputs)
    total = math.fsum(each.ways[0].kl for each in inputs)
    # by what is saved for each weight; on equal savings the earlier input, so that the same plan comes out again
    queue = [(-saved, index, place) for index, each in enumerate(inputs) for saved, place in _next(each, 0)]
    heapq.heapify(queue)
    while queue and total > limit:
        _, index, place = heapq.heappop(queue)
        each = inputs[index]
        total -= each.ways[places[index]].kl - each.ways[place].kl
        places[index] = place
        for saved, further in _next(each, place):
            heapq.heappush(queue, (-saved, index, further))
    return Choice(tuple(inputs), tuple(places), limit)


def _next(each: Input, place: int) -> list[tuple[float, int]]:
    """The slower way that saves most for each weight and step, if any saves."""
    now = each.ways[place].kl
    steps = [((now - way.kl) / (further - place) / each.elements, further) for further, way in enumerate(each.ways) if further > place]
    return [best] if steps and (best := max(steps, key=lambda step: (step[0], -step[1])))[0] > 0 else []


def reason(read: Input, way: Way) -> str:
    asked = read.ways[0]
    assert asked.activation is not None
    how = "is not rounded" if way.activation is None else f"is rounded to {way.activation.name} (KL {_figure(way.kl)})"
    return f"its input {how}: {asked.activation.name} would cost KL {_figure(asked.kl)}"


def _figure(kl: float) -> str:
    return f"{kl:.2g}"
