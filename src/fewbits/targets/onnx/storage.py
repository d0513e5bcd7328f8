"""The layout of a weight in the file. MatMulNBits' layout is used for embeddings too, so that a tied output can share it:

    codes   uint8 [rows, blocks, size * bits / 8], lowest bits first; a last block is padded with what decodes to zero
    scales  float32 [rows, blocks]
    zeros   uint8 [rows, blocks * bits / 8 rounded up], packed like the codes: the code that stands for zero in each block;
            left out where it is 2^(bits-1) in all of them
    values  of a weight that is not quantized: [rows, cols] in its type

A weight whose inputs are rounded by a calibrated scale has another layout: see qdq.py.

Scales are float16 values stored as float32, 0.5 bits per weight more at blocks of 32. MatMulNBits wants the type of its input,
and a Cast in the graph would not do: ONNX Runtime 1.31 reads scales that are not initializers as garbage at accuracy level 4
(relative error 1.0, no message) as soon as a session is opened without graph optimizations. Codes are safe behind a Reshape.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fewbits.formats import Spec
from fewbits.targets.onnx import qdq

if TYPE_CHECKING:
    from torch import Tensor

    from fewbits.artifact import Artifact
    from fewbits.formats import Format, Parts, Shape
    from fewbits.formats.runtime.activations import Activation
    from fewbits.model.weights import Weight
    from fewbits.progress import Progress

_BITS = (2, 4, 8)
_SIZES = (256, 128, 64, 32, 16)  # block sizes that MatMulNBits takes
_LARGEST_OF_2_BITS = 128  # at 256 ONNX Runtime 1.31 decodes the matrix in every call, whatever the accuracy level
_ANY = (256, 256)  # a shape that every format fits


@dataclass(frozen=True)
class Blocks:
    bits: int
    size: int  # columns under one scale
    zeros: bool = False  # each block says which code is zero

    def specs(self, shape: Shape) -> dict[str, Spec]:
        rows, count = shape[0], -(-shape[1] // self.size)
        specs = {"codes": Spec("uint8", (rows, count, self.size * self.bits // 8)), "scales": Spec("float32", (rows, count))}
        return specs | ({"zeros": Spec("uint8", (rows, -(-count * self.bits // 8)))} if self.zeros else {})

    def nbytes(self, shape: Shape) -> int:
        return sum(spec.nbytes for spec in self.specs(shape).values())


@dataclass(frozen=True)
class Store:
    """One weight of the file. It has blocks if it is quantized and not multiplied as integers."""

    fmt: Format
    shape: Shape
    blocks: Blocks | None
    accuracy_level: int
    activation: Activation | None = None  # static: what its inputs are rounded to

    def specs(self) -> dict[str, Spec]:
        if self.activation:
            return qdq.specs(self.shape, self.activation)
        return self.blocks.specs(self.shape) if self.blocks else self.fmt.parts(self.shape)

    def arrays(self, parts: Parts) -> dict[str, Tensor]:
        if self.activation:
            return qdq.arrays(self.fmt, self.shape, self.activation, parts)
        if self.blocks is None:
            return parts
        from fewbits.formats.storage import bitstream

        rows, cols = self.shape
        bits, size, count = self.blocks.bits, self.blocks.size, self.specs()["scales"].shape[1]
        codes, grid = self.fmt.unpack(parts)
        scales, offset = self.fmt.affine(grid, slice(0, cols, size))
        scales = scales.expand(rows, count)
        if offset is None:
            zeros = codes.new_full((rows, count), 1 << (bits - 1))
        else:  # -scale * zero, without rounding: see `blocks`
            zeros = (-offset.expand(rows, count) / scales.masked_fill(scales == 0, 1.0)).to(codes.dtype)
        padded = zeros[:, -1:].repeat(1, count * size)
        padded[:, :cols] = codes
        arrays = {"codes": bitstream.pack(padded, bits).reshape(rows, count, -1), "scales": scales}
        return arrays | ({"zeros": bitstream.pack(zeros, bits)} if self.blocks.zeros else {})


def store(fmt: Format, shape: Shape, accuracy_level: int, activation: Activation | None = None) -> Store:
    packed = blocks(fmt, shape[1]) if not fmt.is_cast and not activation else None
    assert not isinstance(packed, str), packed
    return Store(fmt, shape, packed, accuracy_level, activation)


def specs(stores: Mapping[str, Store]) -> dict[str, Spec]:
    """Type and shape of every array, by its name in the file."""
    return {f"{weight}.{part}": spec for weight, store in stores.items() for part, spec in store.specs().items()}


def arrays(artifact: Artifact, stores: Mapping[str, Store], progress: Progress[Weight]) -> Iterator[tuple[str, Tensor]]:
    """The arrays themselves, with one weight in memory at a time."""
    for weight in progress(artifact.weights, len(artifact.weights), "writing onnx"):
        for part, tensor in stores[weight.name].arrays(artifact.parts(weight)).items():
            yield f"{weight.name}.{part}", tensor


def blocks(fmt: Format, cols: int) -> Blocks | str:
    """The blocks that hold exactly this format's values, or why none do."""
    if fmt.levels is None:
        return f"{fmt.name} has codes for vectors of {fmt.dimension} weights; ONNX Runtime runs one code per weight"
    for bits in _BITS:
        around_zero = fmt.levels == tuple(float(q) for q in range(-(1 << (bits - 1)), 1 << (bits - 1)))
        from_zero = fmt.levels == tuple(float(q) for q in range(1 << bits)) and "zeros" in fmt.parts(_ANY)
        if around_zero or from_zero:
            largest = _LARGEST_OF_2_BITS if bits == 2 else _SIZES[0]
            sizes = [size for size in _SIZES if size <= largest and (fmt.group is None or fmt.group % size == 0)]
            if not sizes:
                return f"ONNX Runtime has no blocks of {fmt.group} columns"
            return min((Blocks(bits, size, from_zero) for size in sizes), key=lambda b: b.nbytes((1, cols)))
    if len(fmt.levels) not in {1 << bits for bits in _BITS}:
        return f"{fmt.name} has {len(fmt.levels)} levels; ONNX Runtime runs weights of {', '.join(map(str, _BITS))} bits"
    if fmt.levels == tuple(float(q) for q in range(len(fmt.levels))):
        return f"{fmt.name} has a minimum per block; ONNX Runtime runs weights with an integer zero point, or none"
    return f"{fmt.name} has levels that are not consecutive integers; ONNX Runtime runs no others"
