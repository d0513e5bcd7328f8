"""Kernels: who packs, decodes and multiplies a format on a device. `bind` chooses once.

`native-*` are C++ (native/*.cc: one file per family, which is its own registration) for the processor, `triton` is for GPUs, CUDA's and
ROCm's; `reference` is torch and serves any format anywhere. All pack and decode to the same bits. On the processor a product rounds its
activations to int8, 32 columns under a scale, unless it is asked to be exact; on a GPU they are never rounded.

FEWBITS_KERNEL=reference, scalar, neon, avx2, avx512 or triton forces one wherever a format has it, on the device that it is for. Under
Triton's interpreter (TRITON_INTERPRET=1) `triton` can be forced for the processor too.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from fewbits import formats
from fewbits.errors import InputError
from fewbits.formats import Format, Shape

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from fewbits.formats import Grid, Parts

BACKENDS = ("triton", "native-avx512", "native-avx2", "native-neon", "native-scalar", "reference")  # fastest first
_OF_A_GPU = ("triton", "reference")
_GPU = "cuda"  # torch's name for those of CUDA and of ROCm
ABI = 6  # native/kernels.h holds the same number
_FORCE = "FEWBITS_KERNEL"


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
        if missing := native_missing():
            return missing
        if (entry := self._entry()) is None:
            if not any(row.isa == self._isa for row in _table().values()):
                return f"{self._isa} is of other processors than this module was built for"
            return f"no {self._isa} kernel is written for {self.format}"
        return None if entry.runs_here else f"this processor has no {self._isa}"

    def supports(self, shape: Shape) -> str | None:
        """Why it cannot take a weight of this shape; None if it can."""
        if self.backend == "triton":
            from fewbits.kernels import triton

            return triton.supports(formats.get(self.format), shape)
        return formats.get(self.format).fits(shape)

    def decode(self, parts: Parts, shape: Shape, dtype: str = "float32", out: Tensor | None = None) -> Tensor:  # -> (rows, cols)
        """dtype: float32, or what that is rounded to: float16 or bfloat16. out: where to write; new memory costs as much as decoding."""
        import torch

        fmt, wanted = formats.get(self.format), getattr(torch, dtype)
        if self.backend == "reference":
            from fewbits.kernels import reference

            w = reference.decode(fmt, parts).to(wanted)
            return w if out is None else out.copy_(w)
        if self.backend == "triton":
            from fewbits.kernels.triton import resident

            w = resident.packed(fmt, parts, shape).decode(wanted)
            return w if out is None else out.copy_(w)
        entry = self._needed()
        w = torch.empty(shape, dtype=wanted) if out is None else out
        if w.shape != shape or w.dtype != wanted or not w.is_contiguous():
            raise ValueError(f"out must be {dtype}, contiguous and {shape[0]} x {shape[1]}")
        stored = [_bytes(parts[name]) for name in entry.parts]
        if dtype == "float32":
            _native().decode(self.format, self._isa, stored, w.numpy(), torch.get_num_threads())
        else:
            into = w.view(torch.uint16).numpy()
            _native().decode_half(self.format, self._isa, stored, into, dtype == "bfloat16", torch.get_num_threads())
        return w

    @property
    def multiplies(self) -> bool:
        """Whether it multiplies packed weights: on the processor with activations in int8. If not, its products are exact ones."""
        if self.backend == "triton":
            from fewbits.kernels import triton

            return triton.unsupported(formats.get(self.format)) is None
        return (entry := self._entry()) is not None and entry.multiplies

    def matmul(self, x: Tensor, parts: Parts, shape: Shape, bias: Tensor | None = None, exact: bool = False) -> Tensor:
        """x (tokens, cols) -> (tokens, rows) in x's dtype. Exact: x is not rounded, and sums are float32's.

        On a GPU the weight is laid out anew at each call: one that stays is made `triton.resident.resident` once."""
        if self.backend == "triton":
            from fewbits.kernels.triton import resident

            return resident.packed(formats.get(self.format), parts, shape).matmul(x, bias)
        from fewbits.kernels import multiplication

        return multiplication.matmul(self, x, parts, shape, bias, exact)

    def pack(self, codes: Tensor, grid: Grid) -> Parts:  # codes (rows, cols)
        fmt = formats.get(self.format)
        if self.backend in _OF_A_GPU or not (entry := self._needed()).packs:
            from fewbits.kernels import reference

            return reference.pack(fmt, codes, grid)
        import torch

        specs = fmt.parts((codes.shape[0], codes.shape[1]))
        parts = {name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype)) for name, spec in specs.items()}
        fields, stored = [_bytes(grid[name]) for name in entry.grid], [_bytes(parts[name]) for name in entry.parts]
        _native().pack(self.format, _bytes(codes), fields, stored, torch.get_num_threads())
        return parts

    @property
    def _isa(self) -> str:
        return self.backend.removeprefix("native-")

    def _entry(self) -> _Entry | None:
        return _table().get((self.format, self._isa))

    def _needed(self) -> _Entry:
        entry = self._entry()
        if entry is None or not entry.runs_here:
            raise InputError(f"{self.backend} cannot serve {self.format}: {self.runs_here()}", "let `bind` choose a kernel")
        return entry


def available(fmt: Format, device: object = "cpu") -> list[Kernel]:
    """The kernels that can run this format on a device of this machine, fastest first; the last is always the reference."""
    return [kernel for kernel in every(fmt, device) if kernel.runs_here() is None]


def every(fmt: Format, device: object = "cpu") -> list[Kernel]:
    """Every kernel this format could have on a device, fastest first; `runs_here` says why one is not available."""
    return [Kernel(fmt.name, backend) for backend in _backends(device)]


def bind(fmt: Format, shape: Shape, device: object = "cpu") -> Kernel:
    """The fastest kernel for a weight on a device (torch's, or its name), or the one that FEWBITS_KERNEL forces. What speaks against
    another one, its `runs_here` and `supports` say."""
    if reason := fmt.fits(shape):
        raise InputError(f"{fmt.name} cannot hold this weight: {reason}", "choose a format with smaller blocks")
    wanted = forced()
    usable = [kernel for kernel in available(fmt, device) if kernel.supports(shape) is None]
    if wanted is None or wanted not in _backends(device):  # what is forced for a processor leaves GPUs alone, and the other way round
        return usable[0]
    # A format that has no such kernel (a cast has no codes to decode) is left to the reference.
    return next((kernel for kernel in usable if kernel.backend == wanted), usable[-1])


def who(fmt: Format, shape: Shape) -> str:
    """What `bind` takes on the processor and, where there is a GPU, on that: for people."""
    from fewbits.kernels import triton

    own = bind(fmt, shape).backend
    return own if triton.runs_here() else f"{own}; GPU: {bind(fmt, shape, _GPU).backend}"


def decode(fmt: Format, parts: Parts, shape: Shape) -> Tensor:  # -> (rows, cols) float32
    return bind(fmt, shape, next(iter(parts.values())).device).decode(parts, shape)


def pack(fmt: Format, codes: Tensor, grid: Grid) -> Parts:
    return bind(fmt, (codes.shape[0], codes.shape[1])).pack(codes, grid)


def backend() -> str:
    """Who does the processor's work that is not a format's own: the fastest backend that runs here, or the one that FEWBITS_KERNEL
    forces."""
    if (wanted := forced()) is not None and wanted != "triton":
        return wanted
    return next(
        (found for found in BACKENDS if any(f"native-{row.isa}" == found and row.runs_here for row in _table().values())), "reference"
    )


def fastest(written: Sequence[str]) -> str | None:
    """Which of these instruction sets to use for work that is not a format's own: the fastest that runs here, and no faster than the one
    that FEWBITS_KERNEL forces; None: torch."""
    names = [name for name in (found.removeprefix("native-") for found in BACKENDS) if name != "reference"]
    if (chosen := backend().removeprefix("native-")) == "reference":
        return None
    return next((name for name in names[names.index(chosen) :] if name in written), None)


def forced() -> str | None:
    """What FEWBITS_KERNEL forces, if it can run here; an error with a hint if it cannot."""
    return _forced(wanted) if (wanted := os.environ.get(_FORCE)) else None


def native() -> Any:
    """The native module itself; ask `native_missing` first."""
    return _native()


@cache
def native_missing() -> str | None:
    """Why there are no native kernels; None if there are."""
    try:
        found = getattr(_native(), "ABI", None)
    except ImportError as error:
        return f"the native module cannot be loaded ({error}); `pip install .` builds it"
    if found != ABI:
        return f"the native module was built for interface {found}, this fewbits needs {ABI}; `pip install .` builds it anew"
    return None


class _Entry(NamedTuple):
    """A row of the native table: the names of a format's arrays, in the order in which the kernels take them."""

    format: str
    isa: str
    runs_here: bool
    parts: list[str]
    grid: list[str]
    multiplies: bool  # packed weights, with activations in int8
    packs: bool


@cache
def _table() -> dict[tuple[str, str], _Entry]:
    rows = [] if native_missing() else [_Entry(*row) for row in _native().kernels()]
    return {(row.format, row.isa): row for row in rows}


@cache
def _native() -> Any:
    return importlib.import_module("fewbits._native")


def _backends(device: object) -> tuple[str, ...]:
    kind = str(device).split(":")[0]
    if kind == _GPU:
        return _OF_A_GPU
    if kind != "cpu":
        return ("reference",)
    from fewbits.kernels import triton

    # the interpreter is for tests: it serves the processor if it is asked for, never by itself
    asked = os.environ.get(_FORCE) == "triton" and triton.interpreted()
    return BACKENDS if asked else tuple(backend for backend in BACKENDS if backend != "triton")


def _forced(wanted: str) -> str:
    by_name = {backend.removeprefix("native-"): backend for backend in BACKENDS}
    if wanted not in by_name:
        raise InputError(f"no kernel is named `{wanted}` ({_FORCE})", f"set {_FORCE} to one of: {', '.join(sorted(by_name))}; or unset it")
    if wanted == "reference":
        return wanted
    if wanted == "triton":
        from fewbits.kernels import triton

        if not triton.interpreted() and (reason := triton.runs_here()):
            raise InputError(f"{_FORCE} is `triton`, but {reason}", f"unset {_FORCE}: the processor has kernels of its own")
        return wanted
    if reason := native_missing():
        raise InputError(f"{_FORCE} is `{wanted}`, but {reason}", f"unset {_FORCE}, or build the module")
    if not any(entry.runs_here for entry in _table().values() if entry.isa == wanted):
        raise InputError(f"{_FORCE} is `{wanted}`, but this processor has no {wanted}", f"unset {_FORCE}, or set it to `scalar`")
    return by_name[wanted]


def _bytes(stored: Tensor) -> NDArray[Any]:
    """The tensor's own memory as (rows, bytes): nothing is copied where it is contiguous."""
    import torch

    stored = stored.detach().contiguous()
    if stored.stride(-1) != 1:  # torch calls a single element contiguous whatever its stride, and yet will not view it as bytes
        stored = stored.clone(memory_format=torch.contiguous_format)
    octets: NDArray[Any] = stored.view(torch.uint8).numpy()
    return octets
