"""A weight that stays on a GPU, laid out for it once, when a model is loaded: packed for these kernels (layout.py), or decoded for torch
where they cannot serve, with the reason why.

    resident(fmt, parts, shape, device, dtype)   the weight on the device
    .matmul(x, bias, residual)                   x (..., cols) -> (..., rows) in x's type
    .rows(ids, dtype), .decode(dtype)            some rows, or all, decoded
    .arrays, .with_arrays(arrays)                what a module keeps as buffers, so that it moves and counts them as its own
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fewbits import kernels
from fewbits.errors import InputError
from fewbits.formats import Format, Shape
from fewbits.kernels import triton
from fewbits.kernels.triton import layout, shipping
from fewbits.kernels.triton.devices import device_of
from fewbits.kernels.triton.layout import Layout, Planar

if TYPE_CHECKING:
    from fewbits.formats import Parts


@dataclass(frozen=True)
class Resident:
    format: Format
    shape: Shape
    arrays: tuple[Tensor, ...]  # planes, then scales; or the decoded weight alone
    layout: Layout | None  # None: it is decoded
    reason: str | None = None  # why

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    def with_arrays(self, arrays: Sequence[Tensor]) -> Resident:
        """The same arrays, moved perhaps. A module that is cast as a whole casts its buffers too, and half a scale is no scale."""
        for own, given in zip(self.arrays, arrays, strict=True):
            if self.layout is not None and own.dtype != given.dtype:
                raise InputError(f"a packed weight was cast from {own.dtype} to {given.dtype}", "cast activations, not the packed model")
        return replace(self, arrays=tuple(arrays))

    def matmul(self, x: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
        if self.layout is None:
            out = torch.nn.functional.linear(x, self.arrays[0].to(x.dtype), None if bias is None else bias.to(x.dtype))
            return out if residual is None else out + residual
        if torch.compiler.is_compiling():  # one operator, in the place of launches that the compiler would look into
            from fewbits.kernels import ops

            made: Tensor = ops.planar_matmul(x, list(self.arrays), self.format.name, self.shape[0], bias, residual)
            return made
        return multiply(x, self._planar(), bias, residual)

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:  # ids (...) -> (..., cols)
        flat = ids.reshape(-1)
        if self.layout is None:
            return self.arrays[0][flat].to(dtype).reshape(*ids.shape, self.shape[1])
        some = replace(self, shape=(len(flat), self.shape[1]), arrays=self._planar().rows(flat).arrays)
        return some.decode(dtype).reshape(*ids.shape, self.shape[1])

    def decode(self, dtype: torch.dtype) -> Tensor:  # -> (rows, cols)
        if self.layout is None:
            return self.arrays[0].to(dtype)
        if torch.compiler.is_compiling():
            from fewbits.kernels import ops

            made: Tensor = ops.planar_decode(list(self.arrays), self.format.name, *self.shape, dtype)
            return made
        return decode(self._planar(), dtype)

    def _planar(self) -> Planar:
        assert self.layout is not None
        return layout.of_arrays(self.layout, self.shape, self.arrays)


def resident(fmt: Format, parts: Parts, shape: Shape, device: torch.device | str, dtype: torch.dtype) -> Resident:
    """By the kernel that `kernels.bind` takes there. dtype: of activations, and of the weight where it is decoded."""
    chosen = kernels.bind(fmt, shape, device)
    if chosen.backend == "triton":
        return packed(fmt, parts, shape, device)
    better = kernels.Kernel(fmt.name, "triton")
    reason = better.runs_here() or better.supports(shape) or f"FEWBITS_KERNEL forces {chosen.backend}"
    stored = {name: part.cpu() for name, part in parts.items()}
    return Resident(fmt, shape, (kernels.decode(fmt, stored, shape).to(device, dtype),), None, reason)


def packed(fmt: Format, parts: Parts, shape: Shape, device: torch.device | str | None = None) -> Resident:
    """In the layout of these kernels, on the device where the parts are if no other is named."""
    where = next(iter(parts.values())).device if device is None else device
    weight = layout.repack(fmt, parts).to(where)
    if weight.planes[0].device.type == "cuda":
        shipping.seed_from_environment(device_of(weight.planes[0]).architecture)
    return Resident(fmt, shape, weight.arrays, weight.layout)


def multiply(x: Tensor, weight: Planar, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    """x (..., cols) of any float type and order in memory -> (..., rows). float32 is multiplied by torch with the decoded weight."""
    rows, cols = weight.shape
    flat = x.reshape(-1, cols).contiguous()
    added = None if residual is None else residual.reshape(-1, rows).contiguous()
    if flat.dtype in (torch.float16, torch.bfloat16):
        out = triton.matmul(flat, weight, None if bias is None else bias.contiguous(), added)
    else:
        out = torch.nn.functional.linear(flat, decode(weight, flat.dtype), None if bias is None else bias.to(flat.dtype))
        out = out if added is None else out + added
    return out.reshape(*x.shape[:-1], rows)


def decode(weight: Planar, dtype: torch.dtype) -> Tensor:
    if 0 in weight.shape:
        return torch.empty(weight.shape, dtype=dtype, device=weight.planes[0].device)
    return triton.decode(weight, dtype)
