"""Experts in 4-bit floats, as gpt-oss publishes them (`quant_method`: mxfp4).

    NAME_blocks   uint8 [experts, rows, cols / 32, 16]: two e2m1 codes to a byte, the even column in the low bits
    NAME_scales   uint8 [experts, rows, cols / 32]: 2^(n - 127)

The module's parameter NAME is [experts, cols, rows], in bfloat16, which holds these values exactly.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from fewbits.errors import InputError
from fewbits.model.checkpoints.encoded import DAMAGED, Encoded, Files, check_scales, check_tensor, scaled
from fewbits.model.checkpoints.fp8 import nibbles

if TYPE_CHECKING:
    from torch import Tensor

_BLOCKS, _SCALES = "_blocks", "_scales"
_BYTES = 16  # of the 32 columns under one scale


def find(files: Files) -> tuple[dict[str, Encoded], set[str]]:
    names = set(files.names())
    found: dict[str, Encoded] = {}
    for name in files.names():
        if files.stored(name) != "U8":
            continue
        base, which = (name.removesuffix(_BLOCKS), _SCALES) if name.endswith(_BLOCKS) else (name.removesuffix(_SCALES), _BLOCKS)
        if base == name:
            raise InputError(f"`{name}` is stored as U8, and is neither blocks nor scales of a weight", DAMAGED)
        if base + which not in names:
            raise InputError(f"`{name}` is there and `{base + which}` is not", DAMAGED)
        if base in names:
            raise InputError(f"`{base}` is there twice: in float, and as `{name}`", DAMAGED)
        found[base] = _encoded(files, base)
    return found, set()


def _encoded(files: Files, base: str) -> Encoded:
    blocks, scales = base + _BLOCKS, base + _SCALES
    shape = files.shape(blocks)
    if len(shape) != 4 or shape[3] != _BYTES or files.stored(blocks) != "U8":
        raise InputError(f"`{blocks}` is {files.stored(blocks)} {shape} and should be U8 (experts, rows, cols / 32, {_BYTES})", DAMAGED)
    check_tensor(files, scales, ("U8",), (shape[:3],), f"a scale for every {_BYTES} bytes of `{blocks}`")
    experts, rows, groups, _ = shape
    return Encoded((experts, 2 * _BYTES * groups, rows), "mxfp4 experts", (blocks, scales), partial(_decoded, files, base), "bf16")


def _decoded(files: Files, base: str, which: int) -> Tensor:
    import torch

    codes = nibbles(files.load(base + _BLOCKS)[which].flatten(1))
    scales = files.load(base + _SCALES)[which].view(torch.float8_e8m0fnu).float()
    block = (1, 2 * _BYTES)
    check_scales(scales, base + _SCALES, lambda other: scaled(codes, other, block, torch.float32))
    return scaled(codes, scales, block, torch.bfloat16).T.contiguous()
