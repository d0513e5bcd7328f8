"""Folders of compressed-tensors (`quant_method`: compressed-tensors), as llm-compressor and `fewbits export --to safetensors` write them.

    integers        weight_packed int32: q + 2^(bits-1), a stream of bits, lowest first; weight_shape; weight_zero_point, if there is one,
                    packed alike down the rows. Or weight int8, and weight_zero_point int8
    8-bit floats    weight float8 e4m3
    4-bit floats    weight_packed uint8, two e2m1 codes each, the even column in the low bits
    weight_scale    one for the weight, for each row, for each group of columns of a row, or for each block; of microscaling formats an
                    exponent n for 2^(n - 127); of nvfp4 float8, divided by weight_global_scale

Which layer has which bits and groups is said in config.json; how they are stored is seen from the tensors. transformers casts the scales of
a layer to the type of the model and multiplies in that type. Experts, which it merges, it multiplies by the scales as they are stored.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fewbits.errors import InputError
from fewbits.model.checkpoints.compressed_groups import Group, group_of, groups_of
from fewbits.model.checkpoints.encoded import CASTS, DAMAGED, Encoded, Files, check_scales, check_tensor, scaled
from fewbits.model.checkpoints.fp8 import nibbles
from fewbits.model.checkpoints.layer_patterns import LayerPatterns

if TYPE_CHECKING:
    from torch import Tensor

_OF_WEIGHT = r"weight_(?:packed|scale|zero_point|shape|global_scale|g_idx)"
_OF_OTHERS = r"(?:input|output|q|k|v)_(?:scale|zero_point|global_scale)"  # how the published runtime rounds inputs and caches
_PART = re.compile(rf"(.+)\.(?:({_OF_WEIGHT})|{_OF_OTHERS})$")
_FLOATS = {"F16": "fp16", "BF16": "bf16", "F32": "fp32"}
_KINDS = {"I32": "int", "I8": "int", "F8_E4M3": "float", "U8": "float"}

Parts = dict[str, str]  # part of a layer -> name of its tensor
Shape = tuple[int, int]


def find(files: Files, said: Mapping[str, Any], dtype: str) -> tuple[dict[str, Encoded], set[str]]:
    """Every quantized weight, and the tensors that are none of the float model's."""
    layers: dict[str, Parts] = {}
    hidden: set[str] = set()
    for name in files.names():
        match = _PART.match(name)
        if match and match[2]:
            layers.setdefault(match[1], {})[match[2]] = name
        elif match:
            hidden.add(name)
    names, groups, patterns = set(files.names()), groups_of(said) if layers else [], LayerPatterns(DAMAGED)
    found: dict[str, Encoded] = {}
    for layer, parts in layers.items():
        if f"{layer}.weight" in names:
            parts["weight"] = f"{layer}.weight"
        found[f"{layer}.weight"] = _encoded(files, layer, parts, group_of(layer, groups, patterns), dtype)
    return found, hidden


def _encoded(files: Files, layer: str, parts: Parts, group: Group, dtype: str) -> Encoded:
    stored = [parts[part] for part in ("weight", "weight_packed") if part in parts]
    if not stored:
        raise InputError(f"`{next(iter(parts.values()))}` is there, and the weight of `{layer}` is not", DAMAGED)
    if len(stored) == 2:
        raise InputError(f"`{stored[0]}` is there twice: also as `{stored[1]}`", DAMAGED)
    codes, bits = stored[0], files.stored(stored[0])
    if _KINDS.get(bits) != group.kind or (bits == "U8") != (group.kind == "float" and group.bits == 4):
        raise InputError(f"`{codes}` is stored as {bits}, and is {group.about} by config.json", DAMAGED)
    shape = _shape(files, layer, parts, codes, group)
    for part, (types, shapes) in _wanted(parts, group, shape).items():
        if part not in parts:
            raise InputError(f"`{codes}` is there, and `{layer}.{part}` is not", DAMAGED)
        check_tensor(files, parts[part], types, shapes, f"`{layer}` is {shape} in {group.about}")
    return _as_layer(files, parts, group, shape, dtype)


def _as_layer(files: Files, parts: Parts, group: Group, shape: Shape, dtype: str) -> Encoded:
    def encoded(computed: str, made: str, merged: Encoded | None = None) -> Encoded:
        return Encoded(
            shape, group.about, tuple(parts.values()), lambda _: _decoded(files, parts, group, shape, (computed, made)), made, merged
        )

    stored = _FLOATS.get(files.stored(parts["weight_scale"]))
    if stored is None:  # transformers decodes these to bfloat16, whatever the model is in
        return encoded("bf16", "bf16")
    return encoded(dtype, dtype, encoded(stored, stored) if group.kind == "int" else encoded("fp32", dtype))


def _shape(files: Files, layer: str, parts: Parts, codes: str, group: Group) -> Shape:
    stored, bits = files.shape(codes), files.stored(codes)
    if len(stored) != 2:
        raise InputError(f"`{codes}` is {stored}, which is no matrix", DAMAGED)
    rows, width = stored
    if bits != "I32":
        return rows, 2 * width if bits == "U8" else width
    scale = files.shape(parts["weight_scale"]) if "weight_scale" in parts else ()
    if group.size and group.size[0] == 1 and len(scale) == 2:  # so that opening reads no pages of a large file
        return rows, group.size[1] * scale[1]
    if (said := _said(files, parts)) is None:
        raise InputError(f"`{codes}` is there, and `{layer}.weight_shape` is not", DAMAGED)
    return said


