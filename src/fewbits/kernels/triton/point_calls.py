"""Launches of the kernels for codes that stand for vectors. linear.py chooses tile and splits, as for any other weight."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fewbits.kernels.triton.call import Call
from fewbits.kernels.triton.codebooks import BY_GRID
from fewbits.kernels.triton.kernels import codebooks, point_products
from fewbits.kernels.triton.layout import TILE, Layout, Planar
from fewbits.kernels.triton.repack_points import table
from fewbits.kernels.triton.tile_shapes import Tile

FETCH = {
    "iq1_s": codebooks.iq1_s,
    "iq1_m": codebooks.iq1_m,
    "iq2_xxs": codebooks.iq2_xxs,
    "iq2_xs": codebooks.iq2_xs,
    "iq2_s": codebooks.iq2_s,
    "iq3_xxs": codebooks.iq3_xxs,
    "iq3_s": codebooks.iq3_s,
}


def product(arrays: dict[str, Any], weight: Planar, tokens: int, tile: Tile, parts: int) -> Call:
    """arrays: x, bias, residual, out and partial, and for one token `exponent`."""
    rows, cols = weight.shape
    arguments = arrays | {"table": table(weight.layout.format, arrays["x"].device), "entries": weight.grid, "rows": rows}
    arguments |= {"tiles": cols // TILE}
    constants = _constants(weight.layout) | {"ROWS": tile.rows, "SPLIT": parts}
    blocks = -(-rows // tile.rows)
    if tile.kernel == "vector":
        return Call(point_products.vector_of_points, (blocks, parts), arguments, constants, tile.warps, tile.stages)
    grid = (blocks, -(-tokens // tile.tokens), parts)
    arguments |= {"tokens": tokens, "cols": cols}
    return Call(point_products.matrix_of_points, grid, arguments, constants | {"TOKENS": tile.tokens}, tile.warps, tile.stages)


def decoded(weight: Planar, out: Tensor, tile: Tile) -> Call:
    rows, cols = weight.shape
    arguments = {"table": table(weight.layout.format, out.device), "entries": weight.grid, "out": out, "rows": rows, "cols": cols}
    constants = _constants(weight.layout) | {"ROWS": tile.rows}
    return Call(point_products.decoded_points, (-(-rows // tile.rows), cols // TILE), arguments, constants, tile.warps)


def _constants(layout: Layout) -> dict[str, Any]:
    kind = BY_GRID[layout.format]
    return {"FETCH": FETCH[layout.format], "HIGH": kind.high, "SIGNS": kind.signs}
