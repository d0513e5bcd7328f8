"""The contract every format keeps. A new format is covered the moment its file exists."""

from __future__ import annotations

import itertools
import math
import sys
import textwrap
from pathlib import Path

import pytest
import slow
import torch
from enumerated import each_kind
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fewbits import formats, kernels
from fewbits.errors import InputError
from fewbits.formats import Format
from fewbits.formats.blocks.vectors import Vectors
from fewbits.formats.storage.codebooks import Points
from fewbits.methods import rtn

SHAPES = [(1, 256), (3, 512), (17, 768)]
every_format = pytest.mark.parametrize("fmt", each_kind(formats.all().values()))
quantized = pytest.mark.parametrize("fmt", each_kind(f for f in formats.all().values() if not f.is_cast))
scalar = pytest.mark.parametrize("fmt", each_kind(f for f in formats.all().values() if f.levels))

# What a scale can say, of those that are not float16: relative step of the values it makes, least and largest value.
# mxfp4: powers of two times 1 or 1.5, so 1.25 is off by a fifth. nvfp4: 3 bits of mantissa, from 2^-9 * 0.5 to 448 * 6.
COARSE = {
    "mxfp4": (1 / 5, 0.0, math.inf), "mxfp8": (1 / 16, 0.0, math.inf),
    "nvfp4": (1 / 16, 2**-10, 2688.0), "nvfp4_tensor": (1 / 16, 0.0, math.inf),
}  # fmt: skip


def largest_level(fmt: Format) -> float:
    if fmt.dimension > 1:
        return float(vector_kinds(fmt).abs().max())
    return max(abs(level) for level in fmt.levels or (1.0,) if math.isfinite(level))


