"""What runs on this machine: instruction sets, kernels, runtimes and their versions; what is missing, and how to get it.

This imports only the native module, and torch where a GPU's driver is installed, to ask which GPU it is.
"""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

from fewbits import formats, kernels
from fewbits.devices import processor
from fewbits.errors import MissingError
from fewbits.model.gguf import conversion

# package: (what it is for, how to get it)
_PACKAGES = {
    "torch": ("opens, calibrates and runs models", "pip install fewbits"),
    "transformers": ("model code and tokenizers", "pip install fewbits"),
    "gguf": ("writes GGUF files", "pip install fewbits"),
    "xllamacpp": ("runs GGUF files in llama.cpp, to verify them", "pip install fewbits[llamacpp]"),
    "onnx": ("writes ONNX files", "pip install fewbits[onnx]"),
    "onnxruntime": ("runs ONNX files, to verify them", "pip install fewbits[onnx]"),
    "onnxruntime-genai": ("generates from ONNX files, to verify them", "pip install fewbits[genai]"),
    "compressed-tensors": ("lets transformers load quantized folders, to verify them", "pip install fewbits[ct]"),
    "mlx": ("runs folders for Apple silicon, to verify them", "pip install fewbits[mlx]"),
    "mlx-lm": ("says how folders for Apple silicon are laid out", "pip install fewbits[mlx]"),
    "triton": ("compiles the kernels for GPUs", "pip install fewbits[triton]"),
    "starlette": ("answers requests of `fewbits serve`", "pip install fewbits[serve]"),
    "uvicorn": ("listens for `fewbits serve`", "pip install fewbits[serve]"),
    "pyarrow": ("reads calibration data in Parquet files", "pip install fewbits[parquet]"),
}
_CONVERTER, _LAYS_OUT = "llama.cpp's converter", "lays out GGUF files of architectures beyond fewbits' table"


@dataclass(frozen=True)
class Package:
    name: str
    version: str | None  # None: not installed
    purpose: str
    get: str


@dataclass(frozen=True)
class Backend:
    name: str
    formats: int  # how many it decodes here
    multiplies: int  # and of how many it also multiplies packed weights
    missing: str | None  # why it does not run


@dataclass(frozen=True)
class Diagnosis:
    fewbits: str
    python: str
    system: str
    processors: int
    memory: int | None
    native_missing: str | None
    forced: str | None  # FEWBITS_KERNEL
    backends: tuple[Backend, ...]
    packages: tuple[Package, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def diagnose() -> Diagnosis:
    return Diagnosis(
        fewbits=metadata.version("fewbits"),
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        processors=len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1,
        memory=_memory(),
        native_missing=processor.native_missing(),
        forced=kernels.forced(),
        backends=tuple(_backend(name) for name in processor.BACKENDS),
        packages=(*(Package(name, _version(name), *about) for name, about in _PACKAGES.items()), _converter()),
    )


def _converter() -> Package:
    """llama.cpp's, which is no package of Python."""
    try:
        folder = conversion.find(None)
    except MissingError as failure:
        return Package(_CONVERTER, None, _LAYS_OUT, str(failure.args[0]))
    return Package(_CONVERTER, folder.name if folder else None, _LAYS_OUT, f"fewbits quantize --converter pip, or {conversion.ROOT}")


def _backend(name: str) -> Backend:
    here = [kernel for fmt in formats.all() if (kernel := kernels.Kernel(fmt, name)).runs_here() is None]
    # asked of q4_0, which every backend has: a format that is a plain cast, such as fp16, has no native kernel anywhere
    reason = None if here else kernels.Kernel("q4_0", name).runs_here()
    return Backend(name, len(here), sum(kernel.multiplies for kernel in here), reason)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None
