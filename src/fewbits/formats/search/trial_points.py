"""Which scales, and which lines with a minimum, are tried: data that the searches in torch and in C++ share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from fewbits.formats.search.integers import FARTHEST, Steps, line_bits, steps_for
from fewbits.formats.storage.codes import Levels

# Where the largest weight is put, in steps beyond (+) or inside (-) the outermost level. All places near that level are equally good on
# average, but for a given group some happen to round better: the best of 27 lowers the error of q8_0 by 22 %, of q4_0 by 12 %. For up
# to 64 evenly spaced levels 19 places do as well: the error grows by 0.1 % at most.
_STRETCHES = tuple(0.4 * k for k in range(-13, 14))
_FEWER_STRETCHES = tuple(0.6 * k for k in range(-9, 10))
_NEAR_END = (0.6, 1.9)  # beyond these ratios to the outermost level, the few trials of _CLIPS are enough
# Far beyond it, to clip a weight that matters little. Without importance that pays only with four levels or fewer.
_CLIPS = (1.5, 2.0, 2.7, 3.6, FARTHEST)
AROUND = (0.97, 1.03, 1.0)  # then factors of the best scale so far; 1.0 rounds with it once more and refits the scale to those codes

# With a minimum both ends of the range are placed: by so many steps more than the grid has does the range span. The largest come first:
# they have the smallest scale, and of two lines through the same points (two distinct codes can be 0 and 1 or 0 and 3) the one with the
# smaller scale leaves more of a super-block's integers to the other groups.
_INSETS = (1.4, 0.9, 0.4, -0.1, -0.6)
KEPT = (
    (0.5, 0.5),
    (0.5, 0.8),
    (0.8, 0.5),
    (0.7, 0.7),
    (0.7, 1.0),
    (1.0, 0.7),
)  # shares below and above zero that the grid covers


@cache
def places(levels: Levels, ends: tuple[float, ...], weighted: bool) -> tuple[float, ...]:
    """Where trials put the largest weight, in units of the levels."""
    ordered, tried = sorted(levels), list[float]()
    even = len(ordered) <= 64 and ordered == [ordered[0] + i for i in range(len(ordered))]
    for end in ends:
        inner = max((level for level in levels if abs(level) < abs(end) and level * end >= 0), key=abs)
        near = [end + stretch * (end - inner) for stretch in (_FEWER_STRETCHES if even else _STRETCHES)]
        tried += [place for place in near if _NEAR_END[0] < place / end < _NEAR_END[1]]
        tried += [end * clip for clip in _CLIPS if weighted or len(levels) < 8]
    return tuple(tried)


@dataclass(frozen=True)
class ScaleTrials:
    steps: Steps
    inverses: tuple[int, ...]  # of each place
    around: tuple[float, ...]
    ends: tuple[float, ...]
    float16: bool  # whether the scale is stored as one


@cache
def scale_trials(levels: Levels, ends: tuple[float, ...], weighted: bool, float16: bool) -> ScaleTrials | None:
    """None where `steps_for` has no integers for these levels. A scale that will be rounded to a sub-scale needs no last step."""
    if (steps := steps_for(levels)) is None:
        return None
    inverses = tuple(steps.inverse(place) for place in places(levels, ends, weighted))
    return ScaleTrials(steps, inverses, AROUND if float16 else AROUND[:-1], ends, float16)


@cache
def line_starts(top: int) -> tuple[tuple[int, int], ...]:
    """(where a line begins, its inverse scale) in the integers of `Lined`, in which every group has the same range."""
    per_step = 2 ** (line_bits(top) + 1)
    insets = [(below, steps) for below in _INSETS for above in _INSETS if (steps := top + below + above) > 0.5]
    return tuple((max(0, round(8192 - below * 16384 / steps)), round(per_step * steps)) for below, steps in insets)
