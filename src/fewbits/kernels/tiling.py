"""A weight laid out anew for the registers, once, when a model is loaded: native/tiles.h says how.

One token then meets it at the memory's speed and many at the integer units', whatever its format. It takes the place of the parts
that it was made from and is as large, but for formats with a scale per row, which grow by a 64th at most.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fewbits import kernels

if TYPE_CHECKING:
    from torch import Tensor

    from fewbits.formats import Parts, Shape
    from fewbits.kernels import Kernel


@dataclass(frozen=True)
class Tiled:
    kernel: Kernel
    shape: Shape
    tiles: Tensor  # uint8, for this kernel's instruction set and those that share its layout

    def matmul(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x (tokens, cols) -> (tokens, rows) in x's dtype; x is rounded to int8 on the way."""
        if x.ndim != 2 or x.shape[1] != self.shape[1]:
            raise ValueError(f"x is {tuple(x.shape)}, the weight takes rows of {self.shape[1]} columns")
        out = x.new_empty((len(x), self.shape[0]), dtype=torch.float32)
        into = (out.numpy(), None if bias is None else bias.detach().float().contiguous().numpy())
        wide = x.detach().float().contiguous().numpy()
        isa = self.kernel.backend.removeprefix("native-")
        kernels.native().matmul_tiles(self.kernel.format, isa, wide, self.tiles.numpy(), *into, torch.get_num_threads())
        return out.to(x.dtype)


def tiled(kernel: Kernel, parts: Parts, shape: Shape) -> Tiled | None:
    """None: this kernel multiplies by weights as they are stored, and nothing else would be faster."""
    isa = kernel.backend.removeprefix("native-")
    if not kernel.multiplies or not (size := kernels.native().tiled_size(kernel.format, isa, *shape)):
        return None
    tiles = torch.empty(size, dtype=torch.uint8)
    stored = [kernels._bytes(parts[name]) for name in kernel._needed().parts]
    fits = kernels.native().tile(kernel.format, isa, stored, *shape, tiles.numpy(), torch.get_num_threads())
    return Tiled(kernel, shape, tiles) if fits else None
