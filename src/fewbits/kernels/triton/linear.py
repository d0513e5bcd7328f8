"""Products with packed weights on a GPU: chooses the kernel, the tile and the number of splits, and launches them.

matmul(x, weight, bias, residual)   x (tokens, cols) float16 or bfloat16 -> (tokens, rows) in x's type
decode(weight, dtype)               (rows, cols), for batches so large that a library's float product is faster
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from fewbits.kernels.triton import point_calls, scales, tile_shapes
from fewbits.kernels.triton.call import Call
from fewbits.kernels.triton.device import Device, device_of
from fewbits.kernels.triton.kernels import products
from fewbits.kernels.triton.layout import TILE, Planar
from fewbits.kernels.triton.tile_shapes import Tile

MOST_SPLITS = 16
_BUSY = 0.9  # share of the processors that must be at work
_SUMS = 64  # least columns per token and split: 8 bytes to write and read a sum are then at most a quarter of 64 weights of 4 bits
LIBRARY_FROM = 1024  # tokens: from here, decoding once for a library's float product costs less than decoding for every 128 tokens
_ADDED = 256  # outputs per program that adds up splits


def matmul(x: Tensor, weight: Planar, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    _check(x, weight, bias, residual)
    if not len(x):
        return x.new_empty((0, weight.shape[0]))
    if len(x) >= LIBRARY_FROM:
        out = torch.nn.functional.linear(x, decode(weight, x.dtype), None if bias is None else bias.to(x.dtype))
        return out if residual is None else out + residual
    out = x.new_empty((len(x), weight.shape[0]))
    for call in calls(x, weight, bias, residual, out, device_of(x)):
        call.run()
    return out


def decode(weight: Planar, dtype: torch.dtype = torch.float32) -> Tensor:
    out = torch.empty(weight.shape, dtype=dtype, device=weight.arrays[0].device)
    decode_call(weight, out, device_of(out)).run()
    return out


def calls(x: Tensor, weight: Planar, bias: Tensor | None, residual: Tensor | None, out: Tensor, device: Device) -> list[Call]:
    """The launches of a product: one, or two where the columns are split."""
    kind = "vector" if len(x) == 1 else "matrix"
    tile = tile_shapes.choose(kind, device.architecture, weight.layout.bits, len(x))
    parts = splits(len(x), weight.shape, tile, device)
    partial = x.new_empty((parts, *out.shape), dtype=torch.float32) if parts > 1 else None
    product = product_call(x, weight, bias, residual, out, partial, tile, parts)
    return [product] if partial is None else [product, add_up_call(partial, bias, residual, out)]


def splits(tokens: int, shape: tuple[int, int], tile: Tile, device: Device) -> int:
    """How many programs share the columns of a block: the fewest that keep nine of ten processors busy until the end, or the best if none
    do. Only powers of two, because each number is compiled separately. For example, 64 blocks leave 44 of 108 processors idle; 8 splits
    make them 512 programs, 4.7 per processor."""
    blocks = -(-shape[0] // tile.rows) * -(-tokens // tile.tokens)
    most = min(MOST_SPLITS, -(-shape[1] // TILE), shape[1] // (_SUMS * tokens))
    possible = [1, *(count for count in (2, 4, 8, 16) if count <= most)]
    at_work = {count: blocks * count / device.processors / -(-blocks * count // device.processors) for count in possible}
    return next((count for count in possible if at_work[count] >= _BUSY), max(possible, key=lambda count: at_work[count]))


def product_call(
    x: Tensor, weight: Planar, bias: Tensor | None, residual: Tensor | None, out: Tensor, partial: Tensor | None, tile: Tile, parts: int
) -> Call:
    rows, cols = weight.shape
    arrays: dict[str, Any] = {"x": x, "bias": bias, "residual": residual, "out": out, "partial": partial}
    if tile.kernel == "vector":
        # an array so that the compiler does not know it: `decode.level_in_place` says why
        arrays["exponent"] = _exponent(x.device)
    if not weight.layout.planes:
        return point_calls.product(arrays, weight, len(x), tile, parts)
    width = min(tile.width, weight.layout.subtile)
    arrays |= {"planes": weight.planes, "entries": weight.grid, "rows": rows, "cols": cols, "tiles": -(-cols // TILE)}
    constants = scales.constants(weight.layout) | {"ROWS": tile.rows, "WIDTH": width, "SPLIT": parts}
    blocks = -(-rows // tile.rows)
    if tile.kernel == "vector":
        arrays["planes"] = tuple(plane.view(torch.int32) for plane in weight.planes)  # the kernel reads whole words
        return Call(products.vector, (blocks, parts), arrays, constants, tile.warps, tile.stages)
    grid = (blocks, -(-len(x) // tile.tokens), parts)
    return Call(products.matrix, grid, arrays | {"tokens": len(x)}, constants | {"TOKENS": tile.tokens}, tile.warps, tile.stages)


def add_up_call(partial: Tensor, bias: Tensor | None, residual: Tensor | None, out: Tensor) -> Call:
    parts, tokens, rows = partial.shape
    arguments = {"partial": partial, "bias": bias, "residual": residual, "out": out, "tokens": tokens, "rows": rows}
    return Call(products.add_up, (-(-rows // _ADDED), tokens), arguments, {"SPLIT": parts, "BLOCK": _ADDED}, warps=4)


def decode_call(weight: Planar, out: Tensor, device: Device) -> Call:
    rows, cols = weight.shape
    tile = tile_shapes.choose("decoded", device.architecture, weight.layout.bits)
    if not weight.layout.planes:
        return point_calls.decoded(weight, out, tile)
    arguments = {"planes": weight.planes, "entries": weight.grid, "out": out, "rows": rows, "cols": cols, "tiles": -(-cols // TILE)}
    constants = scales.constants(weight.layout) | {"ROWS": tile.rows, "WIDTH": min(tile.width, weight.layout.subtile)}
    return Call(products.decoded, (-(-rows // tile.rows), -(-cols // TILE)), arguments, constants, tile.warps)


@cache
def _exponent(device: torch.device) -> Tensor:
    return torch.full((1,), 0x4B000000, dtype=torch.int32, device=device)


def _check(x: Tensor, weight: Planar, bias: Tensor | None, residual: Tensor | None) -> None:
    rows, cols = weight.shape
    if x.ndim != 2 or x.shape[1] != cols or not x.is_contiguous():
        raise ValueError(f"x is {tuple(x.shape)}, the weight takes contiguous rows of {cols} columns")
    if x.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"x is {x.dtype}; the kernels take float16 and bfloat16")
    if bias is not None and (bias.shape != (rows,) or not bias.is_contiguous()):
        raise ValueError(f"the bias is {tuple(bias.shape)}, not contiguous and ({rows},)")
    if residual is not None and (residual.shape != (len(x), rows) or not residual.is_contiguous()):
        raise ValueError(f"the residual is {tuple(residual.shape)}, not contiguous and ({len(x)}, {rows})")
