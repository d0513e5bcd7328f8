"""A launch of a Triton kernel as a value: it can be run here, or compiled ahead of time for a GPU that this machine does not have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_TYPES = {
    torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.int8: "i8", torch.uint8: "u8", torch.int16: "i16",
    torch.int32: "i32", torch.int64: "i64", torch.float8_e4m3fn: "fp8e4nv", torch.float8_e5m2: "fp8e5",
}  # fmt: skip
_ALIGNED = [["tt.divisibility", 16]]
_SMALL = [["tt.pointer_range", 32]]


@dataclass(frozen=True)
class Call:
    kernel: Any  # a function of triton.jit
    grid: tuple[int, ...]
    arguments: Mapping[str, Any]  # tensors (on the meta device if it is only compiled), tuples of tensors, integers, floats, None
    constants: Mapping[str, Any]  # values compiled into the code
    warps: int = 4
    stages: int = 1

    @property
    def options(self) -> dict[str, Any]:
        # set here because Triton's default changes between versions; where the bits must equal the reference, products are exact anyway
        return {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": True}

    def run(self) -> None:
        # Triton launches on torch's current GPU, which may not be the one that holds the arrays
        with torch.cuda.device_of(next(value for value in self.arguments.values() if isinstance(value, Tensor))):
            self.kernel[self.grid](**self.arguments, **self.constants, **self.options)

    def source(self, vendor: str) -> Any:
        """The argument of triton.compile for `cuda` or `hip`. It is specialised as Triton specialises a launch: on alignment, on integers
        equal to 1 and, on AMD, on arrays below 2 GB."""
        from triton.compiler import ASTSource

        signature: dict[str, Any] = {}
        constants: dict[Any, Any] = {}
        attributes: dict[tuple[int, ...], Any] = {}
        for place, name in enumerate(self.kernel.arg_names):
            if name in self.constants:
                signature[name], constants[(place,)], attributes[(place,)] = "constexpr", self.constants[name], []
            else:
                signature[name] = _typed(self.arguments[name], (place,), constants, attributes, vendor == "hip")
        return ASTSource(self.kernel, signature, constexprs=constants, attrs=attributes)


def _typed(value: Any, place: tuple[int, ...], constants: dict[Any, Any], attributes: dict[tuple[int, ...], Any], with_sizes: bool) -> Any:
    if isinstance(value, tuple):
        return tuple(_typed(each, (*place, i), constants, attributes, with_sizes) for i, each in enumerate(value))
    if isinstance(value, float):
        return "fp32"
    attributes[place] = []
    if value is None or (isinstance(value, int) and value == 1):
        constants[place] = value
        return "constexpr"
    if isinstance(value, Tensor):
        small = with_sizes and value.untyped_storage().size() < 2**31
        attributes[place] = [*_ALIGNED, *(_SMALL if small else [])]  # torch aligns what it allocates
        return f"*{_TYPES[value.dtype]}"
    if value % 16 == 0:
        attributes[place] = _ALIGNED
    return "i32" if -(2**31) <= value < 2**31 else "i64"
