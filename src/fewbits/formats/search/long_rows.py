"""One scale for hundreds of weights, or for levels that are not integers: `fit_scale` with its trials compared in float32.

kernels/native/search/long_rows.cc does the same operations in the same order, for levels whose midpoints lie on a coarse grid.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fewbits.devices import processor
from fewbits.formats.search import native
from fewbits.formats.search.groups import FLOAT16_STEP, Groups, cells, extreme, float16_scale
from fewbits.formats.search.integers import safe
from fewbits.formats.search.trial_points import AROUND, places
from fewbits.formats.storage.codes import Levels

if TYPE_CHECKING:
    from numpy.typing import NDArray


def fit_scale(
    x: Tensor, levels: Levels, ends: tuple[float, ...], importance: Tensor | None, store: Callable[[Tensor], Tensor]
) -> Tensor:  # x (..., n) -> (...)
    if store is float16_scale and (fitted := native_scale(x, levels, ends, importance)) is not None:
        return fitted
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
    for trial in (
        store(wanted),
        store(wanted + wanted.sign() * FLOAT16_STEP),
    ):  # below 2^-14 the next float16 is far away
        trial_error = groups.error(levels, trial)
        better = trial_error < error
        best, error = torch.where(better, trial, best), torch.where(better, trial_error, error)
    return best.reshape(x.shape[:-1])


def native_scale(x: Tensor, levels: Levels, ends: tuple[float, ...], importance: Tensor | None) -> Tensor | None:
    """`fit_scale` natively; None where it has to be done in torch."""
    known = cells(levels)
    if (known is None and not _are_integers(levels)) or (taken := native.arrays(x, importance)) is None or (isa := native.isa()) is None:
        return None
    per_unit, table = (1.0, None) if known is None else (known[0], known[1].numpy())
    scale = torch.empty(x.shape[:-1])
    written = processor.native().fit_long_scale(
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
    return scale if written else None  # not written: a weight is NaN, which torch handles


@cache
def _trials(levels: Levels, ends: tuple[float, ...]) -> tuple[NDArray[Any], NDArray[Any]]:
    return torch.tensor(places(levels, ends, weighted=True), dtype=torch.float32).numpy(), torch.tensor(AROUND, dtype=torch.float32).numpy()


@cache
def _are_integers(levels: Levels) -> bool:
    """Whether levels are consecutive integers in order, small enough for the native rounding."""
    return all(after - before == 1 for before, after in pairwise(levels)) and levels[0].is_integer() and max(map(abs, levels)) < 2**21
