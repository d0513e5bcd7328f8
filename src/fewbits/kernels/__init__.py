"""Kernels pack, decode and multiply weights. In: a format, its arrays and a device; out: packed arrays, decoded weights or products.

`bind` chooses the fastest kernel for a weight on a device. Its backend is one of

    native-*    C++ for the processor (native/; each file in native/formats registers the formats of one family)
    triton      GPUs, with CUDA or ROCm
    reference   torch, for any format on any device

All pack and decode to the same bits. On the processor a product rounds its activations to int8, 32 columns under one scale, unless it is
asked to be exact; on a GPU they are never rounded.

FEWBITS_KERNEL=reference, scalar, neon, avx2, avxvnni, avx512 or triton forces a backend on its device, for every format that has it.
Under Triton's interpreter (TRITON_INTERPRET=1) `triton` can be forced for the processor too.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fewbits import formats
from fewbits.devices import processor
from fewbits.devices.processor import BACKENDS, Entry
from fewbits.errors import InputError
from fewbits.formats import Format, Shape
from fewbits.kernels import points

if TYPE_CHECKING:
    from torch import Tensor

    from fewbits.formats import Grid, Parts

_OF_A_GPU = ("triton", "reference")
_GPU = "cuda"  # torch's name for a GPU, ROCm's too


@dataclass(frozen=True)
class Kernel:
    format: str
    backend: str  # one of BACKENDS

    def runs_here(self) -> str | None:
        """Why it cannot run on this machine; None if it can."""
        if self.backend == "reference":
            return None
        if self.backend == "triton":
            from fewbits.kernels import triton

            return triton.unsupported(formats.get(self.format)) or (None if triton.interpreted() else triton.runs_here())
        if missing := processor.native_missing():
            return missing
        if (entry := self._entry()) is None:
            if not any(row.isa == self.isa for row in processor.table().values()):
                return f"this build has no {self.isa} kernels: they are for another kind of processor"
            return f"no {self.isa} kernel is written for {self.format}"
        return None if entry.runs_here else f"this processor has no {self.isa}"

    def supports(self, shape: Shape) -> str | None:
        """Why it cannot take a weight of this shape; None if it can."""
        if self.backend == "triton":
            from fewbits.kernels import triton

            return triton.supports(formats.get(self.format), shape)
        return formats.get(self.format).fits(shape)

    def decode(self, parts: Parts, shape: Shape, dtype: str = "float32", out: Tensor | None = None) -> Tensor:  # -> (rows, cols)
        """float32, or that rounded to float16 or bfloat16. out: where to write, because allocating memory costs as much as decoding."""
        import torch

        from fewbits.kernels.arrays import as_bytes

        fmt, wanted = formats.get(self.format), getattr(torch, dtype)
        if self.backend == "reference":
            from fewbits.kernels import reference

            w = reference.decode(fmt, parts).to(wanted)
            return w if out is None else out.copy_(w)
        if self.backend == "triton":
            from fewbits.kernels.triton import planar

            w = planar.decode(planar.packed(fmt, parts), wanted)
            return w if out is None else out.copy_(w)
        entry = self.entry_here()
        w = torch.empty(shape, dtype=wanted) if out is None else out
        if w.shape != shape or w.dtype != wanted or not w.is_contiguous():
            raise ValueError(f"out must be {dtype}, contiguous and {shape[0]} x {shape[1]}")
        stored = [as_bytes(parts[name]) for name in entry.parts]
        if dtype == "float32":
            processor.native().decode(self.format, self.isa, stored, w.numpy(), torch.get_num_threads())
        else:
            into = w.view(torch.uint16).numpy()
            processor.native().decode_half(self.format, self.isa, stored, into, dtype == "bfloat16", torch.get_num_threads())
        return w

    @property
    def multiplies(self) -> bool:
        """Whether it multiplies packed weights (on the processor by activations in int8). If not, its products are exact."""
        if self.backend == "triton":
            from fewbits.kernels import triton

            return triton.unsupported(formats.get(self.format)) is None
        return (entry := self._entry()) is not None and entry.multiplies

    def matmul(self, x: Tensor, parts: Parts, shape: Shape, bias: Tensor | None = None, exact: bool = False) -> Tensor:
        """x (tokens, cols) -> (tokens, rows) in x's dtype. exact: x is not rounded, and the sums are taken in float32.

        On a GPU this repacks the weight at every call. To use a weight again, repack it once with `resident.resident`."""
        if self.backend == "triton":
            from fewbits.kernels.triton import planar

            return planar.multiply(x, planar.packed(formats.get(self.format), parts), bias)
        from fewbits.kernels import matmul

        return matmul.matmul(self, x, parts, shape, bias, exact)

    def pack(self, codes: Tensor, grid: Grid) -> Parts:  # codes (rows, cols)
        fmt = formats.get(self.format)
        if self.backend in _OF_A_GPU or not (entry := self.entry_here()).packs:
            return fmt.pack(codes, grid)
        import torch

        from fewbits.kernels.arrays import as_bytes

        specs = fmt.parts((codes.shape[0], codes.shape[1] * fmt.dimension))
        parts = {name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype)) for name, spec in specs.items()}
        fields, stored = [as_bytes(grid[name]) for name in entry.grid], [as_bytes(parts[name]) for name in entry.parts]
        processor.native().pack(self.format, as_bytes(codes), fields, stored, torch.get_num_threads())
        return parts

    @property
    def isa(self) -> str:
        return self.backend.removeprefix("native-")

    def _entry(self) -> Entry | None:
        return processor.table().get((self.format, self.isa))

    def entry_here(self) -> Entry:
        entry = self._entry()
        if entry is None or not entry.runs_here:
            raise InputError(f"{self.backend} cannot serve {self.format}: {self.runs_here()}", "let `bind` choose a kernel")
        points.give(self.format)
        return entry


def available(fmt: Format, device: object = "cpu") -> list[Kernel]:
    """The kernels that can run this format on a device of this machine, fastest first; the last is always the reference."""
    return [kernel for kernel in every(fmt, device) if kernel.runs_here() is None]


def every(fmt: Format, device: object = "cpu") -> list[Kernel]:
    """Every kernel that this format could have on a device, fastest first; `runs_here` says why one is not available."""
    return [Kernel(fmt.name, backend) for backend in _backends(device)]


def bind(fmt: Format, shape: Shape, device: object = "cpu") -> Kernel:
    """The fastest kernel for a weight on a device (a torch.device or its name), or the one that FEWBITS_KERNEL forces. `runs_here` and
    `supports` of another kernel say why it was not chosen."""
    if reason := fmt.fits(shape):
        raise InputError(f"{fmt.name} cannot hold this weight: {reason}", "choose a format with smaller blocks")
    wanted = forced()
    usable = [kernel for kernel in available(fmt, device) if kernel.supports(shape) is None]
    if wanted is None or wanted not in _backends(device):  # a backend forced for the processor leaves GPUs alone, and the other way round
        return usable[0]
    # A format without such a kernel (a cast has no codes to decode) is left to the reference.
    return next((kernel for kernel in usable if kernel.backend == wanted), usable[-1])


def who(fmt: Format, shape: Shape) -> str:
    """The backends that `bind` chooses on the processor and, where there is one, on the GPU, as text for people."""
    from fewbits.kernels import triton

    on_processor = bind(fmt, shape).backend
    return on_processor if triton.runs_here() else f"{on_processor}; GPU: {bind(fmt, shape, _GPU).backend}"


def decode(fmt: Format, parts: Parts, shape: Shape) -> Tensor:  # -> (rows, cols) float32
    return bind(fmt, shape, next(iter(parts.values())).device).decode(parts, shape)


def pack(fmt: Format, codes: Tensor, grid: Grid) -> Parts:
    return bind(fmt, (codes.shape[0], codes.shape[1] * fmt.dimension)).pack(codes, grid)


def _backends(device: object) -> tuple[str, ...]:
    kind = str(device).split(":")[0]
    if kind == _GPU:
        return _OF_A_GPU
    if kind != "cpu":
        return ("reference",)
    from fewbits.kernels import triton

    # the interpreter is for tests: it runs on the processor if it is asked for, never by default
    asked = os.environ.get(processor.FORCE) == "triton" and triton.interpreted()
    return BACKENDS if asked else tuple(backend for backend in BACKENDS if backend != "triton")


def forced() -> str | None:
    """The backend that FEWBITS_KERNEL forces, or an error if it cannot run here."""
    wanted = processor.forced()
    if wanted == "triton":
        from fewbits.kernels import triton

        if not triton.interpreted() and (reason := triton.runs_here()):
            force = processor.FORCE
            raise InputError(f"{force} is `triton`, but {reason}", f"unset {force}: the processor has kernels of its own")
    return wanted
