"""Which of MLX's four ways of quantizing holds exactly the values of a format, and the tensors of a weight in it.

    affine  w = scale * q + bias     2 to 8 bits in groups of 32, 64 or 128, scale and bias in the type of the model
    mxfp4   4-bit floats under 2^n per 32      mxfp8   float8 e4m3 under 2^n per 32      nvfp4   4-bit floats under a float8 per 16

A layer has `weight`, codes as a little-endian bit stream per row, seen as uint32; `scales`; and, if affine, `biases`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from fewbits.formats.affine import Integer, IntegerWithZero
from fewbits.formats.blocks import OneScale, ScaleAndMin
from fewbits.formats.microscaling import E2M1, E8M0, UE4M3, Microscaling, WithFactor
from fewbits.formats.mxfp8 import E4M3
from fewbits.formats.scale_and_bias import ScaleAndBias
from fewbits.targets.compressed_tensors.shards import Array

if TYPE_CHECKING:
    from torch import Tensor

    from fewbits.formats import Format, Parts

BITS, GROUPS = (2, 3, 4, 5, 6, 8), (32, 64, 128)
_FLOATS = {"mxfp4": (4, 32), "nvfp4": (4, 16), "mxfp8": (8, 32)}  # bits and group of each


@dataclass(frozen=True)
class Scheme:
    bits: int
    group: int
    mode: str = "affine"

    def name(self, dtype: str | None) -> str:
        """Of the format with these values. `dtype`: of its scales, if they are floats."""
        suffix = {"bfloat16": "_bf16", "float32": "_fp32"}.get(dtype or "", "")  # fewbits has no format with scales in float32
        return f"affine{self.bits}_g{self.group}{suffix}" if self.mode == "affine" else self.mode

    def arguments(self) -> dict[str, Any]:
        return {"group_size": self.group, "bits": self.bits, "mode": self.mode}

    def arrays(self, shape: tuple[int, ...], dtype: str) -> dict[str, Array]:
        """`dtype`: of scales and biases, if they are floats."""
        *stack, cols = shape
        scales = (*stack, cols // self.group)
        packed = {"weight": Array("uint32", (*stack, cols * self.bits // 32))}
        if self.mode != "affine":
            return packed | {"scales": Array("uint8", scales)}
        return packed | {"scales": Array(dtype, scales), "biases": Array(dtype, scales)}

    def nbytes(self, shape: tuple[int, int]) -> int:
        return sum(array.nbytes for array in self.arrays(shape, "float16").values())  # bfloat16 is as large


def valid(bits: object, group: object, mode: object) -> Scheme | None:
    """The scheme that a config.json names; None: MLX has no such one."""
    if not (isinstance(bits, int) and isinstance(group, int) and isinstance(mode, str)):
        return None
    known = (bits in BITS and group in GROUPS) if mode == "affine" else _FLOATS.get(mode) == (bits, group)
    return Scheme(bits, group, mode) if known else None


@cache
def of(fmt: Format) -> Scheme | str:
    """The scheme that holds exactly this format's values, or why none does."""
    if fmt.levels is None:
        return f"{fmt.name} has codes for vectors of {fmt.dimension} weights; MLX keeps one code per weight"
    if isinstance(fmt, Microscaling):
        return _of_small_floats(fmt)
    bits = round(math.log2(len(fmt.levels)))
    if bits not in BITS or list(fmt.levels) != [fmt.levels[0] + i for i in range(1 << bits)]:
        return f"the levels of {fmt.name} are not 2^n consecutive integers; MLX knows no others"
    if not isinstance(fmt, ScaleAndBias | OneScale | ScaleAndMin | Integer) or fmt.tensor_wide:
        return f"{fmt.name} has scales of scales, or one for all weights; MLX keeps a float scale and bias per group"
    if isinstance(fmt, IntegerWithZero):
        return f"the offset of {fmt.name} is a product, which a bias of 16 bits would round"
    if fmt.group not in GROUPS:
        return f"MLX has groups of 32, 64 and 128 columns, {fmt.name} of {fmt.group or 'a whole row'}"
    return Scheme(bits, fmt.group)


def _of_small_floats(fmt: Microscaling) -> Scheme | str:
    if isinstance(fmt, WithFactor):
        return f"a layer of mlx-lm has no scale for the whole weight, as {fmt.name} has"
    known = {(E2M1, E8M0, 32): "mxfp4", (E2M1, UE4M3, 16): "nvfp4", (E4M3, E8M0, 32): "mxfp8"}
    mode = next((mode for key, mode in known.items() if key == (fmt.levels, fmt.scale_values, fmt.group)), None)
    return Scheme(*_FLOATS[mode], mode) if mode else f"MLX has no small floats like those of {fmt.name}"


def float_type(fmt: Format) -> str | None:
    """The type of its scales, for an affine format; None: they are no floats."""
    if isinstance(fmt, Microscaling):
        return None
    return fmt.dtype if isinstance(fmt, ScaleAndBias) else "float16"


def tensors(fmt: Format, parts: Parts, rows: Tensor) -> dict[str, Tensor]:
    """These rows of a weight as MLX stores them, with the same values."""
    import torch

    from fewbits.formats.storage import bitstream

    if isinstance(fmt, ScaleAndBias):  # rows lie one after the other already
        words = parts["codes"].index_select(0, rows).view(torch.uint32)
        return {"weight": words, "scales": parts["scales"].index_select(0, rows), "biases": parts["biases"].index_select(0, rows)}
    scheme = of(fmt)
    assert isinstance(scheme, Scheme), scheme
    codes, grid = fmt.unpack(parts)
    packed = {"weight": bitstream.pack(codes.index_select(0, rows).contiguous(), scheme.bits).view(torch.uint32)}
    if scheme.mode != "affine":
        return packed | {"scales": grid["scales"].index_select(0, rows) & (127 if scheme.mode == "nvfp4" else 255)}
    assert fmt.levels
    scale, offset = fmt.affine(grid, slice(0, codes.shape[1], scheme.group))
    bias = scale * fmt.levels[0] if offset is None else offset  # times a power of two: exact
    return packed | {"scales": scale.index_select(0, rows).half(), "biases": bias.index_select(0, rows).half()}
