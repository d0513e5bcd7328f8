"""The textbook strategy, to compare with: weights of low, medium and high sensitivity get 4, 8 and 16 bits.

A weight's sensitivity is the KL predicted for its 4-bit format; medium begins at a threshold, high at ten times that. The threshold is
the lowest one that the budget allows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fewbits.planning import Plan
    from fewbits.planning.allocation import Allocator, Choice

_BITS = (4, 8, 16)
_HIGH = 10.0  # times the threshold of medium


def within_bytes(allocator: Allocator, nbytes: int, why: str) -> Plan | None:
    """The lowest threshold that fits; None: even 4 bits for every weight are too large."""
    return next((plan for plan in _plans(allocator, why) if plan.nbytes <= nbytes), None)


def within_kl(allocator: Allocator, kl: float, why: str) -> Plan | None:
    """The highest threshold, so the smallest plan, whose predicted KL stays within the limit; None: no threshold does."""
    plans = list(_plans(allocator, why))
    return next((plan for plan in reversed(plans) if (plan.kl or 0.0) <= kl), None)


def _plans(allocator: Allocator, why: str) -> list[Plan]:
    """All plans that are fast enough, by rising threshold and so by falling size."""
    levels = [[_level(choices, bits) for bits in _BITS] for choices in allocator.choices]
    sensitivity = [choices[low].kl for choices, (low, _, _) in zip(allocator.choices, levels, strict=True)]
    thresholds = sorted({0.0, *sensitivity, max(sensitivity) * 1.01})
    seen, plans = set(), []
    for threshold in thresholds:
        chosen = tuple(options[(kl >= threshold) + (kl >= _HIGH * threshold)] for options, kl in zip(levels, sensitivity, strict=True))
        if chosen not in seen:
            seen.add(chosen)
            plans.append(allocator.of(chosen, f"{why}; thresholds at {threshold:.2g} and {_HIGH * threshold:.2g} KL"))
    return [plan for plan in plans if allocator.min_speed is None or allocator.tokens_per_second(plan) >= allocator.min_speed]


def _level(choices: Sequence[Choice], bits: int) -> int:
    """The least damaging of the smallest formats with at least so many bits; if none has as many, the least damaging of all."""
    elements = (256, 256)
    enough = [i for i, choice in enumerate(choices) if choice.format.bits_per_weight(elements) >= bits]
    if not enough:
        return min(range(len(choices)), key=lambda i: choices[i].kl)
    smallest = min(choices[i].nbytes for i in enough)
    # formats within a sixteenth of the smallest count as its equals: iq4_nl beside mxfp4
    alike = [i for i in enough if choices[i].nbytes <= smallest * 1.0625]
    return min(alike, key=lambda i: choices[i].kl)