def gaussian(shape: tuple[int, int], seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.02


def decoded(fmt: Format, w: Tensor, how: formats.How = "search", importance: Tensor | None = None) -> Tensor:
    return kernels.decode(fmt, rtn.quantize(w, fmt, importance, how), (w.shape[0], w.shape[1]))


def check_parts_are_as_declared(fmt: Format, w: Tensor) -> None:
    parts = rtn.quantize(w, fmt)
    shape = (w.shape[0], w.shape[1])
    assert {k: (str(p.dtype), tuple(p.shape)) for k, p in parts.items()} == {
        k: (f"torch.{s.dtype}", s.shape) for k, s in fmt.parts(shape).items()
    }
    assert fmt.nbytes(shape) == sum(p.nbytes for p in parts.values())


def check_unpack_undoes_pack(fmt: Format, w: Tensor) -> None:
    grid = fmt.fit(w)
    codes = w.to(getattr(torch, fmt.parts((1, 256))["values"].dtype)) if fmt.is_cast else fmt.encode(w, grid)
    assert codes.shape == (w.shape[0], w.shape[1] // fmt.dimension)
    back, back_grid = fmt.unpack(fmt.pack(codes, grid))
    assert torch.equal(back, codes)
    assert back_grid.keys() == grid.keys()
    for name in grid:
        assert torch.equal(back_grid[name], grid[name]), name


def check_values_on_the_grid_survive(fmt: Format, w: Tensor) -> None:
    if fmt.is_cast:
        on_grid = decoded(fmt, w)
        assert torch.equal(decoded(fmt, on_grid), on_grid)
        return
    grid = fmt.fit(w)
    on_grid = fmt.decode(fmt.encode(w, grid), grid)
    assert torch.equal(fmt.decode(fmt.encode(on_grid, grid), grid), on_grid)


CONTRACT = [check_parts_are_as_declared, check_unpack_undoes_pack, check_values_on_the_grid_survive]


@every_format
@pytest.mark.parametrize("check", CONTRACT, ids=lambda c: c.__name__.removeprefix("check_"))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_contract(check, fmt: Format, shape: tuple[int, int]) -> None:
    check(fmt, gaussian(shape))


@every_format
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_contract_on_odd_values(fmt: Format, data: st.DataObject) -> None:
    """A few arbitrary values repeated over a block: constants, zeros, outliers, denormals, both signs."""
    few = data.draw(st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=7))
    w = torch.tensor((few * 512)[:512]).reshape(2, 256)
    for check in CONTRACT:
        check(fmt, w)
    assert decoded(fmt, w).isfinite().all()


@every_format
@pytest.mark.parametrize("value", [0.0, 1.0, -1.0, 1e-7, -3e-5, 6e4])
def test_constant_weights_are_kept(fmt: Format, value: float) -> None:
    w = torch.full((2, 256), value)
    # a code for every value: what is left is the rounding of a float16 (relative 2^-11, or half its smallest step, 2^-25),
    # which levels and sub-scales (up to 63) multiply; bfloat16 alone rounds to 2^-9. float8 has a float32 scale: nothing is left
    kept = decoded(fmt, w)
    if isinstance(fmt, Vectors):
        # d is a multiple of 2^-24, rounded by half of that; sub times as much is missing from a scale, and values up to 1 / 0.6 times
        # the usual one from a weight
        missing = fmt.largest * 2**-25 * usual_value(fmt) / 0.6
        assert (kept - w).square().mean().sqrt() <= abs(value) * math.sqrt(share_lost_by_constants(fmt)) + missing
        return
    if fmt.name in COARSE:
        step, least, largest = COARSE[fmt.name]
        assert (kept - w.clamp(-largest, largest)).abs().max() <= min(abs(value), largest) * step + least / 2
        return
    smallest = 0.0 if fmt.name.startswith("fp8") else 2**-25 * (64 * largest_level(fmt) if fmt.levels else 1)
    assert (kept - w).abs().max() <= abs(value) * 2**-9 + smallest


def vector_kinds(fmt: Format) -> Tensor:
    """What a point may stand for under a scale of 1, without signs: (n, 4 or 8)."""
    book = fmt.codebook
    assert isinstance(book, Points) and isinstance(fmt, Vectors)
    moves = [*book.shifts, fmt.group_shift, -fmt.group_shift]
    return torch.cat([book.table.grid + move for move in dict.fromkeys(moves)])


def usual_value(fmt: Format) -> float:
    """The root mean square of all points: a usual scale makes weights of this size."""
    assert isinstance(fmt.codebook, Points)
    return float(fmt.codebook.table.grid.square().mean().sqrt())


def share_lost_by_constants(fmt: Format) -> float:
    """Of the energy of equal weights, what the search must leave. A codebook has few vectors of equal values, and those of the lowest
    magnitudes lie beyond the scales that are tried, 0.6 to 1.3 times the usual one. The vector in direction p loses sin^2 of the angle, if
    its best scale is among them, and no trial is further from that than half of the step between trials."""
    kinds = vector_kinds(fmt).double()
    trials = 5 if len(kinds.unique()) <= 6 else 7  # as search/vectors.py says: of three levels, shifted or not, and of eight
    along, size = kinds.sum(1), kinds.square().sum(1)
    share, best = 1 - along.square() / size / kinds.shape[1], along / size * usual_value(fmt)  # in units of the usual scale
    missed = (0.7 / (trials - 1) / 2 / best).square()
    return float((share + missed)[(best >= 0.6) & (best <= 1.3)].min()) + 2**-22  # float16 scales: off by 2^-11 at most


@quantized
def test_one_huge_outlier_stays_finite_and_near(fmt: Format) -> None:
    w = gaussian((2, 256))
    w[1, 77] = 3e4
    out = decoded(fmt, w)
    assert out.isfinite().all()
    if fmt.name == "q1_0":  # one magnitude for all: the best is their mean
        assert math.isclose(out[1, 77], w[1, :128].abs().mean(), rel_tol=2**-10)
        return
    if fmt.dimension > 1:  # seven or three neighbours of an outlier cannot be zero, and so it is not kept whole
        assert (out - w)[1].square().sum() <= 1.001 * least_error_of_an_outlier(fmt, w[1:])
        return
    expected = min(3e4, COARSE.get(fmt.name, (0, 0, math.inf))[2])
    assert abs(out[1, 77] - expected) <= expected / 4  # three bits: the top level is at most a quarter away


def least_error_of_an_outlier(fmt: Format, w: Tensor) -> Tensor:
    """By trying 400 scales: the largest integer for the outlier's group, the smallest for all others."""
    assert isinstance(fmt, Vectors) and fmt.group
    sub = torch.ones(400, 256 // fmt.group, dtype=torch.int8)
    sub[:, int(w[0].abs().argmax()) // fmt.group] = fmt.largest
    d = (w.abs().max() / largest_level(fmt) / fmt.largest * torch.linspace(0.2, 2, 400)).unsqueeze(1).half()
    errors = []
    for shift in (1, -1) if fmt.group_shift else (0,):
        grid = {"sub": sub, "d": d} | ({"shift": torch.full_like(sub, shift)} if shift else {})
        errors.append((fmt.decode(fmt.encode(w.expand(400, -1), grid), grid) - w).square().sum(1).min())
    return torch.stack(errors).min()


@quantized
def test_scales_beyond_float16_saturate_instead_of_overflowing(fmt: Format) -> None:
    w = torch.full((1, 256), 3e7)
    assert decoded(fmt, w).isfinite().all()


@quantized
def test_the_search_is_never_worse_than_the_textbook(fmt: Format) -> None:
    for seed, w in enumerate([gaussian((64, 512)), gaussian((64, 512), 1) ** 3]):
        importance = torch.rand(512, generator=torch.Generator().manual_seed(seed)) + 0.01
        for weight in (None, importance):
            weigh = torch.ones(512) if weight is None else weight
            textbook, search = (((decoded(fmt, w, how, weight) - w) ** 2 * weigh).sum().item() for how in ("max", "search"))
            assert search <= textbook


@quantized
def test_importance_moves_the_error_to_where_it_does_not_matter(fmt: Format) -> None:
    w = gaussian((64, 512))
    w[:, 0::2] *= 0.3  # else a scale for the whole weight sees the same 16,384 Gaussians in both halves, and nothing to move
    importance = torch.where(torch.arange(512) % 2 == 0, 100.0, 0.01)
    plain, weighted = ((decoded(fmt, w, "search", i) - w) ** 2 for i in (None, importance))
    if fmt.name == "mxfp8":  # a scale that is a power of two moves a float8 by whole steps of its exponent: there is nothing to choose
        assert weighted[:, 0::2].sum() <= plain[:, 0::2].sum()
        return
    assert weighted[:, 0::2].sum() < plain[:, 0::2].sum()


@scalar
def test_rounding_takes_the_nearest_level(fmt: Format) -> None:
    w = gaussian((2, 256))
    grid = fmt.fit(w)
    scale, offset = fmt.affine(grid)
    codes = fmt.encode(w, grid)
    for c in range(256):
        s, o = scale.expand_as(w)[0, c].item(), 0.0 if offset is None else offset.expand_as(w)[0, c].item()
        twin = slow.encode_one(w[0, c].item(), fmt.levels, s, o)
        x = 0.0 if s == 0 else (w[0, c].item() - o) / s
        distance, twin_distance = abs(fmt.levels[codes[0, c]] - x), abs(fmt.levels[twin] - x)
        assert math.isclose(distance, twin_distance, rel_tol=1e-5, abs_tol=1e-5)


@quantized
def test_decoding_equals_the_slow_twin(fmt: Format) -> None:
    w = gaussian((2, 256))
    parts = rtn.quantize(w, fmt)
    codes, grid = fmt.unpack(parts)
    values = slow.level_values(codes, fmt.levels) if fmt.levels else slow.vector_values(codes, fmt.name)
    assert torch.equal(kernels.decode(fmt, parts, (2, 256)), slow.scaled(values, *fmt.affine(grid)))


@quantized
def test_affine_of_some_columns_is_that_of_all_at_those_columns(fmt: Format) -> None:
    w = gaussian((3, 512))
    grid = fmt.fit(w)
    whole = [None if part is None else part.expand(3, 512) for part in fmt.affine(grid)]
    order = torch.randperm(512, generator=torch.Generator().manual_seed(1))
    for columns in (slice(256, 300), slice(0, 512, fmt.group or 512), order):
        for part, all_columns in zip(fmt.affine(grid, columns), whole, strict=True):
            expected = None if all_columns is None else all_columns[:, columns]
            assert (part is None) == (expected is None)
            if part is not None and expected is not None:
                assert torch.equal(part.expand_as(expected), expected)


def test_more_bits_mean_less_error() -> None:
    """Among formats whose scales reach equally far: one scale for all may lose with 4 bits against one per 32 with 3."""
    w = gaussian((128, 1024))
    errors = {f.name: ((decoded(f, w) - w).norm() / w.norm()).item() for f in formats.all().values()}
    families: dict[tuple[int | None, bool], dict[int, list[float]]] = {}
    for f in formats.all().values():
        if f.levels and all(map(math.isfinite, f.levels)):  # float8 spends its bits on range: test_fp8 compares it
            families.setdefault((f.group, f.tensor_wide), {}).setdefault(len(f.levels), []).append(errors[f.name])
    for family in families.values():
        for (_, larger), (_, smaller) in itertools.pairwise(sorted(family.items())):
            assert min(larger) > max(smaller)
    assert max(errors["fp16"], errors["bf16"]) < min(error for f, error in errors.items() if not formats.get(f).is_cast)
    vectors = [errors[f.name] for f in formats.all().values() if f.dimension > 1]  # by rising bits per weight
    assert len(vectors) == 7 and vectors == sorted(vectors, reverse=True)


def test_shorter_groups_mean_less_error() -> None:
    w = gaussian((128, 1024)) * torch.linspace(0.5, 2, 128).unsqueeze(1)  # rows differ, as a model's do
    for bits, kind in itertools.product((2, 3, 4, 5, 6, 8), ("", "_asym")):
        names = [f"int{bits}_{reach}{kind}" for reach in ("tensor", "channel", "g128", "g64", "g32")]
        errors = [((decoded(formats.get(name), w) - w).norm() / w.norm()).item() for name in names if name in formats.all()]
        assert errors == sorted(errors, reverse=True)


@pytest.mark.parametrize("fmt", [f for f in formats.all().values() if f.tensor_wide], ids=lambda f: f.name)
def test_what_is_fixed_for_the_whole_weight_stays_when_a_block_is_fitted(fmt: Format) -> None:
    w = gaussian((16, 512))
    whole = fmt.fit(w)
    part = fmt.fit(w[:, :128] * 3, fixed=whole)
    wide = [name for name, entry in whole.items() if entry.shape == (1, 1)]
    assert wide and all(torch.equal(part[name], whole[name]) for name in wide)


def test_a_shape_that_does_not_fit_is_refused_with_the_reason() -> None:
    assert formats.get("q4_k").fits((64, 172)) == "172 columns do not divide into q4_k's blocks of 256"
    assert formats.get("fp16").fits((64, 172)) is None


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(InputError, match="did you mean `int4_g32`"):
        formats.get("int4-g32")
    assert formats.get("Q4_K").name == "q4_k"


def test_dropping_a_file_in_is_all_a_format_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Quantizer, reference kernel, benchmark row, command-line name and the contract, with no other edit."""
    (tmp_path / "dropped_in.py").write_text(
        textwrap.dedent("""
        from dataclasses import dataclass
        from fewbits.formats import Format, Spec

        @dataclass(frozen=True, kw_only=True)
        class Ternary(Format):
            def parts(self, shape):
                return {"codes": Spec("uint8", shape), "scales": Spec("float16", (shape[0], shape[1] // 64))}
            def fit(self, w, importance=None, fixed=None, how="search"):
                from fewbits.formats.search import fit_scale, grouped, importance_like
                return {"scales": fit_scale(grouped(w, 64), self.levels, (1.0,), importance_like(w, importance, 64), how).half()}
            def affine(self, grid, columns=slice(None)):
                from fewbits.formats.storage.codes import spread
                return spread(grid["scales"].float(), 64, columns), None
            def pack(self, codes, grid):
                return {"codes": codes, **grid}
            def unpack(self, parts):
                return parts["codes"], {"scales": parts["scales"]}

        FORMATS = [Ternary(name="ternary", about="a test", levels=(-1.0, 0.0, 1.0), group=64, block=64)]
        """)
    )
    from typer.testing import CliRunner

    from fewbits import cli, embedded
    from fewbits.inspection.formats import compare

    monkeypatch.setattr(formats, "__path__", [*formats.__path__, str(tmp_path)])
    formats.all.cache_clear()
    try:
        fmt = formats.get("ternary")
        for check in CONTRACT:
            check(fmt, gaussian((3, 256)))
        assert kernels.bind(fmt, (64, 256)).backend == "reference"
        w = gaussian((64, 256))
        assert 0.1 < ((decoded(fmt, w) - w).norm() / w.norm()).item() < 0.6
        row = compare(embedded.MODEL, weight="layers.0.self_attn", formats=["ternary"]).formats[0]
        assert row.format == "ternary" and row.error and row.gigaweights_per_second > 0
        listed = CliRunner().invoke(cli.app, ["formats", "--json"])
        assert '"ternary"' in listed.stdout
    finally:
        monkeypatch.undo()
        sys.modules.pop("fewbits.formats.dropped_in", None)
        formats.all.cache_clear()
    assert "ternary" not in formats.all()
