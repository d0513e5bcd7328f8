"""Some rows of a weight, from values to codes. Every array is (cols, rows): columns in visiting order, rows independent of each other.

This is the loop over blocks in torch. `native.py` runs the same loop in C++ where a format's scales are searched for there too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fewbits.formats.search import total
from fewbits.methods.error_feedback.columns import Columns, feed, settle
from fewbits.methods.error_feedback.hessian import Ordered
from fewbits.methods.error_feedback.product import added

if TYPE_CHECKING:
    from fewbits.formats import Format, Grid


class Rows:
    def __init__(self, w: Tensor, fmt: Format, h: Ordered, fixed: Grid | None, dtype: torch.dtype, isa: str | None) -> None:
        codebook = fmt.codebook
        assert codebook
        self.fmt, self.codebook, self.h, self.fixed, self.isa = fmt, codebook, h, fixed, isa
        weights = w.to(dtype).T[h.columns].contiguous()
        shape = len(weights) // fmt.dimension, weights.shape[1]
        codes = torch.zeros(shape, dtype=torch.uint8 if fmt.dimension == 1 else torch.int32)
        scale = torch.zeros(weights.shape)
        self.columns = Columns(weights, torch.zeros_like(weights), codes, scale, None)
        self.grids: list[Grid] = []  # of each of h.blocks

    def round(self) -> None:
        """The first pass: each block gets its scales from the weights as corrected by then, and its codes by error feedback."""
        for block in self.h.blocks:
            correction = self._correction(block)
            corrected = self.columns.weights[block] + correction
            grid, scale, offset = self._fitted(corrected, block)
            self.grids.append(grid)
            self._set_affine(block, scale, offset)
            forward, pivots = self.h.forward[block, block], None if self.h.pivots is None else self.h.pivots[block]
            feed(self.columns[block], added(corrected, forward, correction, self.isa), forward, pivots, self.codebook, self.isa)

    def improve(self, refit: bool) -> None:
        """Solve each block again, given the errors of all others, and keep the new codes of the rows whose error falls.

        Given the others, a block's error is (t - q) H_BB (t - q)^T with t its best real values: a small problem of the same kind. With
        `refit` it gets new scales too. This moves several codes and their scale at once, which a visit to single columns cannot.
        """
        if len(self.h.blocks) == 1:
            return  # there are no other blocks: it would be the first pass again
        assert self.h.every is not None
        for index, block in enumerate(self.h.blocks):
            part, present = self.h.parts[index], self.columns[block]
            targets = added(present.weights, part.others, self.columns.errors, self.isa)
            if refit:
                grid, scale, offset = self._fitted(targets, block)
            else:
                grid, scale, offset = self.grids[index], present.scale, present.offset
            trial = Columns(targets, torch.zeros_like(targets), torch.zeros_like(present.codes), scale, offset)
            own = None if self.h.own is None else self.h.own[block]
            feed(trial, targets.clone(), part.forward, part.pivots, self.codebook, self.isa)
            settle(trial, self.h.every[block, block], own, self.codebook, self.isa)
            errors = present.errors + (targets - present.weights)  # from the targets, as those of the trial are
            better = self._loss(trial.errors, part.hessian) < self._loss(errors, part.hessian)
            present.errors.copy_(torch.where(better, present.weights - trial.decoded(self.codebook), present.errors))
            present.codes.copy_(torch.where(better, trial.codes, present.codes))
            if refit:
                old = self.grids[index]
                self.grids[index] = {
                    name: entry if shared(name, entry, self.fixed) else torch.where(better.unsqueeze(1), entry, old[name])
                    for name, entry in grid.items()
                }
                present.scale.copy_(torch.where(better, scale, present.scale))
                if offset is not None and present.offset is not None:
                    present.offset.copy_(torch.where(better, offset, present.offset))

    def descend(self) -> None:
        assert self.h.every is not None
        settle(self.columns, self.h.every, self.h.own, self.codebook, self.isa)

    def result(self) -> tuple[Tensor, Grid]:
        """(codes (rows, cols), grid), with the columns in the weight's order."""
        codes = torch.empty_like(self.columns.codes)
        codes[self.h.columns[:: self.fmt.dimension] // self.fmt.dimension] = self.columns.codes
        natural = sorted(range(len(self.grids)), key=lambda index: int(self.h.columns[self.h.blocks[index]].min()))
        grids = [self.grids[index] for index in natural]
        joined = {
            name: entry if shared(name, entry, self.fixed) else torch.cat([grid[name] for grid in grids], 1)
            for name, entry in grids[0].items()
        }
        return codes.T.contiguous(), joined

    def _fitted(self, targets: Tensor, block: slice) -> tuple[Grid, Tensor, Tensor | None]:
        """The grid for these values of a block, and (columns, rows) of scale and offset."""
        columns = self.h.columns[block]
        first = int(columns.min())
        local = columns - first
        natural = torch.empty_like(targets, dtype=torch.float32)
        natural[local] = targets.float()
        grid = self.fmt.fit(natural.T.contiguous(), self.h.stakes[first : first + len(local)], self.fixed)
        scale, offset = self.fmt.affine(grid, local)
        shape = targets.shape[1], targets.shape[0]
        return grid, scale.expand(shape).T.contiguous(), None if offset is None else offset.expand(shape).T.contiguous()

    def _correction(self, block: slice) -> Tensor:
        """By the errors in earlier blocks."""
        if self.h.ahead is None:
            return torch.zeros_like(self.columns.weights[block])
        return added(None, self.h.ahead[block, : block.start], self.columns.errors[: block.start], self.isa)

    def _loss(self, errors: Tensor, hessian: Tensor) -> Tensor:
        """Of each row. `total` adds in one fixed order; torch's sum depends on shape and threads, and then other codes would be chosen."""
        return total(added(None, hessian, errors, self.isa).mul_(errors), 0)

    def _set_affine(self, block: slice, scale: Tensor, offset: Tensor | None) -> None:
        if offset is not None and self.columns.offset is None:
            c = self.columns
            self.columns = Columns(c.weights, c.errors, c.codes, c.scale, torch.zeros_like(c.scale))
        columns = self.columns[block]
        columns.scale.copy_(scale)
        if offset is not None and columns.offset is not None:
            columns.offset.copy_(offset)


def shared(name: str, entry: Tensor, fixed: Grid | None) -> bool:
    """Whether a grid's entry is one value for the whole weight, fitted once."""
    return fixed is not None and entry.shape == fixed[name].shape == (1, 1)
