"""Converts a packed weight from its format's parts into the GPU layout (layout.py), and back."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fewbits import formats
from fewbits.errors import InputError
from fewbits.formats import Format, Shape
from fewbits.kernels.triton import families, levels, repack_points
from fewbits.kernels.triton.layout import TILE, Field, Layout, Planar, entries

if TYPE_CHECKING:
    from fewbits.formats import Grid, Parts


def unsupported(fmt: Format) -> str | None:
    """Why there is no layout for this format; None if there is."""
    if reason := levels.unsupported(fmt):
        return reason
    return None if _recognised(fmt) else f"{fmt.name} keeps its scales in a way that no family of kernels reads"


def of(fmt: Format) -> Layout:
    """The layout of a format, recognised by its structure."""
    layout = None if (reason := unsupported(fmt)) else _recognised(fmt)
    if layout is None:
        raise InputError(f"no GPU layout: {reason}", "decode the weight, or choose another format")
    return layout


@cache
def _recognised(fmt: Format) -> Layout | None:
    return families.layout(fmt)


def repack(fmt: Format, parts: Parts) -> Planar:
    """Runs on the processor, wherever the parts are, because that is where formats keep the tables that they unpack with."""
    layout = of(fmt)
    codes, grid = fmt.unpack({name: part.cpu() for name, part in parts.items()})
    if not layout.planes:
        return Planar(layout, (len(codes), codes.shape[1] * fmt.dimension), (), repack_points.to_arrays(fmt, codes, grid))
    rows, cols = codes.shape
    padded = torch.cat([codes, _code_of_zero(layout, grid).expand(rows, -cols % TILE)], 1)
    planes, shift = [], 0
    for bits in layout.planes:
        planes.append(_to_plane((padded >> shift) & ((1 << bits) - 1), bits, layout.subtile))
        shift += bits
    grids = tuple(_to_entries(grid, field, (rows, cols)) for field in layout.fields)
    return Planar(layout, (rows, cols), tuple(planes), grids)


def _code_of_zero(layout: Layout, grid: Grid) -> Tensor:  # (rows or 1, 1)
    """The code that pads a row. Where a row has one scale it applies to the padding too, which must then decode to zero: otherwise -128
    times a scale of 512 is infinite in float16, and zero times infinity is NaN."""
    if layout.group or layout.levels != "integers":  # the padding's scale is zero, or code 0 is zero
        return torch.zeros((1, 1), dtype=torch.uint8)
    return grid["zeros"].to(torch.uint8) if "zeros" in grid else torch.full((1, 1), round(-layout.first), dtype=torch.uint8)


def restore(weight: Planar) -> Parts:
    """The format's parts again, bit for bit."""
    fmt, layout, (rows, cols) = formats.get(weight.layout.format), weight.layout, weight.shape
    if not layout.planes:
        return fmt.pack(*repack_points.from_arrays(fmt, weight.grid))
    codes, shift = torch.zeros((rows, weight.planes[0].shape[1] * 8 // layout.planes[0]), dtype=torch.uint8), 0
    for bits, plane in zip(layout.planes, weight.planes, strict=True):
        codes |= _from_plane(plane.cpu(), bits, layout.subtile) << shift
        shift += bits
    grid: Grid = {}
    for field, stored in zip(layout.fields, weight.grid, strict=True):
        grid |= _from_entries(stored.cpu(), field, cols)
    return fmt.pack(codes[:, :cols].contiguous(), grid)


def _to_plane(codes: Tensor, bits: int, subtile: int) -> Tensor:  # (rows, padded cols) -> (rows, bytes)
    if bits == 8:
        return codes.contiguous()
    tiles = codes.unflatten(1, (-1, TILE * bits // (8 * subtile), 8 // bits, subtile))  # tile, piece, place in a byte, column
    plane: Tensor = tiles[:, :, :, 0].clone()
    for place in range(1, 8 // bits):
        plane |= tiles[:, :, :, place] << (bits * place)
    return plane.flatten(1)


def _from_plane(plane: Tensor, bits: int, subtile: int) -> Tensor:
    if bits == 8:
        return plane
    pieces: Tensor = plane.unflatten(1, (-1, TILE * bits // (8 * subtile), subtile))
    return torch.stack([(pieces >> (bits * place)) & ((1 << bits) - 1) for place in range(8 // bits)], 3).flatten(1)


def _to_entries(grid: Grid, field: Field, shape: Shape) -> Tensor:
    rows, cols = shape
    if field.shared:
        return grid[field.name].reshape(1, 1).expand(1, rows).contiguous()
    whole = [
        torch.nn.functional.pad(grid[name].T, (0, 0, 0, entries(field, cols) - grid[name].shape[1])).contiguous()
        for name in (field.name, field.beside)
        if name
    ]
    return whole[0] if field.beside is None else torch.stack(whole, 2).view(getattr(torch, field.stored)).squeeze(2)


def _from_entries(stored: Tensor, field: Field, cols: int) -> Grid:
    if field.shared:
        return {field.name: stored[:1, :1].clone()}
    whole = stored[: 1 if field.group == 0 else cols // field.group].unsqueeze(2).view(getattr(torch, field.dtype))
    # clone: torch would call a single entry contiguous whatever its stride
    return {
        name: whole[:, :, i].T.clone(memory_format=torch.contiguous_format) for i, name in enumerate((field.name, field.beside)) if name
    }
