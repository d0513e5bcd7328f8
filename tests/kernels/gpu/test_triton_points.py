"""Codes that stand for vectors, in Triton's interpreter: every point, sign, shift and scale decodes to the reference's bits, and products
are those of the decoded weight."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from gpu_weights import activations, bound, expected, planar
from packed_weights import random_bytes

from fewbits import formats
from fewbits.formats import Format
from fewbits.formats.storage.grids import NAMES, grid
from fewbits.kernels import reference
from fewbits.kernels import triton as gpu
from fewbits.kernels.resident import resident
from fewbits.kernels.triton import codebooks, linear, repack_points, tile_shapes
from fewbits.kernels.triton.device import Device
from fewbits.kernels.triton.layout import Planar

VECTORS = [formats.get(name) for name in NAMES]
HALVES = (torch.float16, torch.bfloat16)


def over(fmts: list[Format]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("fmt", fmts, ids=lambda fmt: fmt.name)


def some(fmt: Format, shape: tuple[int, int], seed: int = 0) -> dict[str, torch.Tensor]:
    """Any codes and sub-scales, under scales d such as a model has, of either sign; one row of nothing but zeros."""
    codes, entries = fmt.unpack(random_bytes(fmt, shape, seed))
    source = torch.Generator().manual_seed(seed + 1)
    entries["d"] = (torch.randn(entries["d"].shape, generator=source) * 1e-3).half()
    entries["d"][shape[0] // 2] = 0
    return fmt.pack(codes, entries)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    integer = torch.int32 if a.dtype == torch.float32 else torch.int16
    return bool((a.view(integer) == b.view(integer)).all())


def test_every_vector_format_has_a_kernel() -> None:
    assert [fmt.name for fmt in formats.all().values() if fmt.dimension > 1 and gpu.supports(fmt, (8, 256)) is None] == [
        fmt.name for fmt in formats.all().values() if fmt.dimension > 1
    ]
    assert {fmt.name for fmt in formats.all().values() if fmt.dimension > 1} == set(NAMES) == set(codebooks.BY_GRID)


def test_codebooks_that_the_kernels_do_not_know_are_refused() -> None:
    iq2_xs = formats.get("iq2_xs")
    assert "a codebook that the kernels do not know" in str(gpu.supports(replace(iq2_xs, name="iq2_new"), (8, 256)))
    assert "every 32 columns" in str(gpu.unsupported(replace(iq2_xs, group=32)))
    assert "blocks of 256" in str(gpu.supports(iq2_xs, (8, 128)))
    assert "is a cast" in str(gpu.unsupported(formats.get("bf16")))


@over(VECTORS)
def test_a_weight_takes_the_bytes_of_its_format(fmt: Format) -> None:
    shape = (7, 512)
    weight = planar(fmt, some(fmt, shape))
    assert sum(array.nbytes for array in weight.arrays) == weight.layout.nbytes(shape) == fmt.nbytes(shape)


@over(VECTORS)
def test_decoding_every_point_with_every_sign_or_shift(fmt: Format) -> None:
    """All values of all bits of an index, and all of the bits above it; both points where a code has two."""
    assert fmt.codebook
    bits, points = (len(grid(fmt.name)) - 1).bit_length(), fmt.dimension // grid(fmt.name).shape[1]
    above = {"even": 128, "free": 1 << fmt.dimension, "shifted": 2, "in the points": 1}[codebooks.BY_GRID[fmt.name].signs]
    count = max(1 << bits, above)
    index, over_it = torch.arange(count) * 257 % (1 << bits), torch.arange(count) * 37 % above  # odd: each once, neighbours far apart
    if above == 128:  # the eighth sign makes their number even
        for bit in range(7):
            over_it = over_it ^ ((over_it >> bit & 1) << 7)
    codes = index | over_it << (bits * points)
    if points == 2:
        codes = codes | index.flip(0) << bits
    codes = codes.int().reshape(-1, 256 // fmt.dimension)
    _, entries = fmt.unpack(some(fmt, (len(codes), 256), seed=3))
    entries["d"][:] = 0.01
    parts = fmt.pack(codes, entries)
    assert torch.equal(fmt.unpack(parts)[0], codes) and len((codes & ((1 << bits) - 1)).unique()) == 1 << bits
    assert same_bits(linear.decode(planar(fmt, parts)), reference.decode(fmt, parts))


@over(VECTORS)
def test_decoding_under_every_scale(fmt: Format) -> None:
    """Every sub-scale at every place in a super-block, both shifts of a group, and d from its smallest to its largest, of either sign."""
    largest = 15 if fmt.name.startswith("iq1") else 31
    odd = torch.arange(1, largest + 1, 2)
    assert fmt.group
    groups = 256 // fmt.group
    codes, entries = fmt.unpack(some(fmt, (len(odd), 256)))
    entries["sub"] = torch.stack([odd.roll(place) for place in range(groups)], 1).to(torch.int8)
    assert all(len(entries["sub"][:, place].unique()) == len(odd) for place in range(groups))
    entries["d"] = torch.tensor([2.0**-24, -(2.0**-24), 65504.0, -65504.0, 0.0, -0.0, 0.3, 1.0]).repeat(2)[: len(odd), None].half()
    parts = fmt.pack(codes, entries)
    assert same_bits(linear.decode(planar(fmt, parts)), reference.decode(fmt, parts))


@over([formats.get(name) for name in ("iq1_s", "iq2_s", "iq3_xxs")])
def test_decoding_to_halves_rounds_once(fmt: Format) -> None:
    parts = some(fmt, (5, 256))
    for dtype in HALVES:
        assert same_bits(linear.decode(planar(fmt, parts), dtype), reference.decode(fmt, parts).to(dtype))


def check(fmt: Format, tokens: int, shape: tuple[int, int], dtype: torch.dtype, added: bool = False) -> None:
    parts, x = some(fmt, shape), activations(tokens, shape[1], dtype)
    source = torch.Generator().manual_seed(7)
    bias = torch.randn(shape[0], generator=source).to(dtype) if added else None
    residual = torch.randn(tokens, shape[0], generator=source).to(dtype) if added else None
    y, wanted = linear.matmul(x, planar(fmt, parts), bias, residual), expected(fmt, parts, x, bias, residual)
    assert y.dtype == dtype and y.shape == wanted.shape
    assert ((y.double() - wanted).abs() <= bound(fmt, parts, x, wanted.abs(), weights_are_rounded=tokens > 1)).all()


@pytest.mark.parametrize("tokens", [1, 3, 17])
@over(VECTORS)
def test_a_product_is_that_of_the_decoded_weight(fmt: Format, tokens: int) -> None:
    """Rows that end within a tile, in both types in turn; with bias and residual."""
    check(fmt, tokens, (37, 512), HALVES[tokens % 2], added=True)


@pytest.mark.parametrize("tokens", [1, 33])
def test_many_blocks_of_rows_and_one_row(tokens: int) -> None:
    check(formats.get("iq2_xs"), tokens, (131, 768), torch.float16)
    check(formats.get("iq3_s"), tokens, (1, 256), torch.bfloat16)


@pytest.mark.parametrize("architecture", ["sm_90", "gfx942", "gfx1100"])
def test_the_tiles_of_other_architectures_compute_the_same(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "device_of", lambda _: Device(architecture, 4))
    for tokens in (1, 33):
        check(formats.get("iq2_xxs"), tokens, (70, 256), torch.float16)


@pytest.mark.parametrize("tokens", [1, 3])
def test_splits_give_the_sums_of_one_program(tokens: int) -> None:
    """Three tiles in 1, 2 and 4 splits: a share that does not divide, and a program with nothing to do."""
    fmt, shape = formats.get("iq1_s"), (21, 768)
    parts = some(fmt, shape)
    x, weight = activations(tokens, shape[1], torch.float16), planar(fmt, parts)
    bias, residual = torch.randn(shape[0]).half(), torch.randn(tokens, shape[0]).half()
    tile = tile_shapes.choose("vector" if tokens == 1 else "matrix", "sm_80", weight.layout.bits, tokens)
    wanted = expected(fmt, parts, x, bias, residual)
    for splits in (1, 2, 4):
        out = x.new_empty(tokens, shape[0])
        partial = torch.full((splits, tokens, shape[0]), torch.nan) if splits > 1 else None
        linear.product_call(x, weight, bias, residual, out, partial, tile, splits).run()
        if partial is not None:
            linear.add_up_call(partial, bias, residual, out).run()
        assert ((out.double() - wanted).abs() <= bound(fmt, parts, x, wanted.abs(), weights_are_rounded=tokens > 1)).all()


def test_what_is_not_finite_stays_in_its_own_token_and_its_own_row() -> None:
    fmt, shape = formats.get("iq1_m"), (37, 512)
    parts, x = some(fmt, shape), activations(3, shape[1], torch.float16)
    whole = linear.matmul(x, planar(fmt, parts))
    codes, entries = fmt.unpack(parts)
    entries["d"][3, 1] = torch.inf
    others = [row for row in range(37) if row != 3]
    for tokens in (1, 3):
        broken = x[:tokens].clone()
        broken[tokens - 1, 5] = torch.nan
        y = linear.matmul(broken, planar(fmt, parts))
        assert torch.equal(y[: tokens - 1], whole[: tokens - 1]) and y[tokens - 1].isnan().all()
        damaged = linear.matmul(x[:tokens].clone(), planar(fmt, fmt.pack(codes, entries)))
        assert torch.equal(damaged[:, others], linear.matmul(x[:tokens].clone(), planar(fmt, parts))[:, others])
        assert not damaged[:, 3].isfinite().any()


def test_a_weight_that_stays_multiplies_and_gives_single_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEWBITS_KERNEL", "triton")
    for name in ("iq1_m", "iq3_s"):
        fmt, shape = formats.get(name), (40, 256)
        parts = some(fmt, shape)
        weight = resident(fmt, parts, shape, "cpu", torch.float16)
        assert weight.reason is None and weight.nbytes == fmt.nbytes(shape)
        w, ids = reference.decode(fmt, parts), torch.tensor([[3, 39, 3], [0, 17, 38]])
        assert torch.equal(weight.rows(ids, torch.float32), w[ids]) and torch.equal(weight.decode(torch.bfloat16), w.bfloat16())
        x = activations(2, 256, torch.float16)
        assert torch.equal(weight.matmul(x), linear.matmul(x, planar(fmt, parts)))
        moved = weight.with_arrays([array.clone() for array in weight.arrays])
        assert torch.equal(moved.matmul(x), weight.matmul(x))


def test_a_table_of_points_is_made_once_and_small() -> None:
    for name in NAMES:
        made = repack_points.table(name, torch.device("cpu"))
        assert made is repack_points.table(name, torch.device("cpu")) and made.nbytes == grid(name).numel() <= 16384
        octets = made.view(torch.uint8).reshape(grid(name).shape).float() - 128
        assert torch.equal(octets, grid(name) * (8 if name == "iq1_m" else 1))


def test_rows_of_a_weight_are_taken_from_every_array() -> None:
    fmt = formats.get("iq2_s")
    parts = some(fmt, (9, 512))
    weight, ids = planar(fmt, parts), torch.tensor([8, 0, 8])
    chosen = weight.rows(ids)
    assert isinstance(chosen, Planar) and torch.equal(linear.decode(chosen), reference.decode(fmt, parts)[ids])
