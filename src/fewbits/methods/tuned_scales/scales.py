"""The floating-point entries of one weight's grid, as gradient descent moves them; codes stay."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fewbits.formats.search import float16_scale

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fewbits.formats import Format, Grid

_TINY = 1e-12  # against division by zero, for a weight of zeros


class Scales:
    """Entries times (1 + change): relative changes are of one size, whatever the scales are."""

    def __init__(self, fmt: Format, codes: Tensor, grid: Grid) -> None:
        self.fmt, self.codes, self.start = fmt, codes, grid
        self.changes = {
            name: torch.zeros_like(entry, dtype=torch.float32, requires_grad=True)
            for name, entry in grid.items()
            if entry.is_floating_point() and not fmt.is_cast
        }

    def decoded(self, grid: Grid | None = None) -> Tensor:
        """(rows, cols) by this grid, or by the one that descent has come to."""
        return self.fmt.decode(self.codes, self._moved() if grid is None else grid)

    @torch.enable_grad()
    def add_gradient(self, upstream: Tensor) -> None:
        """From the gradient of the decoded weight (rows, cols) to those of the changes."""
        self.decoded().backward(upstream)

    @torch.no_grad()
    def stored(self) -> Grid:
        """Moved, and rounded as the format stores it; the grid of the start itself if it has nothing to move."""
        if not self.changes:
            return self.start
        return {name: _stored(entry, self.start[name].dtype) if name in self.changes else entry for name, entry in self._moved().items()}

    @torch.no_grad()
    def rounding_error(self, w: Tensor) -> float:
        """Of the whole weight, relative."""
        return float((self.decoded(self.start) - w).norm() / w.norm().clamp(min=_TINY))

    def _moved(self) -> Grid:
        """With a graph back to the changes."""
        return self.start | {name: self.start[name].float() * (1 + change) for name, change in self.changes.items()}


def untunable(scales: Iterable[Scales]) -> tuple[str, ...]:
    """One note for each format that has codes but no floating-point scale."""
    fixed = sorted({entry.fmt.name for entry in scales if not entry.fmt.is_cast and not entry.changes})
    return tuple(f"scales of {name} are not tuned: it has none in floating point" for name in fixed)


def _stored(entry: Tensor, dtype: torch.dtype) -> Tensor:
    return (float16_scale(entry) if dtype == torch.float16 else entry).to(dtype)
