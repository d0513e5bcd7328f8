"""Which weights are timed: the usual formats, shapes of real models, and packed weights of any shape, made quickly."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fewbits import formats
from fewbits.errors import InputError
from fewbits.formats import Format, Shape
from fewbits.kernels import reference

if TYPE_CHECKING:
    from fewbits.formats import Parts

# (K, N): columns that x has, rows of the weight. SmolLM2-135M, a Llama of 1.1B, and one of 8B.
SHAPES = ((576, 1536), (2048, 5632), (4096, 4096), (4096, 14336))
ROWS = (1, 8, 64, 512)  # of x: tokens at once
FORMATS = (
    "q2_k", "q3_k", "q4_0", "q4_k", "iq4_nl", "iq4_xs", "mxfp4", "q5_k", "q6_k", "q8_0", "int4_g32", "int4_g128", "int8_channel",
)  # fmt: skip
_TILE = 64  # rows that are really quantized


@dataclass(frozen=True)
class Packed:
    fmt: Format
    shape: Shape  # (N, K): as a weight is stored
    parts: Parts

    @property
    def nbytes(self) -> int:
        return self.fmt.nbytes(self.shape)

    def copy(self) -> Parts:
        return {name: part.clone() for name, part in self.parts.items()}

    def decoded(self, rows: Tensor) -> Tensor:  # -> (len(rows), K) float64, by the reference
        chosen = {name: part[rows] if len(part) == self.shape[0] else part for name, part in self.parts.items()}
        return reference.decode(self.fmt, chosen).double()


def packed(fmt: Format, shape: Shape) -> Packed:
    """A weight of this shape (N, K). 64 rows are quantized, and each row of the weight is one of these, drawn at random. That is quick,
    codes are as frequent as in a real weight, and a kernel that reads a wrong row gives a wrong product."""
    from fewbits.methods import rtn

    if reason := fmt.fits(shape):
        raise InputError(f"{fmt.name} cannot hold {shape[1]}x{shape[0]}: {reason}", "leave out the format, or choose another `--shape`")
    generator = torch.Generator().manual_seed(shape[0] * 31 + shape[1])
    count = min(_TILE, shape[0])
    sizes = torch.exp(0.3 * torch.randn((count, 1), generator=generator))
    parts = rtn.quantize(0.02 * sizes * torch.randn((count, shape[1]), generator=generator), fmt, how="max")
    drawn = torch.randint(count, (shape[0],), generator=generator)
    specs = fmt.parts(shape)
    wide = {name: part if specs[name].shape[0] == 1 else part[drawn] for name, part in parts.items()}
    return Packed(fmt, shape, wide)


def shapes_of(texts: Sequence[str]) -> list[tuple[int, int]]:
    """`4096x14336` -> (K, N)."""
    shapes = []
    for text in texts:
        match = re.fullmatch(r"(\d+)\s*[xX]\s*(\d+)", text.strip())
        if not match or 0 in (k_n := (int(match[1]), int(match[2]))):
            raise InputError(f"`--shape {text}` is not a shape", "columns x rows, for example 4096x14336")
        shapes.append(k_n)
    return shapes


def formats_of(names: Sequence[str], shape: tuple[int, int]) -> list[Format]:
    """All of which must be able to hold a weight of this shape (K, N)."""
    fmts = [formats.get(name) for name in names]
    for fmt in fmts:
        if reason := fmt.fits((shape[1], shape[0])):
            raise InputError(f"{fmt.name} cannot hold {shape[0]}x{shape[1]}: {reason}", "choose another `--shape`")
    return fmts
