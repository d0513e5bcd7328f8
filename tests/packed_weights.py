"""Packed weights for tests of kernels: such as a model has, any bytes at all, and at the end of a page that must not be left."""

from __future__ import annotations

import ctypes
import importlib.util
import mmap
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from torch import Tensor

from fewbits.formats import Format, Shape
from fewbits.formats.storage.codebooks import Points
from fewbits.kernels import Kernel

if TYPE_CHECKING:
    from fewbits.formats import Grid, Parts

JUDGED = {  # ours: ggml's
    **{name: name for name in ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "iq4_nl", "iq4_xs", "tq1_0", "tq2_0", "q1_0", "q2_0")},
    **{name: name for name in ("iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s")},
    **{name: name[:-1] + "K" for name in ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k")},
}
IN_GGUF = JUDGED.keys() - {"q1_0", "q2_0"}  # the gguf package decodes these too


needs_ggml = pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None, reason="pip install fewbits[llamacpp]")


def over(cases: list[Kernel]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("kernel", cases, ids=lambda kernel: f"{kernel.format}-{kernel.backend}")


def random_weight(fmt: Format, shape: Shape, seed: int = 0) -> tuple[Tensor, Grid]:
    """Codes and grid of a weight such as a model has."""
    w = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.05
    grid = fmt.fit(w, how="max")
    return w if fmt.is_cast else fmt.encode(w, grid), grid


def random_codes(fmt: Format, shape: Shape, seed: int = 0) -> Tensor:
    """Any codes that there are: of vectors with any point, shift or signs, the last of which follows where their number must be even."""
    source = torch.Generator().manual_seed(seed)
    book = fmt.codebook
    if not isinstance(book, Points):
        return torch.randint(0, len(fmt.levels or ()), shape, generator=source, dtype=torch.uint8)
    bits = book.points * book.index_bits
    above = 1 if book.shifts else 0 if book.signs == "in the points" else fmt.dimension
    codes = torch.randint(0, 1 << bits + above, (shape[0], shape[1] // fmt.dimension), generator=source, dtype=torch.int32)
    if book.signs == "even":
        odd = sum(codes >> bits + i & 1 for i in range(fmt.dimension)) % 2
        codes ^= odd << bits + fmt.dimension - 1
    return codes


def random_bytes(fmt: Format, shape: Shape, seed: int = 0) -> Parts:
    """Any bytes at all, but for the scales: any finite float16, subnormal and negative ones too."""
    source = torch.Generator().manual_seed(seed)
    parts = {}
    for name, spec in fmt.parts(shape).items():
        stored = torch.randint(0, 256, (spec.nbytes,), generator=source, dtype=torch.uint8)
        parts[name] = stored.view(getattr(torch, spec.dtype)).reshape(spec.shape)
    codes, grid = fmt.unpack(parts)
    for entry in grid.values():
        if entry.is_floating_point():
            entry[~entry.isfinite()] = -0.25
    return fmt.pack(codes, grid)


def bits(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.int32)


def guarded(array: np.ndarray, at_end: bool) -> np.ndarray:
    page = mmap.PAGESIZE
    size = -(-array.nbytes // page) * page
    area = mmap.mmap(-1, size + 2 * page)
    start = np.frombuffer(area, np.uint8).ctypes.data
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    assert protect(start, page, 0) == 0 and protect(start + page + size, page, 0) == 0
    copy = np.frombuffer(area, array.dtype, array.size, page + (size - array.nbytes if at_end else 0)).reshape(array.shape)
    copy[:] = array
    return copy
