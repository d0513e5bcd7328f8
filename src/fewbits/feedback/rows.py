"""Some rows of a weight on their way to codes. Every array is (cols, rows): its columns in visiting order, its rows independent."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fewbits.feedback.hessian import Ordered
from fewbits.feedback.tiles import Columns, feed, settle
from fewbits.fitting import total
from fewbits.rounding import decode

if TYPE_CHECKING:
    from fewbits.formats import Format, Grid


class Rows:
    def __init__(self, w: Tensor, fmt: Format, h: Ordered, fixed: Grid | None, dtype: torch.dtype, backend: str) -> None:
        assert fmt.levels
        self.fmt, self.levels, self.h, self.fixed, self.backend = fmt, fmt.levels, h, fixed, backend
        weights = w.to(dtype).T[h.columns].contiguous()
        codes, scale = torch.zeros(weights.shape, dtype=torch.uint8), torch.zeros(weights.shape)
        self.columns = Columns(weights, torch.zeros_like(weights), codes, scale, None)
        self.grids: list[Grid] = []  # of each of h.blocks

    def round(self) -> None:
        """The first pass: each block gets its scales from the weights as compensated by then, and its codes by error feedback."""
        for block in self.h.blocks:
            own = self.columns[block]
            asked = self.h.ahead[block, : block.start] @ self.columns.errors[: block.start]
            compensated = own.weights + asked
            grid, scale, offset = self._fitted(compensated, block)
            self.grids.append(grid)
            self._set_affine(block, scale, offset)
            forward = self.h.forward[block, block]
            feed(self.columns[block], compensated.addmm_(forward, asked), forward, self.levels, self.backend)

    def improve(self, refit: bool) -> None:
        """Solve each block anew, given the errors of all others, and take the rows that are better for it.

        Given the others, a block's error is (t - q) H_BB (t - q)^T with t its best real values: a small problem of the same kind, with
        new scales if asked for. This moves several codes and their scale at once, which a visit of single columns cannot.
        """
        if len(self.h.blocks) == 1:
            return  # nothing is given: it would be the first pass again
        for index, block in enumerate(self.h.blocks):
            part, own = self.h.parts[index], self.columns[block]
            targets = torch.addmm(own.weights, part.others, self.columns.errors)
            if refit:
                grid, scale, offset = self._fitted(targets, block)
            else:
                grid, scale, offset = self.grids[index], own.scale, own.offset
            trial = Columns(targets, torch.zeros_like(targets), torch.zeros_like(own.codes), scale, offset)
            feed(trial, targets.clone(), part.forward, self.levels, self.backend)
            settle(trial, self.h.every[block, block], self.levels, self.backend)
            present = own.errors + (targets - own.weights)
            better = _loss(trial.errors, part.hessian) < _loss(present, part.hessian)
            decoded = decode(trial.codes, self.levels, scale, offset)
            own.errors.copy_(torch.where(better, own.weights - decoded, own.errors))
            own.codes.copy_(torch.where(better, trial.codes, own.codes))
            if refit:
                old = self.grids[index]
                self.grids[index] = {
                    name: entry if shared(name, entry, self.fixed) else torch.where(better.unsqueeze(1), entry, old[name])
                    for name, entry in grid.items()
                }
                own.scale.copy_(torch.where(better, scale, own.scale))
                if offset is not None and own.offset is not None:
                    own.offset.copy_(torch.where(better, offset, own.offset))

    def descend(self) -> None:
        settle(self.columns, self.h.every, self.levels, self.backend)

    def result(self) -> tuple[Tensor, Grid]:
        """(codes (rows, cols), grid), with the columns where they belong."""
        codes = torch.empty_like(self.columns.codes)
        codes[self.h.columns] = self.columns.codes
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

    def _set_affine(self, block: slice, scale: Tensor, offset: Tensor | None) -> None:
        if offset is not None and self.columns.offset is None:
            c = self.columns
            self.columns = Columns(c.weights, c.errors, c.codes, c.scale, torch.zeros_like(c.scale))
        own = self.columns[block]
        own.scale.copy_(scale)
        if offset is not None and own.offset is not None:
            own.offset.copy_(offset)


def shared(name: str, entry: Tensor, fixed: Grid | None) -> bool:
    """Whether a grid's entry is the whole weight's, fitted once."""
    return fixed is not None and entry.shape == fixed[name].shape == (1, 1)


def _loss(errors: Tensor, hessian: Tensor) -> Tensor:
    """Of each row. Folded: torch's sum takes another order for other shapes and threads, and the choice must not."""
    return total((hessian @ errors).mul_(errors), 0)
