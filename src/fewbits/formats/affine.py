"""Integers of 2 to 8 bits with a float16 scale per group of columns, per row (channel) or for the whole weight (tensor).

    symmetric    w = scale * q, q in -2^(bits-1) .. 2^(bits-1)-1
    asymmetric   w = scale * (q - zero), q and zero in 0 .. 2^bits-1: one-sided weights use all levels, and zero is always exact

    codes   a little-endian bit stream per row: column i begins at bit (bits * i). Stored as q, symmetric ones as q + 2^(bits-1);
            8 symmetric bits are int8, stored as q
    scales  float16 [rows, groups], or [1, 1]
    zeros   a stream like the codes, padded to whole bytes per row: the packing of MatMulNBits, 4 bits a group instead of 8

int4_g32 holds the same values as GGUF's q4_0; ONNX Runtime's MatMulNBits computes with all formats of 2, 4 and 8 bits.
A row is a whole number of bytes, so without groups 3 bits take columns in eights, 6 in fours, 4 in pairs and 8 any number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fewbits.formats import Format, How, Shape, Spec

if TYPE_CHECKING:
    from torch import Tensor

    from fewbits.formats import Columns, Grid, Parts

# Where the largest value of a row or of a whole weight is put, in units of the last level: thousands of Gaussian values peak at 3.7
# standard deviations, and 4 bits are best clipped at 2.6 of them; heavier tails need larger ratios.
_RATIOS = (0.8, 0.9, 1.0, 1.1, 1.2, 1.35, 1.5, 1.7, 2.0, 2.4, 3.0)


@dataclass(frozen=True, kw_only=True)
class Integer(Format):
    bits: int
    ends: tuple[float, ...] = ()

    def parts(self, shape: Shape) -> dict[str, Spec]:
        rows, cols = shape
        codes = Spec("int8", shape) if self.bits == 8 else Spec("uint8", (rows, cols * self.bits // 8))
        return {"codes": codes, "scales": Spec("float16", self._groups(shape))}

    def fit(self, w: Tensor, importance: Tensor | None = None, fixed: Grid | None = None, how: How = "search") -> Grid:
        from fewbits.formats.search import fit_scale, grouped, importance_like, in_row_chunks
        from fewbits.formats.search.trials import fit_row_scale
        from fewbits.formats.storage.codes import as_float16

        if fixed is not None:
            return fixed
        assert self.levels
        levels, group = self.levels, self.group or w.shape[1]
        weight = importance_like(w, importance, group)
        if self.tensor_wide or (self.group is None and self.bits < 8):
            flat = None if weight is None else weight.flatten()
            return {"scales": fit_row_scale(w, levels, self.ends, _RATIOS, flat, how, as_float16, self.tensor_wide).half()}
        return in_row_chunks(lambda rows: {"scales": fit_scale(grouped(rows, group), levels, self.ends, weight, how).half()}, w)

    def affine(self, grid: Grid, columns: Columns = slice(None)) -> tuple[Tensor, Tensor | None]:
        return self._spread(grid["scales"].float(), columns), None

    def pack(self, codes: Tensor, grid: Grid) -> Parts:
        import torch

        from fewbits.formats.storage import bitstream

        return {"codes": (codes.short() - 128).to(torch.int8) if self.bits == 8 else bitstream.pack(codes, self.bits), **grid}

    def unpack(self, parts: Parts) -> tuple[Tensor, Grid]:
        import torch

        from fewbits.formats.storage import bitstream

        stored, grid = parts["codes"], {"scales": parts["scales"]}
        if self.bits == 8:
            return (stored.short() + 128).to(torch.uint8), grid
        return bitstream.unpack(stored, self.bits, stored.shape[1] * 8 // self.bits), grid

    def _groups(self, shape: Shape) -> Shape:
        return (1, 1) if self.tensor_wide else (shape[0], shape[1] // (self.group or shape[1]))

    def _spread(self, entries: Tensor, columns: Columns) -> Tensor:
        from fewbits.formats.storage.codes import spread

        return entries if self.group is None else spread(entries, self.group, columns)


@dataclass(frozen=True, kw_only=True)
class IntegerWithZero(Integer):
    def parts(self, shape: Shape) -> dict[str, Spec]:
        rows, groups = self._groups(shape)
        return {
            "codes": Spec("uint8", (shape[0], shape[1] * self.bits // 8)),
            "scales": Spec("float16", (rows, groups)),
            "zeros": Spec("uint8", (rows, -(-groups * self.bits // 8))),
        }

    def fit(self, w: Tensor, importance: Tensor | None = None, fixed: Grid | None = None, how: How = "search") -> Grid:
        import torch

        from fewbits.formats.search import grouped, importance_like, in_row_chunks
        from fewbits.formats.search.zeros import fit_scale_and_zero

        if fixed is not None:
            return fixed
        group = self.group or w.shape[1]
        weight = importance_like(w, importance, group)

        def fit(x: Tensor) -> Grid:
            scales, zeros = fit_scale_and_zero(x, (1 << self.bits) - 1, weight, how)
            return {"scales": scales.half(), "zeros": zeros.to(torch.uint8)}

        if self.tensor_wide:
            weight = None if weight is None else weight.expand(1, len(w), group).flatten(1).unsqueeze(0)
            return fit(w.reshape(1, 1, -1))
        return in_row_chunks(lambda rows: fit(grouped(rows, group)), w)

    def affine(self, grid: Grid, columns: Columns = slice(None)) -> tuple[Tensor, Tensor | None]:
        # 11 bits of a float16 times 8 of a zero point: offsets and sums are exact in float32, so this is scale * (q - zero)
        scales = grid["scales"].float()
        return self._spread(scales, columns), self._spread(-scales * grid["zeros"].float(), columns)

    def pack(self, codes: Tensor, grid: Grid) -> Parts:
        from fewbits.formats.storage import bitstream

        return {"codes": bitstream.pack(codes, self.bits), "scales": grid["scales"], "zeros": bitstream.pack(grid["zeros"], self.bits)}

    def unpack(self, parts: Parts) -> tuple[Tensor, Grid]:
        from fewbits.formats.storage import bitstream

        scales, stored = parts["scales"], parts["codes"]
        zeros = bitstream.unpack(parts["zeros"], self.bits, scales.shape[1])
        return bitstream.unpack(stored, self.bits, stored.shape[1] * 8 // self.bits), {"scales": scales, "zeros": zeros}


_GROUPS = (32, 64, 128)


def _symmetric(bits: int, group: int | None, tensor: bool = False) -> Integer:
    half = 1 << (bits - 1)
    return Integer(
        name=f"int{bits}_{'tensor' if tensor else f'g{group}' if group else 'channel'}",
        about=f"{bits} bits, one scale {'for all' if tensor else f'per {group}' if group else 'per row'}",
        levels=tuple(float(q) for q in range(-half, half)),
        group=group,
        block=group or _whole_bytes(bits),
        bits=bits,
        # with two ends the scale may be negative, so that all levels are used; 8 bits can spare one
        ends=(127.0,) if bits == 8 else (-float(half), half - 1.0),
        tensor_wide=tensor,
    )


def _asymmetric(bits: int, group: int | None, tensor: bool = False) -> IntegerWithZero:
    return IntegerWithZero(
        name=f"int{bits}_{'tensor' if tensor else f'g{group}' if group else 'channel'}_asym",
        about=f"{bits} bits, zero point {'for all' if tensor else f'per {group}' if group else 'per row'}",
        levels=tuple(float(q) for q in range(1 << bits)),
        group=group,
        block=group or _whole_bytes(bits),
        bits=bits,
        tensor_wide=tensor,
    )


def _whole_bytes(bits: int) -> int:
    return {2: 4, 3: 8, 4: 2, 5: 8, 6: 4, 8: 1}[bits]


_BITS = (2, 3, 4, 5, 6, 8)
FORMATS = [
    *(_symmetric(bits, None, tensor=True) for bits in _BITS),
    *(_symmetric(bits, group) for bits in _BITS for group in (None, *_GROUPS)),
    *(_asymmetric(bits, None, tensor=True) for bits in _BITS),
    *(_asymmetric(bits, group) for bits in _BITS for group in (None, *_GROUPS)),
]
