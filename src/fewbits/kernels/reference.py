"""The kernel that serves every format: unpack, then `scale * level + offset`. Slow, and what every other kernel must equal bit for bit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fewbits.formats import Format

if TYPE_CHECKING:
    from torch import Tensor

    from fewbits.formats import Grid, Parts


def decode(fmt: Format, parts: Parts) -> Tensor:  # -> (rows, cols) float32
    from fewbits import rounding

    # of a GPU: on the processor, where formats have their tables. Slow, and the same bits
    where = next(iter(parts.values())).device
    codes, grid = fmt.unpack({name: part.cpu() for name, part in parts.items()})
    scale, offset = fmt.affine(grid)
    return rounding.decode(codes, fmt.levels, scale, offset).to(where)


def pack(fmt: Format, codes: Tensor, grid: Grid) -> Parts:
    return fmt.pack(codes, grid)


def matmul(fmt: Format, x: Tensor, parts: Parts) -> Tensor:  # x (tokens, cols) -> (tokens, rows)
    return multiply(x, decode(fmt, parts))


def multiply(x: Tensor, w: Tensor) -> Tensor:
    """x (tokens, cols), w (rows, cols) float32 -> (tokens, rows) in x's dtype, summed in float32."""
    return (x.float() @ w.T).to(x.dtype)
