"""A weight that stays on a GPU, laid out for it once when a model is loaded: packed for Triton (triton/layout.py), or decoded for torch
where Triton cannot serve, with the reason.

    resident(fmt, parts, shape, device, dtype)   the weight on the device
    .matmul(x, bias, residual)                   x (..., cols) -> (..., rows) in x's type
    .rows(ids, dtype), .decode(dtype)            some rows, or all, decoded
    .arrays, .with_arrays(arrays)                the tensors that a module registers as buffers, so that it moves and counts them
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
from fewbits.kernels import torch_ops
from fewbits.kernels.triton import layout, planar
from fewbits.kernels.triton.layout import Layout, Planar

if TYPE_CHECKING:
    from fewbits.formats import Parts


@dataclass(frozen=True)
class Resident:
    format: Format
    shape: Shape
    arrays: tuple[Tensor, ...]  # planes, then scales; or the decoded weight alone
    layout: Layout | None  # None: the weight is decoded
    reason: str | None = None  # why it is decoded

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    def with_arrays(self, arrays: Sequence[Tensor]) -> Resident:
        """With arrays that a module may have moved. One that was cast as a whole has cast packed codes and scales too: that is refused."""
        for before, after in zip(self.arrays, arrays, strict=True):
            if self.layout is not None and before.dtype != after.dtype:
                raise InputError(f"a packed weight was cast from {before.dtype} to {after.dtype}", "cast activations, not the packed model")
        return replace(self, arrays=tuple(arrays))

    def matmul(self, x: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
        if self.layout is None:
            out = torch.nn.functional.linear(x, self.arrays[0].to(x.dtype), None if bias is None else bias.to(x.dtype))
            return out if residual is None else out + residual
        if torch.compiler.is_compiling():  # one operator instead of launches that the compiler would trace into
            made: Tensor = torch_ops.planar_matmul(x, list(self.arrays), self.format.name, self.shape[0], bias, residual)
            return made
        return planar.multiply(x, self._planar(), bias, residual)

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
            made: Tensor = torch_ops.planar_decode(list(self.arrays), self.format.name, *self.shape, dtype)
            return made
        return planar.decode(self._planar(), dtype)

    def _planar(self) -> Planar:
        assert self.layout is not None
        return layout.of_arrays(self.layout, self.shape, self.arrays)


def resident(fmt: Format, parts: Parts, shape: Shape, device: torch.device | str, dtype: torch.dtype) -> Resident:
    """With the kernel that `kernels.bind` chooses there. dtype: of activations, and of the weight if it is decoded."""
    chosen = kernels.bind(fmt, shape, device)
    if chosen.backend == "triton":
        weight = planar.packed(fmt, parts, device)
        return Resident(fmt, shape, weight.arrays, weight.layout)
    better = kernels.Kernel(fmt.name, "triton")
    reason = better.runs_here() or better.supports(shape) or f"FEWBITS_KERNEL forces {chosen.backend}"
    stored = {name: part.cpu() for name, part in parts.items()}
    return Resident(fmt, shape, (kernels.decode(fmt, stored, shape).to(device, dtype),), None, reason)
