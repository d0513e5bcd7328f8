"""The layout of a weight in the files, recognised by the structure of its format. Formats whose values it cannot hold exactly are refused.

    pack-quantized        weight_packed int32 [rows, cols * bits / 32 rounded up]: q + 2^(bits-1), a stream of bits, lowest first
                          weight_scale float16 [rows, groups]
                          weight_shape int64 [2]: rows and columns
                          weight_zero_point int32 [rows * bits / 32 rounded up, groups]: a stream down each column of groups
    int-quantized         weight int8 [rows, cols], weight_scale float16 [rows, 1]: 8 bits that meet 8-bit activations
    float-quantized       weight float8_e4m3fn [rows, cols], weight_scale float32 [rows, 1], or [1] for the whole weight
    mxfp4-pack-quantized  weight_packed uint8 [rows, cols / 2], the even column in the low bits; weight_scale uint8, 2^(n - 127) per 32
    nvfp4-pack-quantized  the same with weight_scale float8_e4m3fn per 16; weight_global_scale float32 [1]: 1 / factor

Beside an input that is rounded by a fixed scale: input_scale float32 [1], and input_zero_point int8 [1] where it has one; beside one in
nvfp4: input_global_scale float32 [1], 1 / factor.

Readers multiply in the type of the model: in float32 all of this is exact, in bfloat16 a scale keeps 8 bits of its 11. An integer scale
for the whole weight is repeated for each row, since vLLM packs no others. Of 3, 5 and 6 bits compressed-tensors up to 0.17 had another
packing under the same name (whole codes in each int32) and stops at this one with an error of shapes; 0.18 reads it, and vLLM 0.32
(which has no CPU kernel to try it with) makes room for just as many words. 2, 4 and 8 bits have always been the same.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Literal

from fewbits.formats.blocks import OneScale
from fewbits.formats.microscaling import E2M1, E8M0, UE4M3, Microscaling
from fewbits.formats.runtime.activations import NVFP4, NVFP4_BLOCK
from fewbits.targets.compressed_tensors.shards import Array

if TYPE_CHECKING:
    from torch import Tensor

    from fewbits.formats import Format, Parts, Shape
    from fewbits.formats.runtime.activations import Activation

Arguments = dict[str, object]  # as config.json says it

VERSION = "0.18.0"  # the compressed-tensors that packs every number of bits like this
_ALWAYS = (2, 4, 8)  # those that earlier ones packed alike
_ANY = (256, 256)  # a shape that every format fits


@dataclass(frozen=True)
class Scheme:
    """What every weight of a config group has in common."""

    layout: str
    kind: Literal["int", "float"]
    bits: int
    strategy: Literal["tensor", "channel", "group", "tensor_group"]
    group: int | None = None  # columns under one scale
    symmetric: bool = True

    @property
    def type(self) -> str:
        """The name of the format with just these values, where fewbits has one."""
        if self.kind == "float" and self.bits == 4:
            return "mxfp4" if self.strategy == "group" else "nvfp4_tensor"
        reach = f"g{self.group}" if self.group else self.strategy
        return f"fp8_e4m3_{reach}" if self.kind == "float" else f"int{self.bits}_{reach}{'' if self.symmetric else '_asym'}"

    def arrays(self, shape: Shape) -> dict[str, Array]:
        rows, cols = shape
        groups = cols // self.group if self.group else 1
        if self.layout == "pack-quantized":
            packed = {"weight_packed": Array("int32", (rows, _words(cols, self.bits))), "weight_scale": Array("float16", (rows, groups))}
            zeros = {} if self.symmetric else {"weight_zero_point": Array("int32", (_words(rows, self.bits), groups))}
            return packed | {"weight_shape": Array("int64", (2,))} | zeros
        if self.layout == "int-quantized":
            return {"weight": Array("int8", shape), "weight_scale": Array("float16", (rows, 1))}
        if self.layout == "float-quantized":
            scales = (1,) if self.strategy == "tensor" else (rows, 1)
            return {"weight": Array("float8_e4m3fn", shape), "weight_scale": Array("float32", scales)}
        halved = {"weight_packed": Array("uint8", (rows, cols // 2))}
        if self.strategy == "group":
            return halved | {"weight_scale": Array("uint8", (rows, groups))}
        return halved | {"weight_scale": Array("float8_e4m3fn", (rows, groups)), "weight_global_scale": Array("float32", (1,))}

    def nbytes(self, shape: Shape) -> int:
        """Without the 16 bytes of `weight_shape`, which is left out beside 8-bit activations."""
        return sum(array.nbytes for name, array in self.arrays(shape).items() if name != "weight_shape")

    def arguments(self) -> Arguments:
        said: Arguments = {"num_bits": self.bits, "type": self.kind, "symmetric": self.symmetric, "strategy": self.strategy}
        said |= {"group_size": self.group, "dynamic": False}
        if self.kind == "float" and self.bits == 4:
            stored = "torch.uint8" if self.strategy == "group" else "torch.float8_e4m3fn"
            said |= {"scale_dtype": stored, "zp_dtype": stored}
        return said

    def beside(self, activation: Activation | None) -> Scheme:
        """The scheme of the same weight if its input is rounded: 8-bit integers are then not packed."""
        return replace(self, layout="int-quantized") if activation and self.kind == "int" else self


def _words(fields: int, bits: int) -> int:
    return -(-fields * bits // 32)


def of(fmt: Format) -> Scheme | str:
    """The scheme that holds exactly this format's values, or why none does."""
    if fmt.levels is None:
        return f"{fmt.name} has codes for vectors of {fmt.dimension} weights; compressed-tensors keeps one code per weight"
    specs = fmt.parts(_ANY)
    if isinstance(fmt, Microscaling):
        return _of_small_floats(fmt)
    if "codes" in specs and specs["codes"].dtype.startswith("float8"):
        if specs["codes"].dtype != "float8_e4m3fn":
            return f"compressed-tensors knows float8 as e4m3 only, not as {fmt.name} has it"
        return Scheme("float-quantized", "float", 8, "tensor" if fmt.tensor_wide else "channel")
    low = fmt.levels[0]
    if list(fmt.levels) != [low + i for i in range(len(fmt.levels))]:
        return f"{fmt.name} has levels that are not consecutive integers; compressed-tensors knows no others"
    float16 = isinstance(fmt, OneScale) or ("scales" in specs and specs["scales"].dtype == "float16" and "biases" not in specs)
    if not float16:
        return (
            f"{fmt.name} has scales of scales, or a minimum per block; compressed-tensors keeps one float scale and an integer zero point"
        )
    bits = max(2, math.ceil(math.log2(len(fmt.levels))))
    half = 1 << (bits - 1)
    symmetric = "zeros" not in specs and low >= -half and fmt.levels[-1] < half
    return Scheme("pack-quantized", "int", bits, "group" if fmt.group else "channel", fmt.group, symmetric)


