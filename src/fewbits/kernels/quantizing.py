"""Quantizing a whole weight in one native call: scales searched for, weights rounded, codes packed, a few rows at a time.

The bytes are those of `fmt.fit`, `rounding.encode` and `kernels.pack` one after the other, whatever the instruction set and the number
of threads. A format is recognised by its structure, never by its name.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fewbits import kernels, rounding
from fewbits.fitting import importance_like, native
from fewbits.fitting.places import ScaleTrials, scale_trials
from fewbits.fitting.superblocks import line_units, scale_units
from fewbits.formats.affine import Integer, IntegerWithZero
from fewbits.formats.microscaling import E8M0, NEARBY, Microscaling
from fewbits.packing.blocks import OneScale, ScaleAndMin, SubScales, SubScalesAndMins

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fewbits.formats import Format, Parts


def quantize(fmt: Format, w: Tensor, importance: Tensor | None = None) -> Parts | None:
    """The parts of w (rows, cols) with scales searched for; None where there is no native code for it, or w is not for it (a NaN)."""
    if (isa := native.isa()) is None or w.dtype != torch.float32 or w.device.type != "cpu" or not w.numel():
        return None
    shape = w.shape[0], w.shape[1]
    if fmt.fits(shape) or (search := _search(fmt, importance is not None)) is None:
        return None
    run, *searches = search
    weight = importance_like(w, importance, run)
    parts = {name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype)) for name, spec in fmt.parts(shape).items()}
    found = kernels.native().quantize(
        isa,
        fmt.name,
        w.detach().contiguous().numpy(),
        None if weight is None else weight.detach().flatten().contiguous().numpy(),
        run,
        *searches,
        [_bytes(part) for part in parts.values()],
        torch.get_num_threads(),
    )
    return parts if found else None


@cache
def _search(fmt: Format, weighted: bool) -> tuple[Any, ...] | None:
    """(columns in a group, native objects: the search, the units of a super-block if there are any, the codes)."""
    if fmt.levels is None or fmt.run is None or fmt.tensor_wide or not kernels.native().packs(fmt.name):
        return None
    codes = _codes(fmt.levels)
    if isinstance(fmt, OneScale) or (isinstance(fmt, Integer) and not isinstance(fmt, IntegerWithZero)):
        return _of_scale(fmt.run, scale_trials(fmt.levels, fmt.ends, weighted, True), None, codes)
    if isinstance(fmt, ScaleAndMin):
        return fmt.run, native.line_search(len(fmt.levels) - 1, True), codes
    if isinstance(fmt, SubScales):
        units = scale_units(fmt.runs, fmt.integers.start, fmt.integers.stop - 1)
        return _of_scale(fmt.run, scale_trials(fmt.levels, fmt.ends, weighted, False), units, codes) if len(fmt.ends) > 1 else None
    if type(fmt) is Microscaling and fmt.scale_values == E8M0:
        return fmt.run, kernels.native().exponent_search(-2, [0, *NEARBY[len(E8M0)]]), codes
    if isinstance(fmt, SubScalesAndMins):
        units = line_units(fmt.runs, fmt.largest)
        return fmt.run, native.line_search(len(fmt.levels) - 1, False), native.made_units(units), codes
    return None


def _of_scale(run: int, trials: ScaleTrials | None, units: native.Units | None, codes: Any) -> tuple[Any, ...] | None:
    if trials is None or (search := native.scale_search(trials)) is None:
        return None
    return (run, search, codes) if units is None else (run, search, native.made_units(units), codes)


def _codes(levels: tuple[float, ...]) -> Any:
    """How weights become codes, as `rounding.nearest` has it."""
    if rounding.first_of_consecutive(levels) is not None:
        return kernels.native().codes(levels[0], levels[-1], [], [], [])
    order, boundaries = rounding.sorted_codes(levels)
    return kernels.native().codes(0.0, 0.0, boundaries.tolist(), order.tolist(), [levels[code] for code in order.tolist()])


def _bytes(part: Tensor) -> NDArray[Any]:
    octets: NDArray[Any] = part.view(torch.uint8).reshape(len(part), -1).numpy()
    return octets
