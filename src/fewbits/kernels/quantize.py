"""Quantizes a whole weight in one native call that searches scales, rounds weights and packs codes, a few rows at a time; and what finds
the scales of a block in native code, for error feedback.

The bytes are those of `fmt.fit`, `codes.encode` and `kernels.pack` one after the other, whatever the instruction set and the number
of threads. A format is recognised by its structure, never by its name.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fewbits.devices import processor
from fewbits.formats.affine import Integer, IntegerWithZero
from fewbits.formats.blocks import OneScale, ScaleAndMin, SubScales, SubScalesAndMins
from fewbits.formats.blocks.vectors import Vectors
from fewbits.formats.microscaling import E8M0, NEARBY, Microscaling
from fewbits.formats.search import importance_like, native
from fewbits.formats.search.superblocks import line_units, scale_units
from fewbits.formats.search.trial_points import ScaleTrials, scale_trials
from fewbits.formats.storage.codes import first_of_consecutive, sorted_codes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fewbits.formats import Format, Parts


def quantize(fmt: Format, w: Tensor, importance: Tensor | None = None) -> Parts | None:
    """The parts of w (rows, cols) with searched scales; None if the native code does not know the format or refuses w (it has a NaN)."""
    if (isa := native.isa()) is None or w.dtype != torch.float32 or w.device.type != "cpu" or not w.numel():
        return None
    shape = w.shape[0], w.shape[1]
    if fmt.fits(shape) or not processor.native().packs(fmt.name) or (search := _search(fmt, importance is not None)) is None:
        return None
    group, *searches = search
    weight = importance_like(w, importance, group)
    parts = {name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype)) for name, spec in fmt.parts(shape).items()}
    done = processor.native().quantize(
        isa,
        fmt.name,
        w.detach().contiguous().numpy(),
        None if weight is None else weight.detach().flatten().contiguous().numpy(),
        group,
        *searches,
        [_bytes(part) for part in parts.values()],
        torch.get_num_threads(),
    )
    return parts if done else None


@cache
def fitter(fmt: Format, columns: int) -> tuple[Any, dict[str, tuple[int, torch.dtype]]] | None:
    """What finds the grid of a block of so many columns in native code, and by name of each of the grid's entries how many a block has, and
    their type; None: the scales of this format are searched for in torch."""
    grid = fmt.fit(torch.zeros(1, columns), torch.ones(columns))
    entries = {name: (entry.shape[1], entry.dtype) for name, entry in grid.items()}
    if isinstance(fmt, Vectors):
        return processor.native().vector_fitter(fmt.codebook.native, *fmt.search.native, list(entries)), entries
    if (search := _search(fmt, True)) is None:
        return None
    return processor.native().block_fitter(columns, *search, list(entries)), entries


@cache
def _search(fmt: Format, weighted: bool) -> tuple[Any, ...] | None:
    """(columns in a group, native objects: the search, the units of a super-block if the format has them, the codes)."""
    if fmt.levels is None or fmt.group is None or fmt.tensor_wide or (search := _searches(fmt, weighted)) is None:
        return None
    return fmt.group, *search, _codes(fmt.levels)


def _searches(fmt: Format, weighted: bool) -> tuple[Any, ...] | None:
    assert fmt.levels
    if (isinstance(fmt, OneScale) and len(fmt.levels) > 2) or (isinstance(fmt, Integer) and not isinstance(fmt, IntegerWithZero)):
        return _of_scale(scale_trials(fmt.levels, fmt.ends, weighted, True), None)
    if isinstance(fmt, ScaleAndMin):
        return (native.line_search(len(fmt.levels) - 1, True),)
    if isinstance(fmt, SubScales):
        units = scale_units(fmt.groups, fmt.integers.start, fmt.integers.stop - 1)
        return _of_scale(scale_trials(fmt.levels, fmt.ends, weighted, False), units) if len(fmt.ends) > 1 else None
    if type(fmt) is Microscaling and fmt.scale_values == E8M0:
        return (processor.native().exponent_search(-2, [0, *NEARBY[len(E8M0)]]),)
    if isinstance(fmt, SubScalesAndMins):
        return native.line_search(len(fmt.levels) - 1, False), native.made_units(line_units(fmt.groups, fmt.largest))
    return None


def _of_scale(trials: ScaleTrials | None, units: native.Units | None) -> tuple[Any, ...] | None:
    if trials is None or (search := native.scale_search(trials)) is None:
        return None
    return (search,) if units is None else (search, native.made_units(units))


def _codes(levels: tuple[float, ...]) -> Any:
    """How weights become codes, by the same rule as `codes.nearest`."""
    if first_of_consecutive(levels) is not None:
        return processor.native().codes(levels[0], levels[-1], [], [], [])
    order, boundaries = sorted_codes(levels)
    return processor.native().codes(0.0, 0.0, boundaries.tolist(), order.tolist(), [levels[code] for code in order.tolist()])


def _bytes(part: Tensor) -> NDArray[Any]:
    octets: NDArray[Any] = part.view(torch.uint8).reshape(len(part), -1).numpy()
    return octets
