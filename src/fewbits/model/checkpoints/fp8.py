"""Float8 weights with scales per block, as DeepSeek, Qwen and MiniMax publish them (`quant_method`: fp8).

    NAME.weight             float8 e4m3 or e5m2 [rows, cols]; 4-bit floats are two to an int8 [rows, cols / 2], the even column in low bits
    NAME.weight_scale_inv   [rows / 128, cols / 128], both rounded up: the last blocks are cut off. Float, or the exponent alone (e8m0);
                            `NAME.scale` in DeepSeek V4, `NAME.qscale_weight` in Mistral's
    NAME.activation_scale   how inputs are rounded in the published runtime: not part of the weights

Experts that lie in one tensor have scales of as many dimensions, under the name of the tensor and `_scale_inv`.

transformers 5.22 divides the rows of a weight by the rows of its scales to find the block, which is right only if the last block is whole:
it refuses DeepSeek V3's 576 rows under 5 scales, and gives 192 rows under 2 scales blocks of 96. Here the block is what config.json says.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from fewbits.errors import InputError
from fewbits.model.checkpoints.encoded import CASTS, DAMAGED, Encoded, Files, check_scales, scaled

if TYPE_CHECKING:
    from torch import Tensor

_CODES = {"F8_E4M3": "fp8 e4m3", "F8_E5M2": "fp8 e5m2", "I8": "fp4 e2m1"}
_SCALES = ("F32", "BF16", "F16", "F8_E8M0", "U8")  # a byte is an exponent too: 2^(n - 127)
_OF_INPUTS = (".activation_scale", ".input_scale", ".qscale_act")
_MX = 32  # columns under one scale in the microscaling formats, whatever the block of the other weights

Block = tuple[int, int]


def find(files: Files, said: Mapping[str, Any], dtype: str) -> tuple[dict[str, Encoded], set[str]]:
    """Every quantized weight, and the tensors that are none of the float model's."""
    block, names = _block(said), set(files.names())
    found = {name: _encoded(files, name, names, block, dtype) for name in files.names() if files.stored(name) in _CODES}
    used = {part for encoded in found.values() for part in encoded.parts}
    for name in names - used:
        if name.endswith("_scale_inv"):
            weight = name.removesuffix("_scale_inv")
            is_there = f"is stored as {files.stored(weight)}" if weight in names else "is missing"
            raise InputError(f"`{name}` has scales for `{weight}`, which {is_there}", DAMAGED)
    return found, {name for name in names - used if name.endswith(_OF_INPUTS)}


def _block(said: Mapping[str, Any]) -> Block | None:
    sides = said.get("weight_block_size")
    if sides is None:
        return None
    if not isinstance(sides, list) or len(sides) != 2 or not all(type(side) is int and side > 0 for side in sides):
        raise InputError(f"config.json gives `weight_block_size` as {str(sides)[:100]}, not as two numbers", DAMAGED)
    return sides[0], sides[1]


def _encoded(files: Files, name: str, names: set[str], block: Block | None, dtype: str) -> Encoded:
    layer, kind = name.removesuffix(".weight"), files.stored(name)
    candidates = [f"{name}_scale_inv", *([f"{layer}.scale", f"{layer}.qscale_weight"] if layer != name else [])]
    scales = next((each for each in candidates if each in names), None)
    if scales is None:
        raise InputError(f"`{name}` is stored as {kind}, and there is no `{candidates[0]}` with its scales", DAMAGED)
    if files.stored(scales) not in _SCALES:
        raise InputError(f"`{scales}` is stored as {files.stored(scales)}, which scales are not", DAMAGED)
    shape = files.shape(name)
    if len(shape) not in (2, 3):
        raise InputError(f"`{name}` is stored as {kind} in the shape {shape}, which is no matrix", DAMAGED)
    if kind == "I8":
        shape = (*shape[:-1], 2 * shape[-1])
    used = _block_of(files, scales, shape, block)
    about = f"{_CODES[kind]}, {_said(used, shape)}"
    return Encoded(shape, about, (name, scales), partial(_decoded, files, name, scales, used, dtype), dtype)


def _block_of(files: Files, scales: str, shape: tuple[int, ...], block: Block | None) -> Block:
    """Rows and columns under one scale, by the shape of the scales: config.json's block, or all, or a row, or 32 of a row."""
    *experts, rows, cols = shape
    stored = files.shape(scales)
    if stored in ((), (1,)):
        return max(rows, 1), max(cols, 1)
    for tall, wide in (*([block] if block else []), (max(rows, 1), max(cols, 1)), (1, max(cols, 1)), (1, _MX)):
        if stored == (*experts, -(-rows // tall), -(-cols // wide)):
            return tall, wide
    tall, wide = block or (max(rows, 1), max(cols, 1))
    wanted = (*experts, -(-rows // tall), -(-cols // wide))
    raise InputError(f"`{scales}` is {stored} and should be {wanted}, for {shape} in blocks of {tall} x {wide}", DAMAGED)


def _said(block: Block, shape: tuple[int, ...]) -> str:
    tall, wide = block
    if (tall, wide) == shape[-2:]:
        return "a scale per tensor"
    return f"{tall} x {wide} blocks" if tall > 1 else f"{wide} columns per scale" if wide < shape[-1] else "a scale per row"


def _decoded(files: Files, name: str, scales: str, block: Block, dtype: str, which: int) -> Tensor:
    codes, grid = files.load(name), _float(files.load(scales))
    if codes.dim() == 2:
        return _matrix(codes, grid, block, scales, dtype)
    return _matrix(codes[which], grid[which] if grid.dim() == 3 else grid, block, scales, dtype)


def _matrix(codes: Tensor, grid: Tensor, block: Block, name: str, dtype: str) -> Tensor:
    import torch

    values = nibbles(codes) if codes.dtype == torch.int8 else codes
    grid = grid.reshape(-(-values.shape[0] // block[0]), -1)
    check_scales(grid, name, lambda other: scaled(values, other, block, torch.float32))
    return scaled(values, grid, block, getattr(torch, CASTS[dtype]))


def _float(scales: Tensor) -> Tensor:
    import torch

    return (scales.view(torch.float8_e8m0fnu) if scales.dtype == torch.uint8 else scales).float()


def nibbles(packed: Tensor) -> Tensor:
    """(rows, n) bytes of two e2m1 codes each -> (rows, 2 n) bfloat16, which holds their values exactly; the low bits come first."""
    import torch

    from fewbits.formats.microscaling import E2M1
    from fewbits.formats.storage.codes import level_values

    levels, byte = level_values(E2M1).bfloat16(), torch.arange(256)
    pairs = torch.stack([levels[byte & 15], levels[byte >> 4]], 1).view(torch.int32)[:, 0]  # looked up as one number: half the time
    return pairs[packed.contiguous().view(torch.uint8).int()].view(torch.bfloat16)
