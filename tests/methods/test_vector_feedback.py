"""Error feedback for codes that stand for vectors: it equals block LDLQ as the textbook has it, and no step raises the error."""

from __future__ import annotations

import functools
import itertools

import pytest
import slow
import torch
from enumerated import one_of
from packed_weights import random_codes
from test_error_feedback import DAMPING, ISAS, inputs, loss, same, weights
from torch import Tensor

from fewbits import formats
from fewbits.formats import Format
from fewbits.formats.storage.codebooks import Points
from fewbits.methods import error_feedback
from fewbits.methods.error_feedback import vectors
from fewbits.methods.error_feedback.columns import Columns

VECTORS = [f for f in formats.all().values() if f.dimension > 1]
every_codebook = pytest.mark.parametrize("fmt", VECTORS, ids=lambda f: f.name)


@functools.cache
def textbook(cols: int, order: str, dimension: int):
    h, blocks = slow.damped(inputs(cols), DAMPING), slow.visiting_order(inputs(cols), 256, order, dimension)
    steps = slow.vector_compensations(h, [column for block in blocks for column in block], dimension)
    return h, blocks, steps, functools.cache(lambda block: slow.vector_compensations(h, list(block), dimension))


def check_twin(fmt: Format, order: error_feedback.Order, most_passes: int) -> None:
    w, h = weights(3, 512), inputs(512)
    twin = slow.VectorFeedback(w, fmt, *textbook(512, order, fmt.dimension), h.diagonal())
    twin.first_pass()
    for passes in range(most_passes + 1):
        if passes:
            twin.improve(refit=passes == 1)
            twin.descend()
        solved = error_feedback.solve(w, fmt, h, damping=DAMPING, order=order, passes=passes, refits=1, dtype=torch.float64)
        assert torch.equal(solved.codes, twin.codes), f"{(solved.codes != twin.codes).sum()} codes differ after {passes} passes"
        grid = twin.grid()
        assert solved.grid.keys() == grid.keys() and all(torch.equal(solved.grid[name], grid[name]) for name in grid)


@every_codebook
def test_it_equals_block_ldlq_as_the_textbook_has_it(fmt: Format) -> None:
    check_twin(fmt, "blocks", most_passes=1)


@pytest.mark.slow
@every_codebook
def test_later_passes_equal_the_textbook(fmt: Format) -> None:
    check_twin(fmt, "blocks", most_passes=2)


@pytest.mark.parametrize("name", ["iq2_xxs", "iq3_s"])
def test_the_natural_order_equals_the_textbook(name: str) -> None:
    check_twin(formats.get(name), "natural", most_passes=0)


@every_codebook
def test_it_beats_rounding_with_the_same_importance(fmt: Format) -> None:
    w, h = weights(16, 512), inputs(512)
    stakes = h.diagonal().float()
    grid = fmt.fit(w, stakes)
    rounded = fmt.decode(fmt.encode(w, grid, stakes), grid)
    first, both = (loss(fmt, w, h, error_feedback.solve(w, fmt, h, passes=passes)) for passes in (0, 2))
    assert both < first
    assert both / float(error_feedback.objective(w, rounded, h).sum()) < 0.45  # 0.26 to 0.34 on inputs as correlated as these


@every_codebook
def test_no_pass_raises_the_error(fmt: Format) -> None:
    g = torch.Generator().manual_seed(3)
    x = torch.randn(600, 512, generator=g, dtype=torch.float64) * torch.randn(512, generator=g, dtype=torch.float64).exp()
    w, h = weights(20, 512, 3), x.T @ x
    losses = []
    for passes in range(3):
        solved = error_feedback.solve(w, fmt, h, damping=0.01, passes=passes, refits=2)
        losses.append(error_feedback.objective(w, fmt.decode(solved.codes, solved.grid), slow.damped(h, 0.01)))
    for before, after in itertools.pairwise(losses):
        assert (after <= before * (1 + 512 * 2**-23)).all()  # float32 decides: sums of 512 products


