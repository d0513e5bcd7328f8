"""One scale for hundreds of weights, or for levels that are no integers: `fit_scale` with its trials judged in float32.

native/fitting.cc does the same operations in the same order, for levels whose midpoints lie on a coarse grid.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fewbits import kernels
from fewbits.fitting import native
from fewbits.fitting.groups import FLOAT16_STEP, Groups, Levels, cells, extreme, float16_scale
from fewbits.fitting.integers import safe
from fewbits.fitting.places import AROUND, places

if TYPE_CHECKING:
    from numpy.typing import NDArray


def fit_scale(
    x: Tensor, levels: Levels, ends: tuple[float, ...], importance: Tensor | None, store: Callable[[Tensor], Tensor]
) -> Tensor:  # x (..., n) -> (...)
    if store is float16_scale and (found := native_scale(x, levels, ends, importance)) is not None:
        return found
    groups = Groups(x, importance)
    peak = extreme(groups.x, 0)
    if len(ends) == 1:
        peak = peak.abs()
    best = store(peak / ends[0])
    wanted, most = best, torch.zeros_like(best)

    def consider(trial: Tensor) -> None:
        nonlocal wanted, most
        v = groups.snapped(levels, trial)
        along, size = groups.sum(v * groups.x), groups.sum(v.square_())
        scale = along / safe(size)
        gain = along * scale
        better = gain > most
        wanted, most = torch.where(better, scale, wanted), torch.where(better, gain, most)

    for place in places(levels, ends, weighted=True):
        consider(peak / place)
    for factor in AROUND:
        consider(wanted * factor)
    error = groups.error(levels, best)
    for trial in (store(wanted), store(wanted + wanted.sign() * FLOAT16_STEP)):  # below 2^-14 the next float16 is another scale
        trial_error = groups.error(levels, trial)
        better = trial_error < error
        best, error = torch.where(better, trial, best), torch.where(better, trial_error, error)
    return best.reshape(x.shape[:-1])


def native_scale(x: Tensor, levels: Levels, ends: tuple[float, ...], importance: Tensor | None) -> Tensor | None:
    """What `fit_scale` finds; None where it has to find it itself."""
    found = cells(levels)
    if (found is None and not _are_integers(levels)) or (taken := native.arrays(x, importance)) is None or (isa := native.isa()) is None:
        return None
    per_unit, table = (1.0, None) if found is None else (found[0], found[1].numpy())
    scale = torch.empty(x.shape[:-1])
    written = kernels.native().fit_long_scale(
        isa,
        *taken,
        table,
        levels[0],
        levels[-1],
        per_unit,
        ends[0],
        len(ends) == 1,
        *_trials(levels, ends),
        scale.view(-1).numpy(),
        torch.get_num_threads(),
    )
    return scale if written else None  # a weight is NaN: how far it spreads is torch's affair


@cache
def _trials(levels: Levels, ends: tuple[float, ...]) -> tuple[NDArray[Any], NDArray[Any]]:
    return torch.tensor(places(levels, ends, weighted=True), dtype=torch.float32).numpy(), torch.tensor(AROUND, dtype=torch.float32).numpy()


@cache
def _are_integers(levels: Levels) -> bool:
    """Whether levels are consecutive integers in order, small enough for the native rounding."""
    return all(after - before == 1 for before, after in pairwise(levels)) and levels[0].is_integer() and max(map(abs, levels)) < 2**21
