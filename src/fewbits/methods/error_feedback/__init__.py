"""Error feedback (GPTQ) for every format: codes that minimise the sum over rows of (w - q) H (w - q)^T, H the inputs' second moment.

    solved = solve(w, fmt, hessian)
    parts = kernels.pack(fmt, solved.codes, solved.grid)

Columns are rounded one after the other, each to its weight plus a correction for the errors made so far (`hessian.py`). Each block of
the format gets its scales when its turn comes, fitted to the weights as corrected by then. Afterwards come passes in which each block,
and then each column, is solved again given all the others; only what lowers the error is taken (`rows.py`; `native.py` runs the same loop
in C++). The loop over single columns is in `columns.py`, that over vectors of columns in `vectors.py`. `outputs.py` lets rows make up for
each other too; `holdout.py` judges codes on samples that they were not fitted to; `expected.py` makes errors of the same shape without
any codes.

All of it works on the damped Hessian. Damping stands for inputs that calibration did not see: passes over the undamped Hessian would
undo its benefit, and could raise the error that the first pass minimised.

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

from fewbits.devices import processor
from fewbits.errors import InputError
from fewbits.methods.error_feedback import native
from fewbits.methods.error_feedback.hessian import Order, Ordered, Singular, Visited, first_pass, ordered, visited
from fewbits.methods.error_feedback.outputs import Outputs, correction
from fewbits.methods.error_feedback.rows import Rows, shared

if TYPE_CHECKING:
    from fewbits.formats import Format, Grid

__all__ = [
    "Order",
    "Ordered",
    "Outputs",
    "Singular",
    "Solved",
    "Visited",
    "first_pass",
    "objective",
    "ordered",
    "solve",
    "solve_both_sides",
    "visited",
    "width",
]

_CHUNK = 1 << 22  # weights at a time: some ten arrays of this size are alive at once, 100 to 200 MB


@dataclass(frozen=True)
class Solved:
    codes: Tensor  # as `Format.pack` takes them
    grid: Grid
    damping: float  # what was added to the diagonal, as a share of its mean: more than asked for where the Hessian was singular
    notes: tuple[str, ...]  # for a person: what differs from what was asked for


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
) -> Solved:
    """w (rows, cols), hessian (cols, cols) symmetric and positive semi-definite, of any magnitude; or one that `ordered` has
    prepared for all formats of one `width`, and then damping and order were chosen there.

    order: `blocks` visits blocks by falling mean of the diagonal, and the columns inside each by falling diagonal; `columns` visits all
    columns by falling diagonal, with scales fitted once to the original weights; `natural` keeps the order of the weight. A format with
    one scale per row has one block: there the first two are the same.
    refits: in how many of the passes blocks get new scales too; each adds two thirds to the time (q4_0).
    dtype: float64 is computed in torch, float32 by the native loop where there is one.
    Raises Singular where no damping makes the Hessian positive definite.
    """
    work = _Work(w, fmt, hessian, Effort(damping, order, passes, refits, dtype))
    pieces = [work.solve(chunk) for chunk in work.w.split(max(1, _CHUNK // max(1, w.shape[1])))]
    return work.joined(pieces)


def solve_both_sides(w: Tensor, fmt: Format, hessian: Tensor | Ordered, outputs: Outputs, *, damping: float = 0.03) -> Solved:
    """As `solve`, for the sum of tr(G E H E^T): rows in the order of `outputs`, each corrected for those before it."""
    work = _Work(w, fmt, hessian, Effort(damping))
    errors, pieces, visited = torch.zeros_like(work.w), [], []
    for rows, earlier in outputs:
        codes, grid = work.solve(work.w[rows] + correction(earlier, errors))
        errors[rows] = work.w[rows] - fmt.decode(codes, grid)
        pieces.append((codes, grid))
        visited.append(rows)
    return work.joined(pieces, torch.cat(visited).argsort())


@dataclass(frozen=True)
class Effort:
    damping: float = 0.03
    order: Order = "blocks"
    passes: int = 2
    refits: int = 1
    dtype: torch.dtype = torch.float32


class _Work:
    """What the rows of a weight share while they are solved."""

    def __init__(self, w: Tensor, fmt: Format, hessian: Tensor | Ordered, effort: Effort) -> None:
        rows, cols = w.shape
        if fmt.is_cast:
            raise InputError(f"{fmt.name} is a cast: it has no levels to choose from", "error feedback needs a format with codes")
        if reason := fmt.fits((rows, cols)):
            raise InputError(f"{fmt.name} cannot hold this weight: {reason}", "choose a format with smaller blocks")
        if isinstance(hessian, Tensor) and hessian.shape != (cols, cols):
            raise ValueError(f"the Hessian is {tuple(hessian.shape)}, the weight has {cols} columns")
        if not w.isfinite().all():
            raise InputError("the weight holds NaN or infinity", "no format can keep them: repair the checkpoint")
        self.w, self.fmt, self.effort, self.isa = w.detach().float(), fmt, effort, _isa(effort.dtype)
        if isinstance(hessian, Tensor):
            hessian = ordered(hessian, width(fmt, cols), effort.order, effort.damping, effort.dtype, fmt.dimension, passes=effort.passes)
        self.h = hessian
        self.fixed = fmt.fit(self.w, self.h.stakes) if fmt.tensor_wide else None

    def solve(self, some: Tensor) -> tuple[Tensor, Grid]:
        if self.isa and (found := native.solve(some, self.fmt, self.h, self.fixed, self.effort.passes, self.effort.refits, self.isa)):
            return found
        solver = Rows(some, self.fmt, self.h, self.fixed, self.effort.dtype, self.isa)
        solver.round()
        for done in range(self.effort.passes):
            solver.improve(refit=done < self.effort.refits)
            solver.descend()
        return solver.result()

    def joined(self, pieces: list[tuple[Tensor, Grid]], order: Tensor | None = None) -> Solved:
        """`order`: where each row of the weight is among those of the pieces."""
        codes, grids = torch.cat([codes for codes, _ in pieces]), [grid for _, grid in pieces]
        grid = {}
        for name, entry in grids[0].items():
            if shared(name, entry, self.fixed):
                grid[name] = entry
                continue
            whole = torch.cat([part[name] for part in grids])
            grid[name] = whole if order is None else whole[order]
        return Solved(codes if order is None else codes[order], grid, self.h.damping, self.h.notes)


def objective(w: Tensor, decoded: Tensor, hessian: Tensor) -> Tensor:
    """(w - decoded) H (w - decoded)^T of each row, in float64."""
    error = w.double() - decoded.double()
    return (error @ hessian.double() * error).sum(1)


def width(fmt: Format, cols: int) -> int:
    """Columns that are fitted together."""
    return cols if fmt.group is None else math.lcm(fmt.group, fmt.block)


def _isa(dtype: torch.dtype) -> str | None:
    """The instruction set of the native loop; None: the loop in torch, which gives the same bits."""
    return processor.fastest(("avx512", "avx2", "scalar")) if dtype == torch.float32 else None
