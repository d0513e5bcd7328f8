"""The function that reads each family's scales and offsets, by the name that families.py gives it. Importing this loads Triton."""

from __future__ import annotations

from typing import Any

from fewbits.kernels.triton import blocks, integers, microscaling, super_blocks
from fewbits.kernels.triton.layout import Layout

BY_FAMILY = {
    "integers": integers.affine,
    "integers with zeros": integers.affine_with_zeros,
    "blocks": integers.affine,  # a scale per run, in another container
    "blocks with minima": blocks.affine_with_minima,
    "super-blocks": super_blocks.affine,
    "super-blocks with minima": super_blocks.affine_with_minima,
    "powers of two": microscaling.affine_powers,
    "microscaled": microscaling.affine,
    "microscaled with a factor": microscaling.affine_with_factor,
    "float8": integers.affine,  # float8.py says why
}


def constants(layout: Layout) -> dict[str, Any]:
    """What a layout makes of a kernel: part of the compiled code."""
    low, high = (*layout.planes, 0)[:2]
    return {
        "AFFINE": BY_FAMILY[layout.family], "KIND": layout.levels, "FIRST": layout.first, "RUN": layout.run, "LOW": low, "HIGH": high,
    }  # fmt: skip