def tile(fmt: Format, rows: int, seed: int) -> tuple[Columns, Tensor, Tensor]:
    """128 columns with codes, scales, a Hessian's couplings and metrics, as `settle` gives them to a visit: (columns, every, own)."""
    g, d = torch.Generator().manual_seed(seed), fmt.dimension
    x = torch.randn(300, 128, generator=g) * torch.randn(128, generator=g).exp() + torch.randn(300, 1, generator=g)
    h = x.T @ x / 300
    own = torch.stack([h[i : i + d, i : i + d] for i in range(0, 128, d)])
    every = torch.linalg.solve(own, h.reshape(-1, d, 128)).reshape(128, 128)
    for i in range(0, 128, d):
        every[i : i + d, i : i + d] = 0
    w = torch.randn(128, rows, generator=g)
    scale = (w.square().mean().sqrt() / 3 * torch.empty(16, rows).uniform_(0.5, 2, generator=g)).repeat_interleave(8, 0)
    scale[:, 0], scale[:8, 1:2] = 0, 0  # a row, and a vector, of which all was zero
    offset = scale / 8 if fmt.name == "iq1_s" else None
    codes = random_codes(fmt, (rows, 128), seed).T.contiguous()
    columns = Columns(w, torch.zeros_like(w), codes, scale, offset)
    columns.errors.copy_(w - columns.decoded(fmt.codebook))  # type: ignore[arg-type]
    return columns, every, own.flatten(0, 1)


def visited(fmt: Format, isa: str | None, rows: int, keep: bool, size: float = 1.0) -> tuple[Columns, Tensor]:
    columns, every, own = tile(fmt, rows, rows)
    columns.weights.mul_(size)
    targets = torch.addmm(columns.weights, every, columns.errors)
    assert isinstance(fmt.codebook, Points)
    vectors.visit(columns, targets, every, own, fmt.codebook, keep=keep, isa=isa)
    return columns, own


@pytest.mark.parametrize("isa", ISAS)
@every_codebook
def test_a_visit_has_the_bits_of_torchs(fmt: Format, isa: str) -> None:
    for rows, keep, size in ((1, True, 1.0), (17, False, 1.0), (37, True, 1.0), (5, False, 1e25), (5, True, 1e-10)):
        ours, theirs = (visited(fmt, each, rows, keep, size)[0] for each in (isa, None))
        assert torch.equal(ours.codes, theirs.codes)
        assert torch.equal(ours.errors.view(torch.int32), theirs.errors.view(torch.int32))


@every_codebook
def test_no_visit_that_keeps_raises_the_error(fmt: Format) -> None:
    """Vector after vector, given all others: the error of the whole row under the Hessian that couplings and metrics come from."""
    columns, every, own = tile(fmt, 9, 5)
    h = torch.zeros(128, 128, dtype=torch.float64)
    d = fmt.dimension
    for i in range(0, 128, d):
        inside = own[i : i + d].double()
        h[i : i + d] = inside @ every[i : i + d].double()
        h[i : i + d, i : i + d] = inside

    def whole() -> Tensor:
        errors = columns.errors.double()
        return ((h @ errors) * errors).sum(0)

    for _ in range(2):
        for i in range(0, 128, d):
            before, codes = whole(), columns.codes[i // d].clone()
            some = slice(i, i + d)
            targets = torch.addmm(columns.weights[some], every[some], columns.errors)
            assert isinstance(fmt.codebook, Points)
            vectors.visit(columns[some], targets, torch.zeros(d, d), own[some], fmt.codebook, keep=True, isa=None)
            assert (whole() <= before * (1 + 1e-5)).all()
            unchanged = columns.codes[i // d] == codes
            assert torch.equal(whole()[unchanged], before[unchanged])


@pytest.mark.skipif(not ISAS, reason="no native module")
@pytest.mark.parametrize("fmt", one_of(sorted(VECTORS, key=lambda f: f.name not in ("iq1_s", "iq2_xxs", "iq3_s")), stay=3))
def test_every_native_loop_gives_the_same_codes(fmt: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    w, h = weights(19, 512), inputs(512)
    w[5], w[6, ::2], w[7] = 0, -0.0, w[7] * 1e-10
    solutions = []
    for isa in (*ISAS, "reference"):
        monkeypatch.setenv("FEWBITS_KERNEL", isa)
        solutions.append(error_feedback.solve(w, fmt, h, passes=1))
    assert all(same(other, solutions[0]) for other in solutions)
