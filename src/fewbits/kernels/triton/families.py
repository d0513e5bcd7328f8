"""Which family of kernels decodes a format: recognised by the arrays of its grid, or by the grid of its points, never by its
name. kernels/ has a file per family."""

from __future__ import annotations

from fewbits.formats import Format, Spec
from fewbits.formats.microscaling import E8M0, UE4M3
from fewbits.kernels.triton import codebooks, levels
from fewbits.kernels.triton.layout import TILE, Field, Layout, planes_of


def layout(fmt: Format) -> Layout | None:
    """None: no family of kernels reads scales of this structure."""
    if fmt.levels is None:
        fields = tuple(Field(*array) for array in codebooks.BY_GRID[fmt.name].arrays)
        return Layout(fmt.name, "points", (), "points", 0.0, fmt.group or 0, fields)
    known, family = levels.kind(fmt.levels), _family(fmt)
    if known is None or family is None:
        return None
    return Layout(fmt.name, family[0], planes_of(fmt.levels), *known, fmt.group or 0, family[1])


def _family(fmt: Format) -> tuple[str, tuple[Field, ...]] | None:
    group, parts = fmt.group or 0, fmt.parts((1, TILE))
    shared = fmt.tensor_wide and group == 0
    if getattr(fmt, "scale_values", None) in (E8M0, UE4M3):
        scales = Field("scales", group, "uint8")
        if "factor" in parts:
            return "microscaled with a factor", (scales, Field("factor", 0, "float32", shared=True))
        return ("powers of two" if getattr(fmt, "scale_values", None) == E8M0 else "microscaled"), (scales,)
    if set(parts) == {"codes", "scales", "zeros"}:
        return "integers with zeros", (Field("scales", group, "float16", shared), Field("zeros", group, "uint8", shared))
    if set(parts) == {"codes", "scales"}:
        dtype = "float32" if parts["scales"].dtype == "float32" else "float16"
        return ("float8" if dtype == "float32" else "integers"), (Field("scales", group, dtype, shared),)
    return _blocks(fmt, group, parts)


def _blocks(fmt: Format, group: int, parts: dict[str, Spec]) -> tuple[str, tuple[Field, ...]] | None:
    """GGUF's blocks: unpacking a block of zeros shows which arrays the format has beside the codes."""
    import torch

    _, grid = fmt.unpack({name: torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype)) for name, spec in parts.items()})
    dtypes = {name: str(entry.dtype).removeprefix("torch.") for name, entry in grid.items()}
    if set(grid) == {"d"}:
        return "blocks", (Field("d", group, "float16"),)
    if set(grid) == {"d", "m"}:
        return "blocks with minima", (Field("d", group, "float16"), Field("m", group, "float16"))
    if set(grid) == {"d", "sub"}:
        return "super-blocks", (Field("d", TILE, "float16"), Field("sub", group, dtypes["sub"]))
    if set(grid) == {"d", "dmin", "sub", "sub_min"}:
        return "super-blocks with minima", (
            Field("d", TILE, "float16", beside="dmin"),
            Field("sub", group, dtypes["sub"], beside="sub_min"),
        )
    return None
