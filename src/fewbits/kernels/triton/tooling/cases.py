"""Every kernel as it is launched, with arrays that have a shape but no memory: the list of what is compiled ahead of time and checked.

A case has a name such as `product int4_g128 float16 16` (kernel, format, type of x, tokens) and makes its call for a device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from fewbits import formats
from fewbits.formats.runtime import kv
from fewbits.kernels.triton import eight_bits, linear, observed, repack
from fewbits.kernels.triton.call import Call
from fewbits.kernels.triton.device import Device
from fewbits.kernels.triton.eight_bits import Product
from fewbits.kernels.triton.kv_cache import PackedCache
from fewbits.kernels.triton.layout import TILE, Field, Planar

SHAPE = (4096, 4096)
FORMATS = (
    "int4_g128", "int4_g32_asym", "int8_channel", "int8_g64_asym", "q4_0", "q8_0", "q4_k", "q6_k", "q3_k", "mxfp4", "fp8_e4m3_channel",
    "fp8_e5m2_channel", "q1_0", "q2_0", "iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s",
)  # fmt: skip
# fewer of bfloat16: only the conversion before the product differs
_VARIANTS = (("float16", 1), ("float16", 16), ("float16", 64), ("float16", 256), ("bfloat16", 1), ("bfloat16", 64))


@dataclass(frozen=True)
class Case:
    name: str
    call: Callable[[Device], Call]
    packed: tuple[str, ...] = ()  # the arguments that must be loaded 8 bytes or more at once; points are looked up instead
    tensor_cores: Literal["none", "any", "best"] = "none"  # best: the architecture's fastest, which takes 64 rows on sm_90 and sm_100
    operands: Literal["half", "int8", "float8"] = "half"  # what tensor cores multiply; float8 only where the architecture can
    bytes_per_weight: float | None = None


@cache
def all() -> dict[str, Case]:
    listed = [_product(name, dtype, tokens) for name in FORMATS for dtype, tokens in _VARIANTS]
    listed += [_decoded(name) for name in FORMATS]
    listed += [Case("add_up 16", lambda _: linear.add_up_call(_meta((4, 16, 4096)), None, None, _meta((16, 4096), torch.float16)))]
    listed += [_norm(), _integers(16), _integers(256), _float8_tokens()]
    listed += [_float8(weights, tokens) for weights in (torch.float8_e4m3fn, torch.float8_e5m2) for tokens in (16, 256)]
    listed += [Case("observe", lambda device: observed.call(_meta((1 << 20,), torch.float16), observed.empty(16, "meta"), device))]
    listed += [case for name in ("int8", "int4", "fp8") for case in _attention(name)]
    return {case.name: case for case in listed}


def _product(name: str, dtype: str, tokens: int) -> Case:
    layout = repack.of(formats.get(name))

    def call(device: Device) -> Call:
        x, out = (_meta((tokens, n), getattr(torch, dtype)) for n in (SHAPE[1], SHAPE[0]))
        return linear.calls(x, _weight(name), None, None, out, device)[0]

    return Case(
        f"product {name} {dtype} {tokens}", call, ("planes",) if layout.planes else (), "best" if tokens > 1 else "none",
        bytes_per_weight=layout.nbytes(SHAPE) / (SHAPE[0] * SHAPE[1]),
    )  # fmt: skip


def _decoded(name: str) -> Case:
    layout = repack.of(formats.get(name))
    return Case(
        f"decoded {name}",
        lambda device: linear.decode_call(_weight(name), _meta(SHAPE, torch.float16), device),
        bytes_per_weight=layout.nbytes(SHAPE) / (SHAPE[0] * SHAPE[1]),
    )


def _norm() -> Case:
    def call(_: Device) -> Call:
        x, weight = _meta((16, SHAPE[1]), torch.float16), _meta((SHAPE[1],), torch.float16)
        return eight_bits.norm_call(x, weight, 1e-5, _meta(x.shape, torch.int8), _meta((16,)))

    return Case("norm_and_quantize", call)


def _integers(tokens: int) -> Case:
    def call(device: Device) -> Call:
        x, w, out = _meta((tokens, SHAPE[1]), torch.int8), _meta(SHAPE, torch.int8), _meta((tokens, SHAPE[0]), torch.float16)
        return eight_bits.integer_call(Product(x, _meta((tokens,)), w, _meta((SHAPE[0], 1)), None, out), device)

    return Case(f"integer_product {tokens}", call, ("w",), "best", "int8", 1.0)


def _float8_tokens() -> Case:
    return Case(
        "quantize_float8",
        lambda _: eight_bits.float8_call(_meta((16, SHAPE[1]), torch.float16), _meta((16, SHAPE[1]), torch.uint8), _meta((16,))),
    )


def _float8(weights: torch.dtype, tokens: int) -> Case:
    def call(device: Device) -> Call:
        x, w = _meta((tokens, SHAPE[1]), torch.float8_e4m3fn), _meta(SHAPE, weights)
        out = _meta((tokens, SHAPE[0]), torch.float16)
        return eight_bits.float8_product_call(Product(x, _meta((tokens,)), w, _meta((SHAPE[0], 1)), None, out), device)

    kind = "e5m2" if weights == torch.float8_e5m2 else "e4m3"
    return Case(f"float8_product {kind} {tokens}", call, ("w",), "best", "float8", 1.0)


def _attention(name: str) -> list[Case]:
    """Eight heads of 128 channels, four queries each, 4,096 tokens."""
    queries = _meta((8, 4, 128), torch.float16)

    def cache() -> PackedCache:
        made = PackedCache(kv.get(name), 1, 8, 128, torch.float16, "meta")
        made.reserve(4096)
        made.packed, made.rest = 4096, 1
        return made

    return [
        Case(f"attend {name}", lambda device: cache().calls(queries, queries, 16, 0.1, device)[0], ("key_codes", "value_codes"), "any"),
        Case(f"combine {name}", lambda device: cache().calls(queries, queries, 16, 0.1, device)[1]),
        Case(
            f"settle {name}", lambda _: cache().settle_call(_meta((8, 64, 128), torch.float16), _meta((8, 64, 128), torch.float16), 1, 32)
        ),
    ]


def _weight(name: str) -> Planar:
    layout, (rows, cols) = repack.of(formats.get(name)), SHAPE
    planes = tuple(_meta((rows, cols * bits // 8), torch.uint8) for bits in layout.planes)
    grid = tuple(_meta(_entries(field, bool(layout.planes)), getattr(torch, field.stored)) for field in layout.fields)
    assert cols % TILE == 0
    return Planar(layout, SHAPE, planes, grid)


def _entries(field: Field, has_planes: bool) -> tuple[int, ...]:
    rows, cols = SHAPE
    return (cols // field.group if field.group else 1, rows) if has_planes else (cols // TILE, rows, TILE // field.group)


def _meta(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
