"""Products with packed weights: integer kernels against float64, exact ones against torch, and ggml's own as an independent judge."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from packed_weights import JUDGED, bits, guarded, needs_ggml, over, random_bytes, random_weight
from torch import Tensor

from fewbits import formats, kernels
from fewbits.devices import processor
from fewbits.formats import Format
from fewbits.kernels import Kernel, reference

EPS = torch.finfo(torch.float32).eps
# One reach of each number of bits; the others differ in where a scale is found, which the second list covers.
BLOCKS = [fmt for fmt in formats.all().values() if fmt.levels is not None and not fmt.name.startswith(("int", "fp8"))]
STREAMS = [formats.get(f"int{bits}_g32{tail}") for bits in (2, 3, 4, 5, 6, 8) for tail in ("", "_asym")]
REACHES = [formats.get(f"int{reach}") for reach in ("4_g64", "4_g128_asym", "3_channel", "8_channel", "8_channel_asym", "5_tensor_asym")]
FAST = [kernel for fmt in BLOCKS + STREAMS + REACHES for kernel in kernels.available(fmt) if kernel.multiplies]


def activations(rows: int, cols: int, seed: int = 1) -> Tensor:
    """Of very different sizes, with blocks of nothing but zeros."""
    source = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, cols, generator=source) * torch.rand(rows, 1, generator=source).mul(8).exp2()
    x[:, 32:64] = 0
    x[0, :1] = 100.0
    return x


def rounded(x: Tensor) -> Tensor:
    """What int8 makes of activations, 32 columns under one scale: the obvious way."""
    cols = x.shape[1]
    blocks = torch.nn.functional.pad(x, (0, -cols % 32)).unflatten(1, (-1, 32))
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    codes = torch.where(scale > 0, blocks / scale, 0.0).round()
    return (codes.double() * scale.double()).flatten(1)[:, :cols]


def bound(x: Tensor, w: Tensor) -> Tensor:
    """Sums of 32 (or 16) products are exact integers. Each is then multiplied by two scales, and as many are added as there are blocks and
    lanes to add: a rounding each. An offset adds as many again. All are of numbers no larger than the sum of |x||w|, but for what an offset
    and its codes take from each other, which `w` counts apart."""
    blocks = -(-x.shape[1] // 16)
    return (2 * blocks + 24) * EPS * (x.abs() @ w.T)


def magnitudes(fmt: Format, parts: dict[str, Tensor]) -> Tensor:
    """|scale * code| + |scale * zero| + |offset|: what the terms of a weight may be before they cancel."""
    codes, grid = fmt.unpack(parts)
    scale, offset = fmt.affine(grid)
    assert fmt.levels is not None
    largest = max(abs(level) for level in fmt.levels)
    w = (scale.abs().double() * 2 * largest).expand(codes.shape)
    return w + (0 if offset is None else 2 * offset.abs().double())


def check(kernel: Kernel, x: Tensor, parts: dict[str, Tensor], shape: tuple[int, int], bias: Tensor | None = None) -> None:
    fmt = formats.get(kernel.format)
    y = kernel.matmul(x, parts, shape, bias)
    w, seen = reference.decode(fmt, parts).double(), rounded(x)
    expected = seen @ w.T + (0 if bias is None else bias.double())
    allowed = bound(seen, magnitudes(fmt, parts)) + (0 if bias is None else EPS * expected.abs())
    assert y.shape == (len(x), shape[0]) and y.dtype == x.dtype
    assert ((y.double() - expected).abs() <= allowed).all()


def width(fmt: Format, blocks: int) -> int:
    return blocks * fmt.block if fmt.group is not None else blocks * fmt.block * 31  # whole rows may end anywhere


@pytest.mark.parametrize("tokens, rows, blocks", [(1, 1, 1), (1, 37, 3), (2, 5, 1), (7, 33, 4), (13, 64, 2)])
@over(FAST)
def test_a_product_is_that_of_the_decoded_weight_and_the_rounded_activations(kernel: Kernel, tokens: int, rows: int, blocks: int) -> None:
    fmt = formats.get(kernel.format)
    shape = (rows, width(fmt, blocks))
    parts = fmt.pack(*random_weight(fmt, shape))
    check(kernel, activations(tokens, shape[1]), parts, shape, torch.randn(rows, generator=torch.Generator().manual_seed(3)))


@over(FAST)
def test_products_of_any_bytes(kernel: Kernel) -> None:
    """Every code at once, negative and subnormal scales, panels of several widths: 1,280 columns are two and a half panels."""
    fmt, shape = formats.get(kernel.format), (35, 1280)
    parts = random_bytes(fmt, shape)
    if kernel.format in ("mxfp4", "nvfp4", "nvfp4_tensor"):  # NaN and 2^127 among the scales: their own test
        codes, grid = fmt.unpack(parts)
        grid["scales"] = grid["scales"].clamp(100, 120) if kernel.format == "mxfp4" else grid["scales"] & 63
        parts = fmt.pack(codes, grid)
    for tokens in (1, 5):
        check(kernel, activations(tokens, shape[1]), parts, shape)


@over(FAST)
def test_the_largest_products_do_not_overflow(kernel: Kernel) -> None:
    """The largest codes times 127 everywhere: what 16 bits would hold is exceeded at once, if it can be."""
    fmt, shape = formats.get(kernel.format), (33, 1024)
    assert fmt.levels is not None
    codes, grid = random_weight(fmt, shape)
    for extreme in (max, min):
        level = fmt.levels.index(extreme(fmt.levels))
        parts = fmt.pack(torch.full_like(codes, level), grid)
        for sign in (1.0, -1.0):
            for tokens in (1, 6):
                check(kernel, torch.full((tokens, 1024), sign), parts, shape)


@over(FAST)
def test_threads_change_no_bit(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    fmt, shape = formats.get(kernel.format), (236, 2048)
    parts = fmt.pack(*random_weight(fmt, shape))
    for tokens in (1, 9):
        x, seen = activations(tokens, 2048), []
        for threads in (1, 2, 7):
            monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
            seen.append(bits(kernel.matmul(x, parts, shape)))
        assert torch.equal(seen[0], seen[1]) and torch.equal(seen[0], seen[2])


@over([kernel for kernel in FAST if kernel.format in ("q4_0", "q4_k", "q6_k", "int4_g32", "int8_channel", "mxfp4")])
def test_a_nan_or_an_infinity_is_not_hidden(kernel: Kernel) -> None:
    fmt, shape = formats.get(kernel.format), (5, 512)
    parts = fmt.pack(*random_weight(fmt, shape))
    for tokens in (1, 3):
        for value in (torch.nan, torch.inf, -torch.inf):
            x = activations(tokens, 512)
            x[0, 200] = value
            y = kernel.matmul(x, parts, shape)
            assert y[0].isnan().all() and y[1:].isfinite().all()


@over(FAST)
def test_no_product_reads_or_writes_outside_its_arrays(kernel: Kernel) -> None:
    fmt = formats.get(kernel.format)
    shape = (3, width(fmt, 2))
    parts = random_bytes(fmt, shape)
    for tokens in (1, 3):
        x = activations(tokens, shape[1])
        for at_end in (True, False):
            stored = [guarded(part.view(torch.uint8).numpy(), at_end) for part in parts.values()]
            out = guarded(np.zeros((tokens, 3), np.float32), at_end)
            processor.native().matmul(fmt.name, kernel.isa, guarded(x.numpy(), at_end), stored, out, None, 1)
            assert torch.equal(bits(torch.from_numpy(out.copy())), bits(kernel.matmul(x, parts, shape)))


FLOAT8 = [kernel for name in ("e4m3_channel", "e4m3_tensor", "e5m2_channel") for kernel in kernels.available(formats.get(f"fp8_{name}"))]


@pytest.mark.parametrize("tokens", [1, 3, 9])  # straight from the packed bytes, a row of weights at a time, by a library
@over([kernel for fmt in [*BLOCKS, formats.get("bf16")] for kernel in kernels.available(fmt)] + FLOAT8)
def test_an_exact_product_rounds_no_activation(kernel: Kernel, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    fmt, shape = formats.get(kernel.format), (37, 512)
    check_exact(kernel, fmt.pack(*random_weight(fmt, shape)), shape, tokens)
    from fewbits.kernels import matmul

    monkeypatch.setattr(matmul, "_DECODED", 16 * 512)  # in pieces
    check_exact(kernel, fmt.pack(*random_weight(fmt, shape)), shape, tokens)


@pytest.mark.parametrize("shape", [(1, 1), (3, 31), (5, 64), (6, 97), (9, 320)])
@over(FLOAT8)
def test_floats_of_8_bits_multiply_by_rows_that_end_anywhere(kernel: Kernel, shape: tuple[int, int]) -> None:
    fmt = formats.get(kernel.format)
    check_exact(kernel, fmt.pack(*random_weight(fmt, shape)), shape, 1)


def check_exact(kernel: Kernel, parts: dict[str, Tensor], shape: tuple[int, int], tokens: int) -> None:
    x, bias = torch.randn(tokens, shape[1], generator=torch.Generator().manual_seed(2)), torch.randn(shape[0])
    y = kernel.matmul(x, parts, shape, bias, exact=True)
    w = reference.decode(formats.get(kernel.format), parts).double()
    allowed = (shape[1] + 3) * EPS * (x.double().abs() @ w.abs().T + bias.abs())  # n * eps * sum |x||w|; scale and bias: one each
    assert ((y.double() - x.double() @ w.T - bias.double()).abs() <= allowed).all()


@over(FLOAT8)
def test_every_code_of_a_float_of_8_bits_multiplies_as_what_it_is(kernel: Kernel) -> None:
    """A row for each code, the same everywhere. Infinities and NaNs, which a foreign file may hold, show in the product."""
    fmt, cols = formats.get(kernel.format), 133
    codes = torch.arange(256, dtype=torch.uint8)[:, None].expand(256, cols).contiguous()
    parts = fmt.pack(codes, {"scales": torch.full((1 if fmt.tensor_wide else 256, 1), 0.25)})
    x = torch.ones(1, cols)
    y, one = kernel.matmul(x, parts, (256, cols))[0], reference.decode(fmt, parts)[:, 0]
    assert torch.equal(y.isnan(), one.isnan())
    assert torch.equal(y.nan_to_num(0.0), (one * cols).nan_to_num(0.0))  # sums of so few bits are exact
    only_last = torch.zeros(1, cols, dtype=torch.uint8)
    for place in (0, 63, 64, cols - 1):
        codes = only_last.clone()
        codes[0, place] = 0x7F
        assert kernel.matmul(x, fmt.pack(codes, {"scales": torch.ones(1, 1)}), (1, cols)).isnan().all()


@over(FLOAT8)
def test_exact_products_stay_inside_their_arrays_and_threads_change_no_bit(kernel: Kernel) -> None:
    if kernel.backend == "reference":
        pytest.skip("torch's own")
    fmt, shape = formats.get(kernel.format), (67, 1999)
    parts = random_bytes(fmt, shape)
    for tokens in (1, 3):
        x = activations(tokens, shape[1])
        seen = []
        for threads, at_end in ((1, True), (2, False), (7, True)):
            stored = [guarded(part.view(torch.uint8).numpy(), at_end) for part in parts.values()]
            out = guarded(np.zeros((tokens, shape[0]), np.float32), at_end)
            processor.native().matmul_exact(fmt.name, kernel.isa, guarded(x.numpy(), at_end), stored, out, None, threads)
            seen.append(bits(torch.from_numpy(out.copy())))
        assert torch.equal(seen[0], seen[1]) and torch.equal(seen[0], seen[2])


def test_half_precision_in_half_precision_out() -> None:
    fmt, shape = formats.get("q4_k"), (7, 256)
    parts, x = fmt.pack(*random_weight(fmt, shape)), torch.randn(4, 256)
    for dtype in (torch.float16, torch.bfloat16):
        for exact in (True, False):
            y = kernels.bind(fmt, shape).matmul(x.to(dtype), parts, shape, exact=exact)
            assert y.dtype == dtype and y.shape == (4, 7)


def test_x_of_the_wrong_width_is_refused() -> None:
    fmt, shape = formats.get("q4_k"), (7, 256)
    parts = fmt.pack(*random_weight(fmt, shape))
    with pytest.raises(ValueError, match="256 columns"):
        kernels.bind(fmt, shape).matmul(torch.randn(2, 512), parts, shape)


@needs_ggml
@pytest.mark.parametrize("name", sorted(JUDGED))
def test_rounding_activations_costs_half_a_percent_of_a_product(name: str) -> None:
    """With a weight that ggml quantized, against the exact product of what ggml decodes it to. Vectors are quantized here: the tables that
    ggml makes for that take it 15 s."""
    from fewbits.benchmarks.peers import ggml
    from fewbits.methods import rtn

    fmt, shape = formats.get(name), (64, 1024)
    source = torch.Generator().manual_seed(5)
    w = torch.randn(shape, generator=source)
    by_ggml = fmt.dimension == 1
    stored = (
        torch.from_numpy(ggml.quantize(JUDGED[name], w.numpy(), np.ones(1024, np.float32))) if by_ggml else rtn.quantize(w, fmt)["blocks"]
    )
    decoded = torch.from_numpy(ggml.dequantize(JUDGED[name], stored.numpy(), 64 * 1024)).reshape(shape).double()
    x = torch.randn(8, 1024, generator=source)
    exact = x.double() @ decoded.T
    ours = kernels.bind(fmt, shape).matmul(x, {"blocks": stored}, shape)
    error = ((ours - exact).square().sum() / exact.square().sum()).sqrt()
    # int8 of Gaussians, 32 under one scale: peak / 127 / sqrt(12), with peaks of about 2.1 standard deviations: 0.5 %
    assert 1e-4 < error < 0.006
