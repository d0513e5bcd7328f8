"""GPU kernels in Triton, for CUDA and ROCm. Which formats and shapes they take is known without Triton and without a GPU.

    unsupported(fmt)              why they do not decode a format; None if they do. Needs no torch
    supports(fmt, shape, dtype)   why these kernels cannot compute a product; None if they can
    runs_here()                   why none of them can run on this machine; None if they can

A weight is repacked into the GPU layout (planar.py, repack.py, layout.py), then multiplied (linear.py). kernels/ has the functions that run
on a GPU, the modules here choose tile shapes and launch them, and tooling/ compiles them ahead of time, checks the compiled code and ships
it.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from functools import cache
from pathlib import Path

from fewbits.formats import Format, Shape

LEAST = "3.9"  # the Triton release that the kernels were tested and compiled with
_OLDEST = 80  # sm_75 has no bfloat16 and no asynchronous copies


def unsupported(fmt: Format) -> str | None:
    from fewbits.kernels.triton import levels

    return levels.unsupported(fmt)


def supports(fmt: Format, shape: Shape, dtype: str = "float16") -> str | None:
    from fewbits.kernels.triton import repack

    if reason := fmt.fits(shape) or repack.unsupported(fmt):
        return reason
    if dtype not in ("float16", "bfloat16"):
        return f"activations are {dtype}; the kernels take float16 and bfloat16"
    if shape[0] * (shape[1] // 16 + 16) >= 2**31:  # number of scales, each of 16 columns at least
        return f"{shape[0]} x {shape[1]} has more scales than 32 bits count"
    return None


def runs_here() -> str | None:
    if reason := missing():
        return reason
    if not _driver_is_here():  # checked before torch is imported, which takes seconds
        return "no GPU is here: there is no driver of NVIDIA's or AMD's"
    import torch

    if not torch.cuda.is_available():
        return "torch sees no GPU"
    return unsupported_architecture(*_architecture())


def interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels on the processor, as tests do."""
    return os.environ.get("TRITON_INTERPRET") == "1" and missing() is None


@cache
def missing() -> str | None:
    """Why Triton cannot be used; None if it can. It is not imported, because that takes half a second."""
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:  # a folder that happens to be called `triton` has no origin
        return "Triton is not installed; `pip install 'fewbits[triton]'` adds it"
    from importlib.metadata import version

    installed = version("triton")
    if tuple(map(int, installed.split(".")[:2])) < tuple(map(int, LEAST.split("."))):
        return f"Triton {installed} is installed, the kernels need {LEAST}; `pip install 'fewbits[triton]'` brings it"
    return None


def unsupported_architecture(vendor: str, name: str) -> str | None:
    if vendor == "cuda":
        return (
            None if int(name.removeprefix("sm_")) >= _OLDEST else f"{name} is older than sm_80, the first that the kernels are compiled for"
        )
    return None if name.startswith(("gfx90a", "gfx94", "gfx95", "gfx11", "gfx12")) else f"the kernels are not compiled for {name}"


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

    from fewbits.kernels.triton.device import device_of

    return ("hip" if torch.version.hip else "cuda"), device_of(torch.empty(0, device="cuda")).architecture
