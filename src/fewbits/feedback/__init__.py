"""Error feedback (GPTQ) for every format: codes that minimise the sum over rows of (w - q) H (w - q)^T, H the inputs' second moment.

    solved = solve(w, fmt, hessian)
    parts = kernels.pack(fmt, solved.codes, solved.grid)

Columns are rounded one after the other, each to its weight plus what the errors made so far ask of it (`hessian.py`). Each block of
the format gets its scales when its turn comes, from the weights as compensated by then. Afterwards come passes in which each block,
and then each column, is solved anew, given all the others; only what lowers the error is taken (`rows.py`).

All of it works on the damped Hessian. Damping stands for inputs that calibration did not see; passes over the bare Hessian would take
back what it bought, and could raise the error that the first pass minimised.

Measured on the embedded model's activations, error on held-out text, same bytes, q4_0: two passes -9 %, with a refit of scales in one of
them -11 %, in two of three -12 %; a third pass without refit gains 0.2 % (q4_k: 0.8 %), for super-blocks of 256 a refit 0.2 %.
Natural order +4 % (q4_k +7 %), order by columns with scales fitted once +7 % (q4_k +1 %).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fewbits import kernels
from fewbits.errors import InputError
from fewbits.feedback.hessian import Order, Ordered, Singular, ordered
from fewbits.feedback.rows import Rows, shared

if TYPE_CHECKING:
    from fewbits.formats import Format, Grid

__all__ = ["Order", "Ordered", "Singular", "Solved", "objective", "ordered", "solve", "width"]

_CHUNK = 1 << 22  # weights at a time: some ten arrays of this size are alive at once, 100 to 200 MB


@dataclass(frozen=True)
class Solved:
    codes: Tensor  # (rows, cols) uint8
    grid: Grid
    damping: float  # the share of the mean diagonal really added
    notes: tuple[str, ...]  # what was not as asked for; empty when all went well


def solve(
    w: Tensor,
    fmt: Format,
    hessian: Tensor | Ordered,
    *,
    damping: float = 0.03,
    order: Order = "blocks",
    passes: int = 2,
    refits: int = 1,
    dtype: torch.dtype = torch.float32,
    native: bool | None = None,
) -> Solved:
    """w (rows, cols), hessian (cols, cols) symmetric and positive semi-definite, of any magnitude; or one that `ordered` has
    prepared for all formats of one `width`, and then damping and order are its own.

    order: `blocks` by falling mean diagonal, and so the columns inside of each; `columns` all by falling diagonal, with scales fitted
    once to the weights as they are; `natural` as they lie. A format with one scale per row has one block: there the first two are the same.
    refits: in so many of the passes blocks get new scales too; each adds two thirds to the time (q4_0).
    native: None takes the native loop where there is one; the reference gives the same bits and works in float64 too.
    Raises Singular where no positive definite Hessian is to be had from this one.
    """
    rows, cols = w.shape
    if fmt.levels is None:
        raise InputError(f"{fmt.name} is a cast: it has no levels to choose from", "error feedback needs a format with codes")
    if reason := fmt.fits((rows, cols)):
        raise InputError(f"{fmt.name} cannot hold this weight: {reason}", "choose a format with smaller blocks")
    if isinstance(hessian, Tensor) and hessian.shape != (cols, cols):
        raise ValueError(f"the Hessian is {tuple(hessian.shape)}, the weight has {cols} columns")
    if not w.isfinite().all():
        raise InputError("the weight holds NaN or infinity", "no format can keep them: repair the checkpoint")
    w, backend = w.detach().float(), _backend(dtype, native)
    h = hessian if isinstance(hessian, Ordered) else ordered(hessian, width(fmt, cols), order, damping, dtype)
    fixed = fmt.fit(w, h.stakes) if fmt.tensor_wide else None

    def solve_rows(chunk: Tensor) -> tuple[Tensor, Grid]:
        some = Rows(chunk, fmt, h, fixed, dtype, backend)
        some.round()
        for done in range(passes):
            some.improve(refit=done < refits)
            some.descend()
        return some.result()

    pieces = [solve_rows(chunk) for chunk in w.split(max(1, _CHUNK // max(1, cols)))]
    grids = [grid for _, grid in pieces]
    grid = {name: entry if shared(name, entry, fixed) else torch.cat([part[name] for part in grids]) for name, entry in grids[0].items()}
    return Solved(torch.cat([codes for codes, _ in pieces]), grid, h.damping, h.notes)


def objective(w: Tensor, decoded: Tensor, hessian: Tensor) -> Tensor:
    """(w - decoded) H (w - decoded)^T of each row, in float64."""
    error = w.double() - decoded.double()
    return (error @ hessian.double() * error).sum(1)


def width(fmt: Format, cols: int) -> int:
    """Columns that are fitted together."""
    return cols if fmt.run is None else math.lcm(fmt.run, fmt.block)


def _backend(dtype: torch.dtype, native: bool | None) -> str:
    if native is False or (native is None and dtype != torch.float32):
        return "reference"
    isa = kernels.fastest(("avx512", "avx2", "scalar"))
    found = f"native-{isa}" if isa else "reference"
    if native and dtype != torch.float32:
        raise InputError(f"the native loop computes in float32, not in {dtype}", "leave `native` to its default")
    if native and found == "reference":
        reason = kernels.native_missing() or "FEWBITS_KERNEL forces the reference"
        raise InputError(f"there is no native loop: {reason}", "leave `native` to its default")
    return found
