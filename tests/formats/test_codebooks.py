"""Codes that stand for vectors: every code is stored as GGUF stores it, and the nearest point is really the nearest."""

from __future__ import annotations

import itertools

import gguf
import numpy as np
import pytest
import slow
import torch
from packed_weights import random_codes
from test_gguf_formats import judged, needs_ggml
from torch import Tensor

from fewbits import formats
from fewbits.devices import processor
from fewbits.formats import Format
from fewbits.formats.blocks.vectors import Vectors
from fewbits.formats.storage.codebooks import Points

VECTORS = [f for f in formats.all().values() if isinstance(f, Vectors)]
ISAS = [] if processor.native_missing() else list(processor.native().search_isas())
every_codebook = pytest.mark.parametrize("fmt", VECTORS, ids=lambda f: f.name)


def book(fmt: Format) -> Points:
    assert isinstance(fmt.codebook, Points)
    return fmt.codebook


def every_code(fmt: Format) -> Tensor:
    """(rows, 256 / dimension): each point with all signs or shifts that it may have; of two points in a code, each with another."""
    count, bits, _, above = slow.VECTOR_CODES[fmt.name]
    points = torch.arange(1 << bits)
    rest = torch.tensor([sum((sign < 0) << i for i, sign in enumerate(signs)) for signs in slow.allowed_signs(fmt.name)])
    rest = torch.arange(2) if above == "a shift" else rest
    numbers = points if count == 1 else points | points.flip(0) << bits
    codes = (numbers.unsqueeze(1) | rest << bits * count).flatten()
    return torch.cat([codes, codes[: -len(codes) % (256 // fmt.dimension)]]).reshape(-1, 256 // fmt.dimension).int()


def grids(fmt: Format, rows: int) -> dict[str, Tensor]:
    """Every integer, every shift, and scales over all of float16."""
    assert isinstance(fmt, Vectors) and fmt.group
    source = torch.Generator().manual_seed(0)
    groups = 256 // fmt.group
    sub = torch.arange(rows * groups).reshape(rows, groups) % ((fmt.largest + 1) // 2) * 2 + 1
    d = torch.randint(0, 0x7C00, (rows, 1), generator=source).to(torch.int16).view(torch.float16)
    d[::3] *= -1
    shift = torch.randint(0, 2, (rows, groups), generator=source) * 2 - 1
    return {"sub": sub.to(torch.int8)} | ({"shift": shift.to(torch.int8)} if fmt.group_shift else {}) | {"d": d}


@needs_ggml
@every_codebook
def test_every_code_and_every_scale_decodes_as_in_gguf_and_ggml(fmt: Format) -> None:
    codes = every_code(fmt)
    grid = grids(fmt, len(codes))
    assert isinstance(fmt, Vectors)
    assert grid["sub"].unique().tolist() == list(range(1, fmt.largest + 1, 2))
    said = fmt.decode(codes, grid)
    blocks = fmt.pack(codes, grid)["blocks"]
    assert torch.equal(judged(fmt, blocks.numpy()).reshape(said.shape), said)
    assert torch.equal(torch.from_numpy(gguf.quants.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[fmt.name.upper()])), said)
    back, back_grid = fmt.unpack({"blocks": blocks})
    assert torch.equal(back, codes) and back.dtype == torch.int32
    assert all(torch.equal(back_grid[name], entry) for name, entry in grid.items())


@every_codebook
def test_any_codes_survive_packing_wherever_they_lie(fmt: Format) -> None:
    codes = random_codes(fmt, (37, 768))
    grid = {name: entry.reshape(37, -1) for name, entry in grids(fmt, 37 * 3).items()}
    back, back_grid = fmt.unpack(fmt.pack(codes, grid))
    assert torch.equal(back, codes)
    assert all(torch.equal(back_grid[name], entry) for name, entry in grid.items())


@every_codebook
def test_values_are_those_of_the_slow_twin(fmt: Format) -> None:
    codes = random_codes(fmt, (5, 512))
    assert torch.equal(book(fmt).values(codes), slow.vector_values(codes, fmt.name))


def some_vectors(fmt: Format, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Gaussian ones of the codebook's own size, with weights that differ a hundredfold: (1, count * dimension) and (count * dimension,)."""
    made = torch.Generator().manual_seed(seed)
    n = count * fmt.dimension
    spread = book(fmt).table.grid.square().mean().sqrt()
    return spread * torch.randn(1, n, generator=made), (1.2 * torch.randn(n, generator=made)).exp()


def costs(x: Tensor, values: Tensor, weight: Tensor, dimension: int) -> Tensor:
    return ((x - values).double().square() * weight).reshape(-1, dimension).sum(1)


@every_codebook
def test_the_point_found_is_the_cheapest_of_all(fmt: Format) -> None:
    """Of all points under the signs of the weights; a sign that parity forbids is put right where that costs least."""
    x, weight = some_vectors(fmt, 300, 1)
    codes = book(fmt).nearest(x, weight)
    found = costs(x, book(fmt).values(codes), weight, fmt.dimension)
    signed = "signs" in slow.VECTOR_CODES[fmt.name][3]
    for vector, one, own in zip(x.reshape(300, -1), weight.reshape(300, -1), found.tolist(), strict=True):
        signs = slow.greedy_signs(vector, one, fmt.name) if signed else (1,) * fmt.dimension
        # sums of eight float32 squares decide, each with a relative error of 2^-22: two within it of each other are equally good
        assert own <= slow.least_cost(vector, one, fmt.name, [signs]) * (1 + 2**-21)
    if signed:
        negative = (book(fmt).values(codes).reshape(300, -1) < 0).sum(1)
        assert (negative % 2 == 0).all() or book(fmt).signs == "free"


@every_codebook
def test_signs_are_chosen_nearly_as_well_as_by_trying_all(fmt: Format) -> None:
    """With free signs nothing is lost. Where they must be even, the wrong sign is chosen before the points: what that costs on average."""
    count = 60 if slow.VECTOR_CODES[fmt.name][3] == "signs" else 120
    x, weight = some_vectors(fmt, count, 2)
    found = costs(x, book(fmt).values(book(fmt).nearest(x, weight)), weight, fmt.dimension)
    signs = slow.allowed_signs(fmt.name)
    best = [slow.least_cost(*pair, fmt.name, signs) for pair in zip(x.reshape(count, -1), weight.reshape(count, -1), strict=True)]
    excess = float(found.sum()) / sum(best)
    assert excess <= (1.01 if book(fmt).signs == "even" else 1 + 2**-21)  # 0.16 % for iq2_xxs, 0.27 % for iq2_xs, 0.72 % for iq3_xxs


@every_codebook
def test_what_no_scale_reaches_gets_the_largest_values_of_its_sign(fmt: Format) -> None:
    """Beyond float16's largest scale, and in infinite weights: costs must not overflow, or any code would be as good."""
    made = torch.Generator().manual_seed(3)
    signs = torch.where(torch.rand(40, 256, generator=made) < 0.5, -1.0, 1.0)
    near = book(fmt).values(book(fmt).nearest(signs * 500))
    for size in (1e6, 1e20, 1e38, torch.inf):
        far = book(fmt).values(book(fmt).nearest(signs * size))
        assert torch.equal((far * signs).sign(), (near * signs).sign())
        assert (far * signs).mean() >= 0.999 * (near * signs).mean()


@every_codebook
def test_columns_without_importance_get_the_codes_nearest_to_them(fmt: Format) -> None:
    w = torch.randn(4, 512, generator=torch.Generator().manual_seed(4))
    importance = (torch.arange(512) >= 256).float()
    grid, nothing = fmt.fit(w), torch.zeros(512)
    assert torch.equal(fmt.encode(w, grid, importance), fmt.encode(w, grid))
    assert torch.equal(fmt.encode(w, grid, nothing), fmt.encode(w, grid))
    assert all(same_bits(entry, grid[name]) for name, entry in fmt.fit(w, nothing).items())


# --- native code against torch


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and np.array_equal(a.numpy().view(np.uint8), b.numpy().view(np.uint8))


def odd_rows(cols: int) -> Tensor:
    """37 rows, more than two registers, of every size: what float16 scales can say, and what they cannot."""
    made = torch.Generator().manual_seed(8)
    w = torch.randn(37, cols, generator=made)
    w[0] *= 1e-10
    w[1:12] *= 10 ** torch.empty(11, 1).uniform_(-44, 37, generator=made)
    w[12:20] *= 2.0**-24 * torch.empty(8, 1).uniform_(0, 300, generator=made)  # scales about the smallest float16
    w[20], w[21], w[22], w[22, 3] = 0.0, -0.0, 0.0, -2.5
    w[23, :32], w[23, 40], w[24, 77], w[25, 5] = 0.0, torch.inf, 3e4, -torch.inf
    w[26:28] = w[26:28].round()  # ties
    w[28], w[29] = 0.37, -65504.0 * 200
    return w


def wide_importance(cols: int) -> Tensor:
    made = torch.Generator().manual_seed(5)
    importance = torch.rand(cols, generator=made) * 10 ** torch.empty(cols).uniform_(-6, 3, generator=made)
    importance[torch.rand(cols, generator=made) < 0.3] = 0
    return importance


@pytest.mark.skipif(not ISAS, reason="there is no native module")
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@every_codebook
def test_scales_and_codes_have_the_bits_that_torch_finds(fmt: Format, weighted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    w, importance = odd_rows(256), wide_importance(256) if weighted else None

    def found(kernel: str, rows: slice) -> list[Tensor]:
        monkeypatch.setenv("FEWBITS_KERNEL", kernel)
        grid = fmt.fit(w[rows], importance)
        return [*grid.values(), fmt.encode(w[rows], grid, importance)]

    theirs = found("reference", slice(None))
    for isa, rows in itertools.product(ISAS, (slice(0, 1), slice(20, 37), slice(None))):  # one row, 17 and 37
        assert all(same_bits(ours, of_torch[rows]) for ours, of_torch in zip(found(isa, rows), theirs, strict=True)), (isa, rows)


@every_codebook
def test_what_is_not_a_number_spoils_its_block_only(fmt: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    w = torch.randn(3, 512, generator=torch.Generator().manual_seed(6))
    clean = fmt.decode(fmt.encode(w, fmt.fit(w)), fmt.fit(w))
    w[1, 5] = torch.nan
    found = []
    for kernel in (ISAS[0] if ISAS else "reference", "reference"):
        monkeypatch.setenv("FEWBITS_KERNEL", kernel)
        grid = fmt.fit(w)
        found.append(fmt.decode(fmt.encode(w, grid), grid))
    others = torch.ones_like(w, dtype=torch.bool)
    others[1, :256] = False
    assert torch.equal(found[0][others], clean[others])
    assert same_bits(*found)


def test_threads_change_no_code(monkeypatch: pytest.MonkeyPatch) -> None:
    made = torch.Generator().manual_seed(7)
    w, importance = torch.randn(83, 512, generator=made), torch.rand(512, generator=made)
    for fmt in VECTORS:
        grid = fmt.fit(w, importance)
        with monkeypatch.context() as patch:
            patch.setattr(torch, "get_num_threads", lambda: 5)
            again = fmt.fit(w, importance)
            assert all(same_bits(again[name], grid[name]) for name in grid)
            assert torch.equal(
                fmt.encode(w, grid, importance)[40:41], fmt.encode(w[40:41], {k: v[40:41] for k, v in grid.items()}, importance)
            )


@pytest.mark.skipif(not ISAS, reason="there is no native module")
def test_arrays_that_do_not_belong_together_are_refused() -> None:
    native, points = processor.native(), book(formats.get("iq3_s"))
    x, weight, codes = torch.randn(2, 256).numpy(), torch.ones(256).numpy(), torch.zeros(2, 64, dtype=torch.int32).numpy()
    native.nearest_vectors("scalar", points.native, x, weight, codes, None, None, 1)
    narrow = x[:, :254].copy()
    for wrong in (
        ("mmx", x, weight, codes),
        ("scalar", narrow, weight, codes),
        ("scalar", x, weight[:-1], codes),
        ("scalar", x, weight, codes[:1]),
    ):
        with pytest.raises(ValueError):
            native.nearest_vectors(wrong[0], points.native, *wrong[1:], None, None, 1)
    with pytest.raises(ValueError):
        native.VectorBook(8, 0, (), (1.0, 2.0), [0], [0], torch.ones(1, 8).numpy())
