"""A weight in the tile layout of native/matmul/tiles.h, made once when a model is loaded.

Products with one token then run at the memory's speed and products with many at the speed of the integer units, whatever the format.
The tiles replace the parts that they were made from and are as large, except for formats with a scale per row, which grow by a 64th at
most.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fewbits.devices import processor
from fewbits.kernels.arrays import as_bytes

if TYPE_CHECKING:
    from torch import Tensor

    from fewbits.formats import Parts, Shape
    from fewbits.kernels import Kernel


@dataclass(frozen=True)
class Tiled:
    kernel: Kernel
    shape: Shape
    tiles: Tensor  # uint8, for this kernel's instruction set and those with the same layout

    def matmul(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x (tokens, cols) -> (tokens, rows) in x's dtype; x is rounded to int8 on the way."""
        if x.ndim != 2 or x.shape[1] != self.shape[1]:
            raise ValueError(f"x is {tuple(x.shape)}, the weight takes rows of {self.shape[1]} columns")
        out = x.new_empty((len(x), self.shape[0]), dtype=torch.float32)
        into = (out.numpy(), None if bias is None else bias.detach().float().contiguous().numpy())
        wide = x.detach().float().contiguous().numpy()
        processor.native().matmul_tiles(self.kernel.format, self.kernel.isa, wide, self.tiles.numpy(), *into, torch.get_num_threads())
        return out.to(x.dtype)


def tiled(kernel: Kernel, parts: Parts, shape: Shape) -> Tiled | None:
    """None: this kernel multiplies weights in their stored layout, and tiles would not be faster."""
    if not kernel.multiplies:
        return None
    entry = kernel.entry_here()
    if not (size := processor.native().tiled_size(kernel.format, kernel.isa, *shape)):
        return None
    tiles = torch.empty(size, dtype=torch.uint8)
    stored = [as_bytes(parts[name]) for name in entry.parts]
    fits = processor.native().tile(kernel.format, kernel.isa, stored, *shape, tiles.numpy(), torch.get_num_threads())
    return Tiled(kernel, shape, tiles) if fits else None
