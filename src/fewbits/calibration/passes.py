"""Which weights are recorded in which pass through a block.

The second moments of one expert take 8 x columns^2 bytes for its inputs and as many for their loss-weighted ones. Those of all experts of
a large mixture would fill any memory, so the samples go through its block as often as it takes: with everything else and the first experts
recorded, then with group after group of experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fewbits.calibration import output_moments

if TYPE_CHECKING:
    from fewbits.model.weights import Weight


def nbytes(weight: Weight) -> int:
    """Of its sums while gradients are recorded, when they take most: two halves in float32."""
    return 2 * 4 * weight.shape[1] ** 2 + output_moments.nbytes(weight)


def passes(weights: Sequence[Weight], limit: int | None) -> list[list[Weight]]:
    """The weights of a block in groups whose sums fit so many bytes. The matrices of an expert stay together, because the inputs of one
    are made by another; at least one expert is in each group."""
    experts: dict[tuple[str, int], list[Weight]] = {}
    groups: list[list[Weight]] = [[weight for weight in weights if weight.expert is None]]
    for weight in weights:
        if weight.expert is not None:
            experts.setdefault((module_of(weight), weight.expert), []).append(weight)
    held = sum(map(nbytes, groups[0]))
    for expert in experts.values():
        more = sum(map(nbytes, expert))
        if limit is not None and groups[-1] and held + more > limit:
            groups.append([])
            held = 0
        groups[-1] += expert
        held += more
    return groups


def module_of(weight: Weight) -> str:
    """The module whose parameters hold the expert."""
    return weight.parameter.rpartition(".")[0]