def _said(files: Files, parts: Parts) -> Shape | None:
    if (name := parts.get("weight_shape")) is None:
        return None
    check_tensor(files, name, ("I64", "I32"), ((2,),), "rows and columns")
    rows, cols = files.load(name).tolist()
    if rows < 0 or cols < 0:
        raise InputError(f"`{name}` says {rows} x {cols}", DAMAGED)
    return rows, cols


def _wanted(parts: Parts, group: Group, shape: Shape) -> dict[str, tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]]:
    """Types and shapes that each tensor of a layer may have, beside the codes that are not packed."""
    (rows, cols), grid = shape, group.grid(shape)
    grids = ((1,), grid, ()) if group.strategy == "tensor" else (grid,)
    scales: tuple[str, ...] = tuple(_FLOATS)
    if group.strategy == "tensor_group":
        scales = ("F8_E4M3",)
    elif group.kind == "float" and group.size and group.size[0] == 1:  # microscaling; 8 bits in groups may have float scales too
        scales = ("U8",) if group.bits == 4 else ("U8", *_FLOATS)
    wanted: dict[str, tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]] = {"weight_scale": (scales, grids)}
    if group.strategy == "tensor_group":
        wanted["weight_global_scale"] = ("F32",), ((1,),)
    if "weight_packed" in parts and group.kind == "int":
        wanted["weight_packed"] = ("I32",), ((rows, -(-cols * group.bits // 32)),)
    if not group.symmetric:
        if _packs_zeros(parts, group):
            wanted["weight_zero_point"] = ("I32",), ((-(-grid[0] * group.bits // 32), grid[1]),)
        else:
            wanted["weight_zero_point"] = ("I8",), grids
    return wanted


def _packs_zeros(parts: Parts, group: Group) -> bool:
    return "weight_packed" in parts and group.strategy in ("group", "channel")


def _decoded(files: Files, parts: Parts, group: Group, shape: Shape, types: tuple[str, str]) -> Tensor:
    """`types`: what is multiplied in, and what is made."""
    import torch

    if (said := _said(files, parts)) is not None and said != shape:
        raise InputError(f"`{parts['weight_shape']}` says {said[0]} x {said[1]}, the other tensors {shape[0]} x {shape[1]}", DAMAGED)
    _check_order(files, parts, group, shape)
    codes, scales, zeros = _codes(files, parts, group, shape), _scales(files, parts, group, shape, types[0]), None
    if not group.symmetric:
        zeros = _zeros(files, parts, group, shape)
    block = group.block(shape)
    check_scales(scales, parts["weight_scale"], lambda other: scaled(codes, other, block, torch.float32, zeros))
    return scaled(codes, scales, block, getattr(torch, CASTS[types[1]]), zeros)


def _check_order(files: Files, parts: Parts, group: Group, shape: Shape) -> None:
    """Refuses groups of columns that do not lie side by side, which transformers 5.22 takes for groups that do."""
    import torch

    if (name := parts.get("weight_g_idx")) is None:
        return
    check_tensor(files, name, ("I32", "I64"), ((shape[1],),), "the group of each column")
    given, wide = files.load(name), group.block(shape)[1]
    if not bool((given == -1).all()) and not bool((given == torch.arange(shape[1]) // wide).all()):
        raise InputError(f"`{name}` puts columns into groups that do not lie side by side, which is not read", "give the float model")


def _codes(files: Files, parts: Parts, group: Group, shape: Shape) -> Tensor:
    import torch

    from fewbits.formats.storage import bitstream

    if "weight" in parts:
        return files.load(parts["weight"])
    packed = files.load(parts["weight_packed"])
    if group.kind == "float":
        return nibbles(packed)
    return bitstream.unpack(packed.contiguous().view(torch.uint8), group.bits, shape[1]).short() - (1 << group.bits - 1)


def _scales(files: Files, parts: Parts, group: Group, shape: Shape, dtype: str) -> Tensor:
    """In the type that is multiplied in."""
    import torch

    stored = files.load(parts["weight_scale"])
    if stored.dtype == torch.uint8:
        stored = stored.contiguous().view(torch.float8_e8m0fnu)
    scales = stored.to(getattr(torch, CASTS[dtype]))
    if group.strategy == "tensor_group":
        factor = files.load(parts["weight_global_scale"])
        if not float(factor):
            raise InputError(f"`{parts['weight_global_scale']}` is 0, which scales are divided by", DAMAGED)
        scales = scales / factor  # in float32
    return scales.reshape(group.grid(shape))


def _zeros(files: Files, parts: Parts, group: Group, shape: Shape) -> Tensor:
    import torch

    from fewbits.formats.storage import bitstream

    stored = files.load(parts["weight_zero_point"])
    rows, across = group.grid(shape)
    if not _packs_zeros(parts, group):
        return stored.reshape(rows, across)
    down = stored.T.contiguous().view(torch.uint8)
    return (bitstream.unpack(down, group.bits, rows).short() - (1 << group.bits - 1)).T
