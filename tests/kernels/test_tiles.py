"""Weights laid out in tiles give the products of weights as they are stored."""

from __future__ import annotations

import pytest
import torch
from packed_weights import random_weight

from fewbits import formats, kernels, methods
from fewbits.devices import processor
from fewbits.kernels.tiles import tiled

MULTIPLIED = [name for name, fmt in formats.all().items() if kernels.bind(fmt, (256, 256)).multiplies]
SHAPES = [(1, 256), (16, 512), (33, 768), (7, 544), (50, 288), (40, 100), (129, 1280)]  # stripes and chunks that end early
TILING = [backend for backend in ("native-avx512", "native-avxvnni", "native-avx2") if kernels.Kernel("q4_0", backend).runs_here() is None]
pytestmark = pytest.mark.skipif(not TILING, reason="no instruction set of this processor multiplies by tiles")


def _bound(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Both products have the same integers and scales and differ in the order of their sums in float32: one rounding for each block of
    16 columns, its scale, its offset and the bias, each of at most the sum of magnitudes. Rounding x grows none of them by over a half."""
    magnitude = 1.5 * (x.abs().double() @ w.abs().double().T) + bias.abs()
    return (3 * w.shape[1] / 16 + 4) * 2.0**-23 * magnitude + 1e-30


@pytest.mark.parametrize("backend", TILING)
@pytest.mark.parametrize("name", MULTIPLIED)
def test_tiles_multiply_as_the_stored_form(name: str, backend: str) -> None:
    fmt, kernel = formats.get(name), kernels.Kernel(name, backend)
    shapes = [shape for shape in SHAPES if fmt.fits(shape) is None]
    assert shapes
    for shape in shapes:
        w = torch.randn(shape, generator=torch.Generator().manual_seed(shape[0]))
        parts = methods.get("rtn").quantize(w, fmt).parts
        tiles = tiled(kernel, parts, shape)
        assert tiles is not None
        decoded, bias = kernel.decode(parts, shape), torch.randn(shape[0])
        for rows in (1, 2, 7):
            x = torch.randn((rows, shape[1]), generator=torch.Generator().manual_seed(rows))
            error = (tiles.matmul(x, bias).double() - kernel.matmul(x, parts, shape, bias).double()).abs()
            # an offset is multiplied by sums of x, whose terms cancel in the decoded weight: both are larger than it
            offsets = decoded.abs() + decoded.abs().amax(1, keepdim=True) * 4
            assert (error <= _bound(x, offsets, bias)).all(), (shape, rows)


@pytest.mark.parametrize("backend", TILING)
@pytest.mark.parametrize("name", ["q2_k", "q3_k", "q4_k", "q6_k", "iq4_xs", "iq2_xxs", "iq3_xxs", "int4_g32", "int8_channel", "mxfp4"])
def test_tiles_hold_every_code_and_extreme_scales(name: str, backend: str) -> None:
    """Rows of very different magnitudes: scales span the range of their type, and codes all that they can be."""
    fmt, shape = formats.get(name), (48, 512)
    kernel = kernels.Kernel(name, backend)
    w = torch.randn(shape, generator=torch.Generator().manual_seed(3)) * torch.logspace(-6, 3, 48)[:, None]
    parts = methods.get("rtn").quantize(w, fmt).parts
    tiles = tiled(kernel, parts, shape)
    assert tiles is not None
    columns = torch.eye(shape[1])[::37]  # one column at a time: rounding to 8 bits is exact, and so is the sum
    stored, many = kernel.matmul(columns, parts, shape), tiles.matmul(columns)
    one = torch.cat([tiles.matmul(column[None]) for column in columns])
    largest = kernel.decode(parts, shape).abs().amax(1) * 4  # of a product and of an offset, which cancel
    # where an integer scale multiplies the sum of many rows too, the same factors are rounded in another order
    assert torch.equal(many, stored) or (backend == "native-avx2" and name in ("q3_k", "q6_k"))
    for found in (one, many):
        assert ((found - stored).abs() <= 2.0**-22 * largest).all()


@pytest.mark.parametrize("backend", TILING)
@pytest.mark.parametrize("name", [name for name in MULTIPLIED if formats.get(name).levels is not None])
def test_the_largest_products_fit_the_sums(name: str, backend: str) -> None:
    """The outermost levels times 127 of either sign: sums of 16 bits hold that, or overflow on the way by what is owed for a zero. Five
    stripes: four of them abreast and one alone."""
    fmt, kernel, shape = formats.get(name), kernels.Kernel(name, backend), (80, 512)
    assert fmt.levels is not None
    codes, grid = random_weight(fmt, shape)
    for level in (max(fmt.levels), min(fmt.levels)):
        parts = fmt.pack(torch.full_like(codes, fmt.levels.index(level)), grid)
        tiles, decoded = tiled(kernel, parts, shape), kernel.decode(parts, shape)
        assert tiles is not None
        offsets = decoded.abs() + decoded.abs().amax(1, keepdim=True) * 4
        for x in (torch.ones(1, 512), -torch.ones(1, 512), torch.ones(6, 512)):
            error = (tiles.matmul(x).double() - kernel.matmul(x, parts, shape).double()).abs()
            assert (error <= _bound(x, offsets, torch.zeros(80))).all(), (level, x[0, 0])


@pytest.mark.parametrize("threads", [1, 2, 7])
@pytest.mark.parametrize("backend", TILING)
@pytest.mark.parametrize("name", ["q5_k", "iq1_s", "iq2_xs", "iq3_s"])
def test_any_number_of_threads_gives_the_same_bytes(name: str, backend: str, threads: int) -> None:
    shape = (1600, 1024)
    fmt, kernel = formats.get(name), kernels.Kernel(name, backend)
    w = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    parts, x = methods.get("rtn").quantize(w, fmt).parts, torch.randn(1, shape[1], generator=torch.Generator().manual_seed(1))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = tiled(kernel, parts, shape)
        assert alone is not None
        wanted = alone.matmul(x)
        torch.set_num_threads(threads)
        shared = tiled(kernel, parts, shape)
        assert shared is not None
        assert torch.equal(shared.tiles, alone.tiles)
        assert torch.equal(shared.matmul(x), wanted)
    finally:
        torch.set_num_threads(before)


def test_tiles_of_another_shape_are_refused() -> None:
    fmt, kernel = formats.get("q8_0"), kernels.Kernel("q8_0", TILING[0])
    tiles = tiled(kernel, methods.get("rtn").quantize(torch.randn(32, 64), fmt).parts, (32, 64))
    assert tiles is not None
    x, out = torch.randn(1, 96).numpy(), torch.empty(1, 32).numpy()
    with pytest.raises(ValueError, match="no tiles of q8_0"):
        processor.native().matmul_tiles("q8_0", TILING[0].removeprefix("native-"), x, tiles.tiles.numpy(), out, None, 1)
    with pytest.raises(ValueError, match="rows of 64 columns"):
        tiles.matmul(torch.randn(1, 96))
