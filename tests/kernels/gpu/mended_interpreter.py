"""Triton's interpreter, mended: its casts to and from bfloat16 and float8 are wrong (20,078 of all 65,536 float16 values as e4m3), and so
are its products of them. test_gpu_interpreter.py proves the mended casts on every code.

Arithmetic on bfloat16 or float8 itself, which the interpreter does on their bits, is refused: kernels compute in float32. So is a load or a
store outside of the arrays of the launch, which on a GPU may go unseen: what a mask forgot is often multiplied by zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, TensorHandle

_STORED_AS_BITS = {tl.bfloat16: torch.bfloat16, tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}
_ARITHMETIC = tuple(
    f"create_{name}"
    for name in (
        "fadd", "fsub", "fmul", "fdiv", "precise_divf", "fneg", "fma", "minnumf", "maxnumf", "minimumf", "maximumf", "fcmpOLT", "fcmpOGT",
        "fcmpOLE", "fcmpOGE",
    )
)  # fmt: skip


def mend() -> None:
    """Once per process."""
    if getattr(InterpreterBuilder, "mended", False):
        return
    InterpreterBuilder.mended = True
    plain_cast = InterpreterBuilder.cast_impl

    def cast(self: Any, source: TensorHandle, target: Any) -> TensorHandle:
        before, after = source.dtype.scalar, target.scalar
        if before not in _STORED_AS_BITS and after not in _STORED_AS_BITS:
            return plain_cast(self, source, target)
        return TensorHandle(_from_float(_to_float(source), after), after)

    def dot(_self: Any, a: TensorHandle, b: TensorHandle, d: TensorHandle, *_how: Any) -> TensorHandle:
        if d.dtype.scalar.is_floating():
            a, b = (TensorHandle(_to_float(each), tl.float32) for each in (a, b))
            # float32's products of float16 are exact; added up in float64, so that what is left is d's rounding
            total = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64)) + d.data
            return TensorHandle(total.astype(d.data.dtype), d.dtype.scalar)
        # int8: as integers of 64 bits, so that a sum that 32 bits cannot hold is found out
        total = np.matmul(a.data.astype(np.int64), b.data.astype(np.int64)) + d.data
        assert np.abs(total).max(initial=0) < 2**31, "the sum of an integer product has overflowed"
        return TensorHandle(total.astype(d.data.dtype), d.dtype.scalar)

    arrays = _Arrays()
    plain_arguments, plain_load, plain_store = (
        GridExecutor._init_args_hst, InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store,
    )  # fmt: skip

    def arguments(self: Any, *given: Any) -> Any:
        found = plain_arguments(self, *given)
        arrays.known(found)
        return found

    def load(self: Any, pointers: TensorHandle, mask: TensorHandle, *how: Any) -> Any:
        arrays.check(pointers, mask)
        return plain_load(self, pointers, mask, *how)

    def store(self: Any, pointers: TensorHandle, value: TensorHandle, mask: TensorHandle, *how: Any) -> Any:
        arrays.check(pointers, mask)
        return plain_store(self, pointers, value, mask, *how)

    GridExecutor._init_args_hst = arguments
    InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store = load, store
    InterpreterBuilder.cast_impl = cast
    InterpreterBuilder.create_fp_to_fp = lambda self, source, target, _rounding: cast(self, source, target)
    InterpreterBuilder.create_dot = dot
    for name in _ARITHMETIC:
        setattr(InterpreterBuilder, name, _refusing(getattr(InterpreterBuilder, name), name))


class _Arrays:
    """Where the memory of a launch's arguments begins and ends."""

    def known(self, arguments: Any) -> None:
        found = sorted(_extents(arguments))
        joined: list[list[int]] = []
        for start, end in found:
            if joined and start <= joined[-1][1]:  # views of the same memory
                joined[-1][1] = max(joined[-1][1], end)
            else:
                joined.append([start, end])
        self._starts, self._ends = (np.array([each[side] for each in joined], dtype=np.uint64) for side in (0, 1))

    def check(self, pointers: TensorHandle, mask: TensorHandle) -> None:
        wanted = pointers.data[np.broadcast_to(mask.data, pointers.data.shape)].astype(np.uint64)
        if not wanted.size:
            return
        size = np.uint64(pointers.get_element_ty().primitive_bitwidth // 8)
        place = np.searchsorted(self._starts, wanted, side="right")
        outside = (place == 0) | (wanted + size > self._ends[np.maximum(place, 1) - 1])
        if outside.any():
            raise IndexError(f"{int(outside.sum())} of {wanted.size} addresses lie outside of the kernel's arrays")


def _extents(value: Any) -> Iterator[tuple[int, int]]:
    if isinstance(value, torch.Tensor):
        if value.is_contiguous():
            yield value.data_ptr(), value.data_ptr() + value.nbytes
        else:
            yield value.untyped_storage().data_ptr(), value.untyped_storage().data_ptr() + value.untyped_storage().nbytes()
    elif isinstance(value, dict):
        yield from _extents(list(value.values()))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _extents(each)


def _refusing(plain: Any, name: str) -> Any:
    def checked(self: Any, *handles: Any) -> Any:
        for handle in handles:
            if handle.dtype.scalar in _STORED_AS_BITS:
                raise TypeError(f"{name} of {handle.dtype.scalar}: the interpreter would add bits; cast to float32 first")
        return plain(self, *handles)

    return checked


def _to_float(source: TensorHandle) -> np.ndarray[Any, Any]:
    if (stored := _STORED_AS_BITS.get(source.dtype.scalar)) is None:
        return source.data.astype(np.float32)
    return torch.from_numpy(np.ascontiguousarray(source.data)).view(stored).float().numpy()


def _from_float(values: np.ndarray[Any, Any], after: Any) -> np.ndarray[Any, Any]:
    if (stored := _STORED_AS_BITS.get(after)) is None:
        return values.astype(interpreter._get_np_dtype(after))
    bits = torch.uint16 if stored == torch.bfloat16 else torch.uint8
    x = torch.from_numpy(np.ascontiguousarray(values))
    if stored != torch.bfloat16:
        largest = torch.finfo(stored).max
        x = torch.where(x.isnan(), x, x.clamp(-largest, largest))  # GPUs saturate (cvt.rn.satfinite)
    return x.to(stored).view(bits).numpy()
