"""How long a product takes at least: its bytes over a GPU's bandwidth or its operations over the peak rate, whichever is longer.

Counted: weights in the GPU layout, x and out once, the sums of splits written and read; two operations per weight and token. Not counted:
launches (2 to 5 us each, less in a graph), the start and end of a kernel, what the second-level cache holds between calls, and the
instructions of decoding, about five per weight: on sm_90 and sm_100 they can limit a product of one token before memory does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fewbits import formats
from fewbits.formats import Shape
from fewbits.kernels.triton import repack
from fewbits.kernels.triton.tooling.gpus import ALL, GPU


@dataclass(frozen=True)
class Expected:
    gpu: str
    format: str
    shape: Shape  # (rows, cols)
    tokens: int
    bytes: int
    operations: int
    microseconds: float
    bound: Literal["memory", "compute"]
    against_half: float  # how many times faster than with a float16 weight, by the same model


def expected(gpu: GPU, format: str, shape: Shape, tokens: int, splits: int = 1) -> Expected:
    rows, cols = shape
    weights = repack.of(formats.get(format)).nbytes(shape)
    moved = _moved(shape, tokens, splits)
    operations = 2 * rows * cols * tokens
    memory, compute = (weights + moved) / (gpu.bandwidth * 1e3), operations / (gpu.half * 1e6)
    plain = max((2 * rows * cols + moved) / (gpu.bandwidth * 1e3), compute)
    longest = max(memory, compute)
    return Expected(
        gpu.name, format, shape, tokens, weights + moved, operations, longest, "memory" if memory >= compute else "compute", plain / longest
    )


def table(names: Sequence[str], shapes: Sequence[Shape], tokens: Sequence[int], gpus: Sequence[GPU] = ALL) -> list[Expected]:
    return [expected(gpu, name, shape, count) for gpu in gpus for name in names for shape in shapes for count in tokens]


def crossover(gpu: GPU, format: str, shape: Shape) -> int:
    """The number of tokens from which a product is bound by compute. Below, more tokens cost almost nothing."""
    low, high = 1, 1 << 16
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if expected(gpu, format, shape, middle).bound == "compute" else (middle + 1, high)
    return low


def _moved(shape: Shape, tokens: int, splits: int) -> int:
    rows, cols = shape
    sums = 2 * 4 * splits * tokens * rows if splits > 1 else 0
    return 2 * tokens * (rows + cols) + sums