def _of_small_floats(fmt: Microscaling) -> Scheme | str:
    if fmt.levels == E2M1 and not fmt.tensor_wide and fmt.scale_values == E8M0 and fmt.group == 32:
        return Scheme("mxfp4-pack-quantized", "float", 4, "group", 32)
    if fmt.levels == E2M1 and fmt.scale_values == UE4M3 and fmt.group == 16:
        return Scheme("nvfp4-pack-quantized", "float", 4, "tensor_group", 16)
    return f"{fmt.name} has other levels or scales than the 4-bit floats of compressed-tensors"


def not_for_experts(scheme: Scheme) -> str | None:
    """Why vLLM or transformers cannot load an expert in this scheme; None if both can."""
    if scheme.layout == "mxfp4-pack-quantized" or (scheme.layout == "pack-quantized" and scheme.bits in (4, 8) and scheme.symmetric):
        return None
    if not scheme.symmetric:
        return "transformers decodes experts without zero points"
    if scheme.layout == "float-quantized":
        return "vLLM multiplies experts in float8 by inputs in float8 only, which transformers does not round"
    return f"vLLM multiplies experts of 4 and 8 bits only, not {scheme.type}"


@cache
def installed() -> tuple[int, ...] | None:
    """The version of compressed-tensors; None: it is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return tuple(map(int, re.findall(r"\d+", version("compressed-tensors"))[:2]))
    except PackageNotFoundError:
        return None


def unread(kind: object, bits: object) -> str | None:
    """Why the compressed-tensors that is installed cannot read weights of so many bits; None if it can, or if none is here to ask."""
    present = installed()
    if kind != "int" or bits in _ALWAYS or present is None or present >= (0, 18):
        return None
    return f"compressed-tensors {'.'.join(map(str, present))} packs {bits} bits in another way; 0.18 is the first that reads them"


def rounded_inputs(activation: Activation) -> Arguments:
    """What config.json says of rounded activations, without the scales."""
    if activation.format == NVFP4:
        block = {"strategy": "tensor_group", "group_size": NVFP4_BLOCK, "dynamic": "local"}  # scales at run time, under one factor
        kept = {"scale_dtype": "torch.float8_e4m3fn", "zp_dtype": "torch.float8_e4m3fn"}
        return {"num_bits": 4, "type": "float", "symmetric": True, **block, **kept}
    kind, strategy = "int" if activation.format == "int8" else "float", "tensor" if activation.static else "token"
    return {"num_bits": 8, "type": kind, "symmetric": activation.symmetric, "strategy": strategy, "dynamic": not activation.static}


def input_arrays(activation: Activation | None) -> dict[str, Array]:
    if activation is None or not activation.static:
        return {}
    if activation.format == NVFP4:
        return {"input_global_scale": Array("float32", (1,))}
    return {"input_scale": Array("float32", (1,))} | ({} if activation.symmetric else {"input_zero_point": Array("int8", (1,))})


def input_tensors(activation: Activation | None) -> dict[str, Tensor]:
    import torch

    from fewbits.formats.runtime.activations import static_scale

    if activation is None or not activation.static:
        return {}
    if activation.format == NVFP4:
        return {"input_global_scale": 1 / torch.tensor([static_scale(activation)])}
    scale = {"input_scale": torch.tensor([static_scale(activation)])}
    return scale | ({} if activation.symmetric else {"input_zero_point": torch.tensor([activation.zero], dtype=torch.int8)})


def tensors(scheme: Scheme, fmt: Format, shape: Shape, parts: Parts, which: slice = slice(None)) -> dict[str, Tensor]:
    """A weight's parts in the layout of this scheme, with the same values. `which`: only these of its rows."""
    import torch

    codes, grid = fmt.unpack(parts)
    grid = {name: part[which] if part.dim() and len(part) == shape[0] else part for name, part in grid.items()}
    codes = codes[which]
    rows, cols = shape = (len(codes), shape[1])
    if scheme.kind == "float" and scheme.bits == 4:
        halved = {"weight_packed": codes[:, ::2] | codes[:, 1::2] << 4}
        if scheme.strategy == "group":
            return halved | {"weight_scale": grid["scales"]}
        unsigned = (grid["scales"] & 127).view(torch.float8_e4m3fn)
        # readers divide by it and keep 8 bits of the result: exact, because the factor is a power of two
        factor = grid["factor"].flatten() if "factor" in grid else torch.ones(1)
        return halved | {"weight_scale": unsigned, "weight_global_scale": 1 / factor}
    if scheme.kind == "float":
        scales = grid["scales"].float()
        return {"weight": codes.view(torch.float8_e4m3fn), "weight_scale": scales.flatten() if scheme.strategy == "tensor" else scales}
    groups = cols // scheme.group if scheme.group else 1
    scale, _ = fmt.affine(grid, slice(0, cols, cols // groups))
    scales = scale.expand(rows, groups).half()
    assert fmt.levels
    low, half = int(fmt.levels[0]), 1 << (scheme.bits - 1)
    stored = codes + (half + low) if scheme.symmetric else codes  # q + 2^(bits-1), or q beside a zero point
    if scheme.layout == "int-quantized":
        return {"weight": (stored.short() - half).to(torch.int8), "weight_scale": scales}
    packed = {"weight_packed": _packed(stored, scheme.bits), "weight_scale": scales, "weight_shape": torch.tensor(shape)}
    if scheme.symmetric:
        return packed
    zeros = grid["zeros"] if "zeros" in grid else codes.new_full((1, 1), -low)
    return packed | {"weight_zero_point": _packed(zeros.expand(rows, groups).T, scheme.bits).T}


def _packed(fields: Tensor, bits: int) -> Tensor:  # (rows, n) uint8 -> (rows, words) int32
    import torch
    from torch.nn.functional import pad

    from fewbits.formats.storage import bitstream

    octets = bitstream.pack(fields.contiguous(), bits)
    return pad(octets, (0, -octets.shape[1] % 4)).view(torch.int32)
