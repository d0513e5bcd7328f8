"""How a weight lies in the file. MatMulNBits' layout is used for embeddings too, so that a tied output can share it:

    codes   uint8 [rows, blocks, size * bits / 8], lowest bits first, stored as q + 2^(bits-1); a last block is padded with zeros
    scales  float32 [rows, blocks]
    values  of a kept weight: [rows, cols] in its own type

Scales are float16 values stored as float32, 0.5 bits per weight more at blocks of 32. MatMulNBits wants the type of its input,
and a Cast in the graph would not do: ONNX Runtime 1.31 reads scales that are not initializers as garbage at accuracy level 4
(relative error 1.0, no message) as soon as a session is opened without graph optimizations. Codes are safe behind a Reshape.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fewbits.formats import Spec

if TYPE_CHECKING:
    from torch import Tensor

    from fewbits.formats import Format, Parts, Shape

_BITS = (4, 8)  # ONNX Runtime also runs 2
_SIZES = (256, 128, 64, 32, 16)  # block sizes that MatMulNBits takes


@dataclass(frozen=True)
class Blocks:
    bits: int
    size: int  # columns under one scale

    def specs(self, shape: Shape) -> dict[str, Spec]:
        rows, count = shape[0], -(-shape[1] // self.size)
        return {"codes": Spec("uint8", (rows, count, self.size * self.bits // 8)), "scales": Spec("float32", (rows, count))}

    def nbytes(self, shape: Shape) -> int:
        return sum(spec.nbytes for spec in self.specs(shape).values())


@dataclass(frozen=True)
class Store:
    """One weight of the file; a kept one has no blocks."""

    fmt: Format
    shape: Shape
    blocks: Blocks | None
    accuracy_level: int

    def specs(self) -> dict[str, Spec]:
        return self.blocks.specs(self.shape) if self.blocks else self.fmt.parts(self.shape)

    def arrays(self, parts: Parts) -> dict[str, Tensor]:
        if self.blocks is None:
            return parts
        rows, cols = self.shape
        (_, count, _), size = self.specs()["codes"].shape, self.blocks.size
        codes, grid = self.fmt.unpack(parts)
        scales, offset = self.fmt.affine(grid, slice(0, cols, size))
        assert offset is None, f"{self.fmt.name} has symmetric levels and yet an offset"
        padded = codes.new_full((rows, count * size), 1 << (self.blocks.bits - 1))
        padded[:, :cols] = codes
        return {"codes": _pack(padded, self.blocks.bits).reshape(rows, count, -1), "scales": scales.float().expand(rows, count)}


def store(fmt: Format, shape: Shape, accuracy_level: int) -> Store:
    found = blocks(fmt, shape[1]) if fmt.levels else None
    assert not isinstance(found, str), found
    return Store(fmt, shape, found, accuracy_level)


def blocks(fmt: Format, cols: int) -> Blocks | str:
    """The blocks that hold exactly this format's values, or why none do."""
    assert fmt.levels
    for bits in _BITS:
        if fmt.levels == tuple(float(q) for q in range(-(1 << (bits - 1)), 1 << (bits - 1))):
            sizes = [size for size in _SIZES if fmt.run is None or fmt.run % size == 0]
            if not sizes:
                return f"ONNX Runtime has no blocks of {fmt.run} columns"
            return min((Blocks(bits, size) for size in sizes), key=lambda b: b.nbytes((1, cols)))
    if len(fmt.levels) not in {1 << bits for bits in _BITS}:
        return f"{fmt.name} has {len(fmt.levels)} levels; ONNX Runtime runs weights of {' and '.join(map(str, _BITS))} bits"
    return f"{fmt.name} has levels {fmt.levels[0]:g}..{fmt.levels[-1]:g} and a minimum per block; only levels around zero are carried"


def _pack(codes: Tensor, bits: int) -> Tensor:
    packed = codes[:, :: 8 // bits].clone()
    for place in range(1, 8 // bits):
        packed |= codes[:, place :: 8 // bits] << (bits * place)
    return packed
