"""Products with packed weights in Triton's interpreter, against float64 and the reference's decoding."""

from __future__ import annotations

import pytest
import torch
from gpu_weights import activations, bound, expected, packed, planar
from packed_weights import random_bytes

from fewbits import formats
from fewbits.formats import Format
from fewbits.kernels import reference
from fewbits.kernels.triton import linear, repack, tile_shapes
from fewbits.kernels.triton.device import Device
from fewbits.methods import rtn

EVERY = [fmt for fmt in formats.all().values() if repack.unsupported(fmt) is None]
# what the issue names, one of each family, of each cut of a tile and of each kind of level
NAMED = [
    formats.get(name)
    for name in (
        "int4_g128", "int4_g32_asym", "int8_channel", "int8_g64_asym", "q4_0", "q8_0", "q4_k", "q6_k", "q3_k", "mxfp4", "fp8_e4m3_channel",
        "fp8_e5m2_tensor",
    )
]  # fmt: skip
OTHERS = [formats.get(name) for name in ("int3_g32", "q2_k", "q5_1", "iq4_xs", "nvfp4_tensor", "tq1_0", "int6_tensor_asym", "q1_0", "q2_0")]
HALVES = (torch.float16, torch.bfloat16)


def over(fmts: list[Format]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("fmt", fmts, ids=lambda fmt: fmt.name)


def columns(fmt: Format, blocks: int) -> int:
    return blocks * fmt.block if fmt.group else blocks * 96  # whole rows may end anywhere


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    integer = torch.int32 if a.dtype == torch.float32 else torch.int16
    return bool(((a.view(integer) == b.view(integer)) | (a.isnan() & b.isnan())).all())


@over(EVERY)
def test_restoring_undoes_repacking(fmt: Format) -> None:
    for shape in ((1, columns(fmt, 1)), (5, columns(fmt, 3))):
        parts = fmt.pack(*fmt.unpack(random_bytes(fmt, shape)))
        restored = repack.restore(repack.repack(fmt, parts))
        assert all(torch.equal(restored[name].view(torch.uint8), part.view(torch.uint8)) for name, part in parts.items())


@over(EVERY)
def test_decoding_any_bytes_gives_the_reference_bits(fmt: Format) -> None:
    """Random bytes: every code, negative, subnormal, infinite and NaN scales. Rows and columns end within a tile."""
    shape = (19, columns(fmt, 3))
    parts = random_bytes(fmt, shape)
    assert same_bits(linear.decode(planar(fmt, parts)), reference.decode(fmt, parts))


@over(NAMED + OTHERS)
def test_decoding_every_code(fmt: Format) -> None:
    assert fmt.levels
    shape = (2, -(-max(len(fmt.levels), columns(fmt, 1)) // columns(fmt, 1)) * columns(fmt, 1))
    codes = (torch.arange(2 * shape[1]).reshape(shape) % len(fmt.levels)).to(torch.uint8)
    parts = fmt.pack(codes, fmt.unpack(packed(fmt, shape))[1])
    assert len(fmt.unpack(parts)[0].unique()) == len(fmt.levels)
    assert same_bits(linear.decode(planar(fmt, parts)), reference.decode(fmt, parts))


@over([formats.get(name) for name in ("mxfp4", "nvfp4", "nvfp4_tensor", "q3_k", "q4_k", "q6_k", "iq4_xs", "int8_g64_asym")])
def test_decoding_under_every_byte_of_a_scale(fmt: Format) -> None:
    """Scales, minima and zeros of 8 bits: each of their values that the format can store, 2^-127 and NaN among them."""
    shape = (64, max(256, 4 * (fmt.group or 0)))
    codes, grid = fmt.unpack(random_bytes(fmt, shape))
    for name, entry in grid.items():
        if not entry.is_floating_point():
            grid[name] = torch.arange(entry.numel()).reshape(entry.shape).to(torch.uint8).view(entry.dtype)
    parts = fmt.pack(codes, grid)
    assert all(len(entry.unique()) in (16, 64, 128, 256) for entry in fmt.unpack(parts)[1].values() if not entry.is_floating_point())
    assert same_bits(linear.decode(planar(fmt, parts)), reference.decode(fmt, parts))


@over([formats.get(name) for name in ("q4_k", "fp8_e5m2_channel", "mxfp4")])
def test_decoding_to_halves_rounds_once(fmt: Format) -> None:
    parts = packed(fmt, (5, columns(fmt, 2)))
    for dtype in HALVES:
        assert same_bits(linear.decode(planar(fmt, parts), dtype), reference.decode(fmt, parts).to(dtype))


@over(NAMED + OTHERS)
def test_the_planes_hold_the_bytes_that_the_layout_says(fmt: Format) -> None:
    shape = (7, columns(fmt, 3))
    weight = planar(fmt, packed(fmt, shape))
    assert sum(array.nbytes for array in (*weight.planes, *weight.grid)) == weight.layout.nbytes(shape)


def check(fmt: Format, tokens: int, shape: tuple[int, int], dtype: torch.dtype, bias: bool = False, residual: bool = False) -> None:
    parts = packed(fmt, shape)
    x = activations(tokens, shape[1], dtype)
    source = torch.Generator().manual_seed(7)
    b = torch.randn(shape[0], generator=source).to(dtype) if bias else None
    r = torch.randn(tokens, shape[0], generator=source).to(dtype) if residual else None
    y = linear.matmul(x, planar(fmt, parts), b, r)
    wanted = expected(fmt, parts, x, b, r)
    assert y.dtype == dtype and y.shape == wanted.shape
    assert ((y.double() - wanted).abs() <= bound(fmt, parts, x, wanted.abs(), weights_are_rounded=tokens > 1)).all()


@pytest.mark.parametrize("tokens", [1, 3, 17])
@over(NAMED)
def test_a_product_is_that_of_the_decoded_weight(fmt: Format, tokens: int) -> None:
    """Rows and columns that end within a tile, in both types in turn; with bias and residual."""
    check(fmt, tokens, (37, columns(fmt, 3)), HALVES[tokens % 2], bias=True, residual=True)


@over(OTHERS)
def test_a_product_of_every_other_structure(fmt: Format) -> None:
    for tokens in (1, 2):
        check(fmt, tokens, (19, columns(fmt, 1)), HALVES[tokens % 2])


@over([formats.get(name) for name in ("int4_g32", "q8_0", "q3_k")])
def test_one_group_of_columns_and_one_row(fmt: Format) -> None:
    for tokens in (1, 2):
        check(fmt, tokens, (1, columns(fmt, 1)), torch.float16)


@pytest.mark.parametrize("tokens", [1, 3])
def test_splits_give_the_sums_of_one_program(tokens: int) -> None:
    """Five tiles in 1, 2, 4 and 8 splits: shares that do not divide, and programs with nothing to do."""
    fmt, shape = formats.get("int4_g64"), (21, 5 * 256 - 64)
    parts = packed(fmt, shape)
    x, weight = activations(tokens, shape[1], torch.float16), planar(fmt, parts)
    bias, residual = torch.randn(shape[0]).half(), torch.randn(tokens, shape[0]).half()
    tile = tile_shapes.choose("vector" if tokens == 1 else "matrix", "sm_80", 4, tokens)
    wanted = expected(fmt, parts, x, bias, residual)
    for splits in (1, 2, 4, 8):
        out = x.new_empty(tokens, shape[0])
        partial = torch.full((splits, tokens, shape[0]), torch.nan) if splits > 1 else None
        linear.product_call(x, weight, bias, residual, out, partial, tile, splits).run()
        if partial is not None:
            linear.add_up_call(partial, bias, residual, out).run()
        assert ((out.double() - wanted).abs() <= bound(fmt, parts, x, wanted.abs(), weights_are_rounded=tokens > 1)).all()


def test_splits_keep_the_processors_at_work() -> None:
    tile, device = tile_shapes.choose("vector", "sm_80", 4), Device("sm_80", 108)
    assert linear.splits(1, (64 * 108, 4096), tile, device) == 1  # a block for each
    assert linear.splits(1, (4096, 4096), tile, device) == 8  # 512 programs, 4.74 per processor, of 5
    assert linear.splits(1, (64, 512), tile, device) == 2  # no more than there are tiles
    assert linear.splits(1, (64, 1 << 16), tile, device) == linear.MOST_SPLITS
    several = tile_shapes.choose("matrix", "sm_80", 4, 16)
    assert linear.splits(16, (4096, 4096), several, device) == 4  # eight would move half as many bytes as the weight has
    assert linear.splits(1000, (64, 4096), several, device) == 1


@pytest.mark.parametrize("architecture", ["sm_90", "gfx942", "gfx1100"])
def test_the_tiles_of_other_architectures_compute_the_same(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "device_of", lambda _: Device(architecture, 4))
    for name in ("q4_k", "q3_k"):
        for tokens in (1, 33):
            check(formats.get(name), tokens, (70, 256), torch.float16)


@over([formats.get(name) for name in ("mxfp4", "fp8_e4m3_tensor", "q6_k")])
def test_extreme_scales(fmt: Format) -> None:
    """Weights of 2^-30 to 2^12. Rows whose results the type cannot hold are left out: float16 makes infinities of them."""
    shape = (8, columns(fmt, 2))
    source = torch.Generator().manual_seed(3)
    w = torch.randn(shape, generator=source) * torch.exp2(torch.linspace(-30, 12, 8)).unsqueeze(1)
    parts = rtn.quantize(w, fmt, how="max")
    for dtype in HALVES:
        x = torch.randn((3, shape[1]), generator=source).to(dtype)
        wanted = expected(fmt, parts, x, None, None)
        y = linear.matmul(x, planar(fmt, parts)).double()
        allowed = bound(fmt, parts, x, wanted.abs(), weights_are_rounded=True)
        finite = (wanted.abs() + allowed < torch.finfo(dtype).max).all(0)  # rows whose results the type can hold
        assert finite.sum() >= 6 and ((y - wanted).abs() <= allowed)[:, finite].all()


FLOAT16 = [
    formats.get(name)
    for name in ("int4_g128", "int4_g32_asym", "int8_channel", "int8_channel_asym", "int4_tensor", "q4_0", "q5_1", "q4_k", "q3_k")
]


@pytest.mark.parametrize("scale", [2.0**-24, 65504.0])
@over(FLOAT16)
def test_the_smallest_and_the_largest_scale_of_float16(fmt: Format, scale: float) -> None:
    """One row is all zeros, and columns end within a tile. bfloat16 holds every weight. Of float16, a weight beyond 65504 is an
    infinity in tensor cores, as it is where it is decoded to that type; for one token weights are not rounded, and a sum that float16
    holds is right."""
    assert fmt.levels
    shape = (5, columns(fmt, 2))
    codes, grid = fmt.unpack(packed(fmt, shape))
    for entry in grid.values():
        if entry.dtype == torch.float16:
            entry[:] = scale
    parts = fmt.pack(codes, grid)
    w = reference.decode(fmt, parts)
    for tokens in (1, 2):
        for dtype in HALVES:
            x = activations(tokens, shape[1], dtype) * (2.0**-12 if scale > 1 else 2.0**8)
            wanted = expected(fmt, parts, x, None, None)
            y = linear.matmul(x, planar(fmt, parts)).double()
            holds = w.half().isfinite().all(1) if dtype == torch.float16 and tokens > 1 else torch.ones(len(w), dtype=torch.bool)
            allowed = bound(fmt, parts, x, wanted.abs(), weights_are_rounded=tokens > 1)
            kept = holds & (wanted.abs() + allowed < torch.finfo(dtype).max).all(0)
            assert ((y - wanted).abs() <= allowed)[:, kept].all() and not y[:, ~holds].isfinite().any()
            assert dtype == torch.float16 or kept.all()


@pytest.mark.parametrize("fmt", FLOAT16[:2], ids=lambda fmt: fmt.name)
def test_what_is_not_finite_stays_in_its_own_token_and_its_own_row(fmt: Format) -> None:
    shape = (37, columns(fmt, 3))
    parts = packed(fmt, shape)
    x = activations(3, shape[1], torch.float16)
    whole = linear.matmul(x, planar(fmt, parts))
    for value in (torch.nan, torch.inf, -torch.inf):
        broken = x.clone()
        broken[1, 5] = value
        y = linear.matmul(broken, planar(fmt, parts))
        assert torch.equal(y[[0, 2]], whole[[0, 2]])
        assert not y[1].isfinite().any()  # a row without weight at this column too: nothing times infinity is NaN, as in torch
        assert not linear.matmul(broken[1:2].clone(), planar(fmt, parts)).isfinite().any()
        codes, grid = fmt.unpack({name: part.clone() for name, part in parts.items()})
        grid["scales"][3, 0] = value
        damaged = linear.matmul(x, planar(fmt, fmt.pack(codes, grid)))
        others = [row for row in range(37) if row != 3]
        assert torch.equal(damaged[:, others], whole[:, others]) and not damaged[:, 3].isfinite().any()


@over([formats.get(name) for name in ("int4_g128", "q6_k")])
def test_rows_of_zeros_give_the_bias_alone(fmt: Format) -> None:
    """Exactly: the sum of products with zero is zero."""
    parts = rtn.quantize(torch.zeros(5, 256), fmt, how="max")
    bias = torch.randn(5).half()
    for tokens in (1, 3):
        assert torch.equal(linear.matmul(activations(tokens, 256, torch.float16), planar(fmt, parts), bias), bias.expand(tokens, 5))


@over([formats.get(name) for name in ("int4_g128", "q3_k")])
def test_many_blocks_of_rows_and_tokens(fmt: Format) -> None:
    """More rows than any tile has, more tokens than one, and columns that end within the third tile."""
    for tokens in (1, 67):
        check(fmt, tokens, (131, 640 if fmt.block < 256 else 768), torch.float16, bias=True, residual=True)


def test_large_batches_are_left_to_the_library() -> None:
    fmt, shape = formats.get("q8_0"), (5, 64)
    parts = packed(fmt, shape)
    x = activations(linear.LIBRARY_FROM, 64, torch.bfloat16)
    bias = torch.randn(5).bfloat16()
    y = linear.matmul(x, planar(fmt, parts), bias)
    assert torch.equal(y, torch.nn.functional.linear(x, reference.decode(fmt, parts).bfloat16(), bias))


def test_what_does_not_fit_is_refused() -> None:
    fmt = formats.get("q8_0")
    weight = planar(fmt, packed(fmt, (4, 64)))
    assert linear.matmul(torch.zeros(0, 64).half(), weight).shape == (0, 4)
    for x in (torch.zeros(2, 32).half(), torch.zeros(64, 2).half().T, torch.zeros(2, 64), torch.zeros(64).half()):
        with pytest.raises(ValueError):
            linear.matmul(x, weight)
    for bias in (torch.zeros(5).half(), torch.zeros(8).half()[::2]):
        with pytest.raises(ValueError, match="bias"):
            linear.matmul(torch.zeros(2, 64).half(), weight, bias)
    with pytest.raises(ValueError, match="residual"):
        linear.matmul(torch.zeros(2, 64).half(), weight, None, torch.zeros(3, 4).half())
