"""The kernel function that reads a family's scales and offsets, by the names of families.py. Importing this imports Triton."""

from __future__ import annotations

from typing import Any

from fewbits.kernels.triton.kernels import blocks, integers, microscaling, super_blocks
from fewbits.kernels.triton.layout import Layout

BY_FAMILY = {
    "integers": integers.affine,
    "integers with zeros": integers.affine_with_zeros,
    "blocks": integers.affine,  # a scale per group too, only stored differently
    "blocks with minima": blocks.affine_with_minima,
    "super-blocks": super_blocks.affine,
    "super-blocks with minima": super_blocks.affine_with_minima,
    "powers of two": microscaling.affine_powers,
    "microscaled": microscaling.affine,
    "microscaled with a factor": microscaling.affine_with_factor,
    "float8": integers.affine,  # see `decode` in kernels/float8.py
}


def constants(layout: Layout) -> dict[str, Any]:
    """The constants that a layout compiles into a kernel."""
    low, high = (*layout.planes, 0)[:2]
    return {
        "AFFINE": BY_FAMILY[layout.family], "KIND": layout.levels, "FIRST": layout.first, "GROUP": layout.group, "LOW": low, "HIGH": high,
    }  # fmt: skip
