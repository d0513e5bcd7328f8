"""Native kernels of codebook formats: every point with every sign under every scale, and the points themselves, which come from Python."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from packed_weights import JUDGED, bits, needs_ggml, over, random_bytes, random_codes

from fewbits import formats, kernels
from fewbits.benchmarks.peers import ggml
from fewbits.devices import processor
from fewbits.formats import Format
from fewbits.formats.storage.codebooks import Points
from fewbits.formats.storage.grids import NAMES, grid
from fewbits.kernels import Kernel
from fewbits.kernels.tiles import tiled

if TYPE_CHECKING:
    from fewbits.formats import Parts

NATIVE = [kernel for name in NAMES for kernel in kernels.available(formats.get(name)) if kernel.backend != "reference"]
TILING = [kernel for kernel in NATIVE if kernel.backend in ("native-avx512", "native-avxvnni", "native-avx2")]
COLUMNS = 1024


def everything(fmt: Format) -> tuple[Parts, int]:
    """A weight in which each point is there with all kinds of signs, and each scale."""
    book = fmt.codebook
    assert isinstance(book, Points)
    first = random_codes(fmt, (4, COLUMNS))
    below = book.points * book.index_bits
    rows = (1 << book.index_bits) * fmt.dimension // COLUMNS + 1
    codes = random_codes(fmt, (8 * rows, COLUMNS), 1)
    every = torch.arange(codes.numel(), dtype=torch.int32).reshape(codes.shape) % (1 << book.index_bits)
    again = every if book.points == 1 else every | every.flip(0) << book.index_bits
    codes = torch.cat([first, codes >> below << below | again])
    rows = len(codes)
    made = fmt.unpack(random_bytes(fmt, (rows, COLUMNS)))[1]
    largest = fmt.unpack({"blocks": torch.full((1, fmt.parts((1, 256))["blocks"].shape[1]), 255, dtype=torch.uint8)})[1]["sub"].max()
    sub = (2 * torch.arange(made["sub"].numel()) + 1) % (int(largest) + 1)
    made["sub"] = sub.reshape(made["sub"].shape).to(torch.int8)
    return fmt.pack(codes, made), rows


@needs_ggml
@over(NATIVE)
def test_every_point_sign_and_scale_decodes_as_ggml_decodes_it(kernel: Kernel) -> None:
    fmt = formats.get(kernel.format)
    parts, rows = everything(fmt)
    theirs = ggml.dequantize(JUDGED[kernel.format], parts["blocks"].numpy(), rows * COLUMNS)
    assert torch.equal(bits(kernel.decode(parts, (rows, COLUMNS)).flatten()), bits(torch.from_numpy(theirs)))


@over(TILING)
def test_tiles_hold_every_point_sign_and_scale_in_the_bytes_of_the_stored_form(kernel: Kernel) -> None:
    fmt = formats.get(kernel.format)
    parts, rows = everything(fmt)
    tiles = tiled(kernel, parts, (rows, COLUMNS))
    if tiles is None:
        pytest.skip("this processor permutes no bytes (VBMI)")
    assert tiles.tiles.numel() == -(-rows // 16) * 16 * parts["blocks"].shape[1]
    columns = torch.eye(COLUMNS)  # one column at a time: rounding to 8 bits gives 127 / 127
    stored = kernel.matmul(columns, parts, (rows, COLUMNS))
    assert torch.equal(tiles.matmul(columns), stored)
    one = torch.cat([tiles.matmul(column[None]) for column in columns[::41]])
    largest = kernel.decode(parts, (rows, COLUMNS)).abs().amax(1)
    assert ((one - stored[::41]).abs() <= 2.0**-22 * largest).all()  # integers are exact: two roundings, of the scales and the product


@over(NATIVE)
def test_the_largest_weights_and_activations_overflow_no_sum(kernel: Kernel) -> None:
    """All vectors of a weight are the largest, and so is x: on AVX2, sums of 16 bits are nearly full."""
    fmt, rows = formats.get(kernel.format), 5
    points = grid(kernel.format)
    corner = int(points.unflatten(1, (-1, 2)).sum(-1).amax(1).argmax())  # pairs of products are added in 16 bits
    book = fmt.codebook
    assert isinstance(book, Points)
    code = sum(corner << i * book.index_bits for i in range(book.points))
    codes = torch.full((rows, COLUMNS // fmt.dimension), code, dtype=torch.int32)
    made = fmt.unpack(random_bytes(fmt, (rows, COLUMNS)))[1]
    made["d"] = torch.full_like(made["d"], 0.5)
    parts = fmt.pack(codes, made)
    w = kernel.decode(parts, (rows, COLUMNS)).double()
    tiles = tiled(kernel, parts, (rows, COLUMNS))
    for sign in (1.0, -1.0):
        for tokens in (1, 3):
            x = torch.full((tokens, COLUMNS), sign)
            expected = x.double() @ w.T
            # int8 holds 1 as 127 / 127, rounded; then a product and a sum for each 16 columns of bytes and
            # zeros, which are at most three times the largest weight above a weight itself
            size = w.abs() + 3 * w.abs().amax(1, keepdim=True)
            bound = (2 * COLUMNS / 16 + 4) * 2.0**-23 * (x.abs().double() @ size.T)
            for made in (kernel.matmul(x, parts, (rows, COLUMNS)), *([tiles.matmul(x)] if tiles else [])):
                assert bool(((made.double() - expected).abs() <= bound).all())


def test_without_its_points_no_weight_is_read() -> None:
    """In a process of its own: here they were given long ago."""
    program = """
import numpy as np
from fewbits import _native
blocks, out, x = np.zeros((1, 66), np.uint8), np.zeros((1, 256), np.float32), np.zeros((1, 256), np.float32)
for call in (
    lambda: _native.decode("iq2_xxs", "scalar", [blocks], out, 1),
    lambda: _native.matmul("iq2_xxs", "scalar", x, [blocks], np.zeros((1, 1), np.float32), None, 1),
    lambda: _native.matmul_exact("iq2_xxs", "scalar", x, [blocks], np.zeros((1, 1), np.float32), None, 1),
    lambda: _native.tiled_size("iq2_xxs", "scalar", 1, 256),
):
    try:
        call()
    except ValueError as error:
        print(error)
"""
    said = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    assert said.splitlines() == ["the grid of iq2_xxs was not given"] * 4


def test_points_of_another_shape_or_size_are_refused() -> None:
    native = processor.native()
    with pytest.raises(ValueError, match="needs 256 x 8"):
        native.give_grid("iq2_xxs", np.ones((256, 4), np.int8))
    with pytest.raises(ValueError, match="q4_k has no codebook"):
        native.give_grid("q4_k", np.ones((256, 4), np.int8))
    program = """
import numpy as np
from fewbits import _native
for grid in (np.full((256, 8), 65, np.int8), np.arange(2048).reshape(256, 8).astype(np.int8) % 5):
    try:
        _native.give_grid("iq2_xxs", grid)
    except ValueError as error:
        print(error)
"""
    said = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    assert said.splitlines() == ["a value beyond those of iq2_xxs", "too many values in the grid of iq2_xxs"]


def test_importing_the_kernels_loads_no_points() -> None:
    program = "import sys; from fewbits import formats, kernels; kernels.bind(formats.get('iq2_s'), (1, 256)); print('gguf' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.strip() == "False"
