"""GPU kernels in Triton, for CUDA and ROCm. Which formats and shapes they take is known without Triton and without a GPU.

    unsupported(fmt)              why they do not decode a format; None if they do. This alone is known without torch
    supports(fmt, shape, dtype)   why a product cannot be computed by these kernels; None if it can
    runs_here()                   why none of them can run on this machine; None if they can
    prepare(fmt, parts, device)   a weight in the layout of the GPU (layout.py)
    matmul(x, weight, ...)        x (tokens, cols) times it (linear.py); decode(weight, dtype)

`compiling` compiles every kernel ahead of time for GPUs that are not here and reads off what the code shows; `shipping` carries compiled
ones along.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from fewbits.formats import Format, Shape

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from fewbits.formats import Parts
    from fewbits.kernels.triton.layout import Planar

LEAST = "3.9"  # of Triton: what the kernels were tested and compiled with
_OLDEST = 80  # sm_75 has no bfloat16 and no asynchronous copies


def unsupported(fmt: Format) -> str | None:
    from fewbits.kernels.triton import levels

    return levels.unsupported(fmt)


def supports(fmt: Format, shape: Shape, dtype: str = "float16") -> str | None:
    from fewbits.kernels.triton import layout

    if reason := fmt.fits(shape) or layout.unsupported(fmt):
        return reason
    if dtype not in ("float16", "bfloat16"):
        return f"activations are {dtype}; the kernels take float16 and bfloat16"
    if shape[0] * (shape[1] // 16 + 16) >= 2**31:  # entries of scales, of 16 columns each at least
        return f"{shape[0]} x {shape[1]} has more scales than 32 bits count"
    return None


def runs_here() -> str | None:
    if reason := missing():
        return reason
    if not _driver_is_here():  # asked before torch, whose loading takes seconds
        return "no GPU is here: there is no driver of NVIDIA's or AMD's"
    import torch

    if not torch.cuda.is_available():
        return "torch sees no GPU"
    return unsupported_architecture(*_architecture())


def interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels on the processor: for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1" and missing() is None


@cache
def missing() -> str | None:
    """Why Triton itself is not here; None if it is. Nothing of it is imported: that takes half a second."""
    found_here = importlib.util.find_spec("triton")
    if found_here is None or found_here.origin is None:  # a folder that happens to have this name has no origin
        return "Triton is not installed; `pip install 'fewbits[triton]'` adds it"
    from importlib.metadata import version

    found = version("triton")
    if tuple(map(int, found.split(".")[:2])) < tuple(map(int, LEAST.split("."))):
        return f"Triton {found} is installed, the kernels need {LEAST}; `pip install 'fewbits[triton]'` brings it"
    return None


def unsupported_architecture(vendor: str, name: str) -> str | None:
    if vendor == "cuda":
        return (
            None if int(name.removeprefix("sm_")) >= _OLDEST else f"{name} is older than sm_80, the first that the kernels are compiled for"
        )
    return None if name.startswith(("gfx90a", "gfx94", "gfx95", "gfx11", "gfx12")) else f"the kernels are not compiled for {name}"


def prepare(fmt: Format, parts: Parts, device: torch.device | str) -> Planar:
    from fewbits.kernels.triton import layout

    return layout.repack(fmt, parts).to(device)


def matmul(x: Tensor, weight: Planar, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    from fewbits.kernels.triton import linear

    return linear.matmul(x, weight, bias, residual)


def decode(weight: Planar, dtype: torch.dtype) -> Tensor:
    from fewbits.kernels.triton import linear

    return linear.decode(weight, dtype)


@cache
def _driver_is_here() -> bool:
    if Path("/dev/kfd").exists():  # AMD's
        return True
    try:
        ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return False
    return True


def _architecture() -> tuple[str, str]:
    import torch

    from fewbits.kernels.triton.devices import device_of

    found = device_of(torch.empty(0, device="cuda")).architecture
    return ("hip" if torch.version.hip else "cuda"), found
