"""One weight as a quantized checkpoint stores it: codes and scales in a few tensors of the files, decoded when it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from fewbits.errors import InputError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

CASTS = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}  # the cast format -> torch's name
DAMAGED = "the checkpoint is damaged, or its config.json belongs to another; fetch it again"
_STRIP = 128  # rows that are decoded at once where each has scales of its own


class Files(Protocol):
    """The tensors of a folder as they lie in its files."""

    def names(self) -> list[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def stored(self, name: str) -> str: ...

    def load(self, name: str) -> Tensor: ...


@dataclass(frozen=True)
class Encoded:
    shape: tuple[int, ...]
    about: str  # the format, for a person: `fp8 e4m3, 128 x 128 blocks`
    parts: tuple[str, ...]  # every tensor that belongs to it
    decode: Callable[[int], Tensor]  # a matrix: of three dimensions the one at this index of the first, of two the only one
    dtype: str  # the cast format that transformers decodes to
    merged: Encoded | None = None  # as transformers decodes it where it merges it with others, as experts, if that is another way

    def load(self) -> Tensor:
        import torch

        if len(self.shape) == 2:
            return self.decode(0)
        made = torch.empty(self.shape, dtype=getattr(torch, CASTS[self.dtype]))
        for i in range(len(made)):
            made[i] = self.decode(i)
        return made

    def load_slice(self, index: int) -> Tensor:
        return self.decode(0)[index] if len(self.shape) == 2 else self.decode(index)


def scaled(codes: Tensor, scales: Tensor, block: tuple[int, int], to: torch.dtype, zeros: Tensor | None = None) -> Tensor:
    """(codes - zeros) * scales, computed in the type of scales, as `to`.

    codes (rows, cols); scales and zeros have an entry for every `block` of rows and columns, the last of which may be cut off.
    """
    import torch

    (rows, cols), (tall, wide) = codes.shape, block
    made = torch.empty(rows, cols, dtype=to)
    step = _STRIP if tall == 1 else tall
    for first in range(0, rows, step):
        last = min(first + step, rows)
        above = slice(first // tall, -(-last // tall))
        part = codes[first:last].to(scales.dtype)
        if zeros is not None:
            part = part - _spread(zeros[above].to(scales.dtype), wide, cols)
        made[first:last] = part * _spread(scales[above], wide, cols)
    return made


def check_scales(scales: Tensor, name: str, without: Callable[[Tensor], Tensor]) -> None:
    """Refuses scales that are no numbers, and zeros over codes that are not zero: nothing writes these, and the weight would be lost.
    `without`: what is decoded with other scales in their place."""
    import torch

    if not bool(scales.isfinite().all()):
        value = scales[~scales.isfinite()][0].item()
        raise InputError(f"`{name}` holds a scale of {value:g}", DAMAGED)
    if bool((scales == 0).any()) and bool(without((scales == 0).to(scales.dtype)).any()):
        place = tuple(torch.nonzero(scales == 0)[0].tolist())
        raise InputError(f"`{name}` holds a scale of 0 at {place}, over values that are not 0", DAMAGED)


def check_tensor(files: Files, name: str, types: tuple[str, ...], shapes: tuple[tuple[int, ...], ...], why: str) -> None:
    stored, shape = files.stored(name), files.shape(name)
    if stored not in types or shape not in shapes:
        raise InputError(f"`{name}` is {stored} {shape} and should be {' or '.join(types)} {shapes[0]}: {why}", DAMAGED)


def _spread(entries: Tensor, wide: int, cols: int) -> Tensor:
    """An entry for each column; one for all of them is left to broadcasting."""
    return entries if entries.shape[1] == 1 else entries.repeat_interleave(wide, 1)[:, :cols]
