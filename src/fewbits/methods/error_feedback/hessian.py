"""From a Hessian to the order in which columns are visited, and to how far an error in one moves the target of another.

With the columns in visiting order and H = R R^T, R upper triangular, the error of a row is |(w - q) R|^2, and column k of it is

    R_kk * (w_k + sum_{i<k} (w_i - q_i) R_ik / R_kk - q_k)

so each column is rounded to its weight plus a correction for the errors of the columns before it. This is GPTQ's update without an
inverse: one Cholesky factorisation, and no weight is changed in place from column to column.

Where a code stands for a vector of d columns, they are rounded together. With L the unit lower triangle of their couplings, their best
real values are weights + L^-1 (corrections), and missing these by r costs r L^T D L r^T, D their pivots: the metric of the vector.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from fewbits.devices import processor
from fewbits.errors import InputError
from fewbits.formats.storage.codebooks import normalised

Order = Literal["blocks", "columns", "natural"]
_STEP, _MOST = 10.0, 1.0  # damping is raised by this factor, up to the mean of the diagonal itself
_ROWS = 256  # of a matrix at a time, where a float64 copy of all of it would take too much memory
_LEAST = 1e-3  # the first attempt where no damping was asked for and the Hessian is singular


class Singular(InputError):  # noqa: N818
    """Even damping by the mean of the diagonal does not make the Hessian positive definite: only rounding to nearest remains."""


@dataclass(frozen=True)
class Part:
    """One block, given the errors of all others: its best real values are weights + others @ errors, and what it loses by deviating
    from them is weighed by its part of the Hessian."""

    others: Tensor  # (block, cols) H_BB^-1 H_B*, zero within the block
    forward: Tensor  # (block, block) like Ordered.forward, for the block alone
    hessian: Tensor  # (block, block)
    pivots: Tensor | None  # like Ordered.pivots


@dataclass(frozen=True)
class Ordered:
    """A damped Hessian with its columns in visiting order. The couplings `forward`, `ahead` and `every` are (cols, cols) and act from the
    left: targets (cols, rows) = weights + coupling @ errors."""

    columns: Tensor  # (cols,) the natural index of each visited column
    blocks: list[slice]  # of visited columns: each lies within one block of the format
    parts: list[Part]  # of each block
    stakes: Tensor  # (cols,) float32, in natural order: the cost of an error in a column, as importance for the fit of scales
    forward: Tensor  # from errors in earlier columns, while later ones are still free to compensate: strictly lower triangular
    ahead: Tensor | None  # from errors in earlier blocks, while the whole block is still free: zero from the block on; None: there is one
    every: Tensor | None  # from errors in all other columns (other vectors): zero diagonal (blocks of it); None: no pass needs it
    pivots: Tensor | None  # (cols, dimension) the metric of each vector while later columns are free; None: codes are of single columns
    own: Tensor | None  # the same given all other columns: the Hessian's blocks on the diagonal
    damping: float
    notes: tuple[str, ...]

    @cached_property
    def native(self) -> Any:
        """The same as native code takes it."""
        spans = sorted((int(self.columns[block].min()), block.stop - block.start) for block in self.blocks)
        weight = torch.cat([normalised(self.stakes[first : first + count]) for first, count in spans])
        given = (self.ahead, self.every, self.pivots, self.own)
        parts = [(*(_array(each) for each in (part.others, part.forward, part.hessian)), _array(part.pivots)) for part in self.parts]
        starts = [block.start for block in self.blocks] + [len(self.columns)]
        return processor.native().FeedbackOrder(
            self.columns.numpy(), starts, weight.numpy(), _array(self.forward), *map(_array, given), parts
        )


def _array(tensor: Tensor | None) -> Any:
    return None if tensor is None else tensor.contiguous().numpy()


@dataclass(frozen=True)
class Visited:
    """A Hessian without damping, in float64, with its columns in visiting order."""

    h: Tensor
    columns: Tensor  # as in Ordered
    blocks: list[slice]
    diagonal: Tensor  # in natural order, before columns that were always zero got the mean
    mean: float
    dimension: int
    notes: tuple[str, ...]


def visited(hessian: Tensor, width: int, order: Order, dimension: int = 1) -> Visited:
    """`width`: columns per block of the format, as the function `width` gives it. `dimension`: columns that one code stands for."""
    h, diagonal, mean, notes = _living(hessian)
    columns, blocks = visits(diagonal, width, order, dimension)
    h = h[columns]
    h = h[:, columns]  # in two steps, so that at most two such matrices exist: one of a wide layer takes gigabytes
    return Visited(h, columns, blocks, diagonal, mean, dimension, notes)


def ordered(
    hessian: Tensor, width: int, order: Order, damping: float, dtype: torch.dtype, dimension: int = 1, *, passes: int = 2
) -> Ordered:
    """passes: with 0, nothing is made that only passes after the first need."""
    of = visited(hessian, width, order, dimension)
    root, added = factored(of.h, damping, of.mean)
    if not passes:
        return _ordered(of, root, damping, added, dtype)
    h, blocks = of.h, of.blocks
    h.diagonal().add_(added * of.mean)
    parts = [_part(h, block, dtype, dimension) for block in blocks] if len(blocks) > 1 else []
    every = _every(h, dtype, dimension)
    own = None if dimension == 1 else _on_diagonal(h, dimension).div(of.mean).flatten(0, 1).float()
    del h
    of = replace(of, h=torch.empty(0))  # one of a wide layer takes gigabytes
    return _ordered(of, root, damping, added, dtype, parts, every, own)


def first_pass(of: Visited, damping: float, dtype: torch.dtype) -> Ordered:
    """What the first pass needs; `of` can be damped again."""
    root, added = factored(of.h, damping, of.mean)
    return _ordered(of, root, damping, added, dtype)


def _ordered(
    of: Visited,
    root: Tensor,
    damping: float,
    added: float,
    dtype: torch.dtype,
    parts: Sequence[Part] = (),
    every: Tensor | None = None,
    own: Tensor | None = None,
) -> Ordered:
    notes = of.notes
    if added != damping:
        notes += (f"damping raised from {damping:g} to {added:g}: the Hessian was singular",)
    # The geometric mean of what an error costs if nothing compensates for it (the diagonal) and if all later columns do (the pivot). On
    # the embedded model's activations the diagonal alone is 0.1 % worse for q4_0 and 0.6 % for q4_k, the pivot 0.2 % better and 1.4 %
    # worse.
    stakes = torch.empty_like(of.diagonal)
    stakes[of.columns] = (of.diagonal[of.columns].sqrt() * root.diagonal()).nan_to_num(0)
    forward, pivots = _forward(root, of.dimension)
    ahead = forward.new_zeros(forward.shape, dtype=dtype) if len(of.blocks) > 1 else None
    for block in of.blocks[1:]:
        assert ahead is not None
        ahead[block, : block.start] = free_of_block(forward, block)
    return Ordered(of.columns, of.blocks, list(parts), stakes.float(), forward.to(dtype), ahead, every, pivots, own, added, notes)


def _living(hessian: Tensor) -> tuple[Tensor, Tensor, float, tuple[str, ...]]:
    """(the Hessian in float64, its diagonal, the mean of that, notes): columns whose inputs were always zero get the mean, so that they do
    not influence the others."""
    h = _checked(hessian)
    notes: tuple[str, ...] = ()
    diagonal = h.diagonal().clone()
    dead = diagonal == 0
    mean = float(diagonal[~dead].mean()) if not dead.all() else 1.0
    if not mean > 0:
        raise Singular("the Hessian's diagonal is negative", "a second moment never is: recompute the statistics")
    if dead.all():
        notes = ("the Hessian is zero: every column was rounded to nearest",)
    h[dead] = 0
    h[:, dead] = 0
    h.diagonal()[dead] = mean
    return h, diagonal, mean, notes


def errors_from(misses: Tensor, hessian: Tensor, damping: float) -> Tensor:
    """The errors (rows, cols) that feedback is left with where columns, by falling diagonal, miss their targets by `misses`: the map from
    one to the other, without rounding anything. Raises Singular."""
    h, diagonal, mean, _ = _living(hessian)
    columns, _ = visits(diagonal, len(h), "columns")
    root, _ = factored(h[columns][:, columns], damping, mean)
    forward = root.T / root.diagonal().unsqueeze(1)  # with ones on the diagonal: misses = forward @ errors
    errors = torch.empty(misses.shape, dtype=torch.float64)
    errors[:, columns] = torch.linalg.solve_triangular(forward, misses.double()[:, columns].T, upper=False, unitriangular=True).T
    return errors


def free_of_block(forward: Tensor, block: slice) -> Tensor:
    """The coupling of a block to what comes before it, while the whole block is free: each of its columns takes its target, so that no
    error inside the block adds to a correction."""
    free: Tensor = torch.linalg.solve_triangular(forward[block, block], forward[block, : block.start], upper=False, unitriangular=True)
    return free


def _every(h: Tensor, dtype: torch.dtype, dimension: int) -> Tensor:
    coupling = h.new_empty(h.shape, dtype=dtype)
    if dimension > 1:
        for rows, into in zip(h.split(_ROWS), coupling.split(_ROWS), strict=True):
            first = into.storage_offset() // len(h)
            inside = _on_diagonal(rows[:, first : first + len(rows)], dimension)
            into.copy_(torch.linalg.solve(inside, rows.unflatten(0, (-1, dimension))).flatten(0, 1))
        _on_diagonal(coupling, dimension).zero_()
        return coupling
    for rows, into in zip(h.split(_ROWS), coupling.split(_ROWS), strict=True):
        start = into.storage_offset() // len(h)
        into.copy_(rows / rows.diagonal(start).unsqueeze(1))
    coupling.diagonal().zero_()
    return coupling


def _part(h: Tensor, block: slice, dtype: torch.dtype, dimension: int) -> Part:
    inside = h[block, block]
    lower = torch.linalg.cholesky(inside.flip(0, 1))  # positive definite, as the whole matrix is
    others = torch.linalg.solve(inside, h[block])
    others[:, block] = 0
    forward, pivots = _forward(lower.flip(0, 1), dimension)
    return Part(others.to(dtype).contiguous(), forward.to(dtype), inside.to(dtype).contiguous(), pivots)


def _forward(root: Tensor, dimension: int) -> tuple[Tensor, Tensor | None]:
    """(coupling, metric of the vectors), from an upper triangular root of the Hessian."""
    pivots = root.diagonal().square()  # now: the coupling may be made in the root's memory
    coupling = root.T.contiguous()
    coupling.div_(root.diagonal().unsqueeze(1))
    coupling.diagonal().zero_()
    if dimension == 1:
        return coupling, None
    inside = _on_diagonal(coupling, dimension)
    lower = inside + torch.eye(dimension, dtype=inside.dtype)
    metric = lower.mT @ (pivots.reshape(-1, dimension, 1) * lower) / pivots.mean()
    for vector in range(1, len(lower)):  # those before it are errors by now: the vector takes its best values given them
        rows = coupling[vector * dimension : (vector + 1) * dimension, : vector * dimension]
        rows.copy_(torch.linalg.solve_triangular(lower[vector], rows, upper=False, unitriangular=True))
    inside.zero_()
    return coupling, metric.flatten(0, 1).float()


def _on_diagonal(h: Tensor, dimension: int) -> Tensor:
    """(n, dimension, dimension): a view of the blocks on the diagonal."""
    n, (row, column) = len(h) // dimension, h.stride()
    return h.as_strided((n, dimension, dimension), (dimension * (row + column), row, column), h.storage_offset())


def visits(diagonal: Tensor, width: int, order: Order, dimension: int = 1) -> tuple[Tensor, list[slice]]:
    """The order of the columns. Those whose errors cost most come first: columns rounded later can still compensate for them. Columns
    under one code stay together."""
    if dimension > 1:
        vectors, spans = visits(diagonal.unflatten(0, (-1, dimension)).mean(1), width // dimension, order)
        columns = (vectors.unsqueeze(1) * dimension + torch.arange(dimension)).flatten()
        return columns, [slice(span.start * dimension, span.stop * dimension) for span in spans]
    cols = len(diagonal)
    spans = [slice(start, min(start + width, cols)) for start in range(0, cols, width)]
    if order == "natural":
        return torch.arange(cols), spans
    if order == "columns":
        return diagonal.argsort(descending=True, stable=True), [slice(0, cols)]
    if order != "blocks":
        raise InputError(f"no order is named `{order}`", "choose `blocks`, `columns` or `natural`")
    means = torch.stack([diagonal[span].mean() for span in spans])
    visited, blocks, done = [], [], 0
    for index in means.argsort(descending=True, stable=True).tolist():
        span = spans[index]
        visited.append(span.start + diagonal[span].argsort(descending=True, stable=True))
        blocks.append(slice(done, done + span.stop - span.start))
        done = blocks[-1].stop
    return torch.cat(visited), blocks


def _checked(hessian: Tensor) -> Tensor:
    if hessian.ndim != 2 or hessian.shape[0] != hessian.shape[1]:
        raise ValueError(f"a Hessian is square, this one is {tuple(hessian.shape)}")
    if not hessian.isfinite().all():
        raise Singular("the Hessian holds NaN or infinity", "look for overflows in the activations; float32 sums hold up to 3e38")
    h = hessian.double() if hessian.dtype != torch.float64 else hessian.clone()
    return h.add_(hessian.T).div_(2)  # a sum of outer products is symmetric only up to rounding errors: the mean of both halves is


def factored(h: Tensor, damping: float, mean: float) -> tuple[Tensor, float]:
    """(upper triangular R with R R^T = h + added * mean, added)."""
    if not (math.isfinite(damping) and damping >= 0):
        raise InputError(f"damping is {damping}", "it is a share of the mean of the diagonal: 0.01 to 0.1 is usual")
    added = damping
    while True:
        flipped = h.flip(0, 1).T  # h is symmetric; transposed it is in LAPACK's column order, so it is factored in place
        flipped.diagonal().add_(added * mean)
        before = flipped.diagonal().clone()
        lower, failed = torch.linalg.cholesky_ex(flipped, out=(flipped, torch.empty((), dtype=torch.int32)))
        # a pivot within rounding error of zero counts as singular: what is divided by it would be noise
        noise = len(h) * torch.finfo(torch.float64).eps
        if not failed and (lower.diagonal().square() > noise * before).all():
            return lower.T.flip(0, 1).T, added  # transposed it is contiguous, as `_forward` needs it
        if added >= _MOST:
            raise Singular(f"the Hessian is not positive semi-definite: damping by {added:g} does not help", "recompute the statistics")
        added = min(_MOST, max(added * _STEP, _LEAST))
