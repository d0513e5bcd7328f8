"""Rows that make up for each other's errors: against the formula, against one-sided feedback, and on samples that were not fitted to."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from fewbits import formats
from fewbits.calibration import output_moments
from fewbits.methods import error_feedback
from fewbits.methods.error_feedback import outputs


def moment(size: int, tokens: int, seed: int, rank: int = 12) -> Tensor:
    """Of gradients that a few directions have in common."""
    generator = torch.Generator().manual_seed(seed)
    directions = torch.randn(rank, size, generator=torch.Generator().manual_seed(99))
    x = torch.randn(tokens, rank, generator=generator) @ directions + 0.5 * torch.randn(tokens, size, generator=generator)
    return x.T @ x / tokens


def cost(fmt: formats.Format, w: Tensor, g: Tensor, h: Tensor, solved: error_feedback.Solved) -> float:
    error = (w - fmt.decode(solved.codes, solved.grid)).double()
    return float((g.double() @ (error @ h.double()) * error).sum())


@pytest.mark.parametrize("name", ["q4_0", "q4_k", "iq2_xxs", "int4_g128_asym", "int8_tensor", "nvfp4", "q6_k"])
def test_feedback_on_both_sides_costs_less_than_on_one(name: str) -> None:
    fmt, rows, cols = formats.get(name), 96, 256
    w = torch.randn(rows, cols, generator=torch.Generator().manual_seed(1)) * 0.02
    g, h = moment(rows, 4096, 2), moment(cols, 4096, 3, 40)
    one = error_feedback.solve(w, fmt, h)
    both = error_feedback.solve_both_sides(w, fmt, h, outputs.coupled(g, w.square().mean(1), 0.01))
    assert both.codes.shape == one.codes.shape
    assert {key: entry.shape for key, entry in both.grid.items()} == {key: entry.shape for key, entry in one.grid.items()}
    assert cost(fmt, w, g, h, both) < 0.8 * cost(fmt, w, g, h, one)


def test_rows_that_have_nothing_in_common_get_the_bytes_of_one_sided_feedback() -> None:
    fmt = formats.get("q4_k")
    w = torch.randn(40, 256, generator=torch.Generator().manual_seed(1))
    h = moment(256, 1024, 3)
    alone = outputs.coupled(torch.rand(40, generator=torch.Generator().manual_seed(2)).diag(), torch.ones(40), 0.01)
    one, both = error_feedback.solve(w, fmt, h), error_feedback.solve_both_sides(w, fmt, h, alone)
    assert torch.equal(one.codes, both.codes)
    assert all(torch.equal(one.grid[key], both.grid[key]) for key in one.grid)


def test_each_row_is_rounded_to_its_best_values_given_the_rows_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the definition: with earlier errors fixed and later rows free, the best real value of a row minimises tr(G E E^T)."""
    monkeypatch.setattr(outputs, "GROUP", 1)
    n, done = 6, 3
    g = moment(n, 500, 5, 3).double()
    g = (g + g.T) / 2
    (chain,) = outputs.coupled(g, torch.ones(n), 0.0).chains
    errors = torch.randn(n, 1, generator=torch.Generator().manual_seed(4)).double()
    g = g[chain.rows][:, chain.rows]
    free = torch.linalg.solve(g[done:, done:], -g[done:, :done] @ errors[:done])  # the errors that the rows after would best have
    # the target is the value at which the row's error is that best one: weight + coupling @ errors = weight - error
    assert torch.allclose(chain.coupling[done, :done] @ errors[:done], -free[0], rtol=1e-9)


def test_what_a_coupling_leaves_on_its_own_samples_is_its_pivots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outputs, "GROUP", 1)
    g = moment(20, 500, 5).double()
    (chain,) = outputs.coupled(g, torch.ones(20), 0.0).chains
    ordered = g[chain.rows][:, chain.rows]
    later = [torch.linalg.det(ordered[k:, k:]) for k in range(20)] + [torch.tensor(1.0, dtype=torch.float64)]
    pivots = torch.stack([a / b for a, b in pairwise(later)])
    assert torch.allclose(chain.held_out(g), pivots, rtol=1e-6)


def test_the_held_out_cost_is_that_of_rounding() -> None:
    """What `held_out` says before anything is rounded, against codes fitted to one half and judged on the other."""
    fmt, rows, cols = formats.get("q4_0"), 128, 256
    w = torch.randn(rows, cols, generator=torch.Generator().manual_seed(1))
    fitted, other, h = moment(rows, 2000, 2), moment(rows, 2000, 7), torch.eye(cols)
    coupled = outputs.coupled(fitted, w.square().mean(1), 0.03)
    foretold = coupled.held_out(other, 1)
    one = error_feedback.solve(w, fmt, h)
    misses = error_feedback.objective(w, fmt.decode(one.codes, one.grid), h)  # as large as those of targets with the same spread
    both = error_feedback.solve_both_sides(w, fmt, h, coupled)
    assert cost(fmt, w, other, h, both) == pytest.approx(float(foretold.double() @ misses), rel=0.1)


def test_damping_is_chosen_on_the_other_half_and_noise_is_left_alone() -> None:
    rows = 128
    shared = torch.stack([moment(rows, 2000, 1), moment(rows, 2000, 2)])
    assert outputs.choose_damping(*shared, torch.ones(rows)) in outputs.DAMPINGS
    generator = torch.Generator().manual_seed(0)
    noise = [torch.randn(16, rows, generator=generator) for _ in range(2)]  # fewer tokens than rows, and nothing in common
    assert outputs.choose_damping(*(x.T @ x for x in noise), torch.ones(rows)) is None


def _evened(gradient: Tensor) -> Tensor:
    """Tokens count by the size of their gradient, not by its square."""
    return gradient / gradient.norm(dim=1, keepdim=True).sqrt()


def test_moments_are_read_in_squares_whatever_counts_in_them() -> None:
    gradient = torch.randn(30, 10, generator=torch.Generator().manual_seed(0))
    gradient[3], gradient[7] = 100 * gradient[3], 0
    sums = torch.zeros(10, 10)
    output_moments.add(sums, gradient, gradient.norm(dim=1))
    square = gradient.square().sum(0)
    assert sums.isfinite().all() and sums.trace() < 0.1 * square.sum()
    assert torch.allclose(output_moments.in_squares(sums, square).trace(), square.sum())
    alike = gradient[:1].expand(5, 10)  # where all tokens have one size it is the plain sum
    sums = torch.zeros(10, 10)
    output_moments.add(sums, alike, alike.norm(dim=1))
    assert torch.allclose(output_moments.in_squares(sums, alike.square().sum(0)), alike.T @ alike, rtol=1e-5)
    assert not output_moments.in_squares(torch.zeros(10, 10), torch.zeros(10)).any()


def test_moments_are_sums_within_blocks_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_moments, "MOST", 4)
    gradient = torch.randn(30, 10, generator=torch.Generator().manual_seed(0))
    sums = torch.zeros(10, output_moments.size_of(10))
    output_moments.add(sums, gradient[:20], gradient[:20].norm(dim=1))
    output_moments.add(sums, gradient[20:], gradient[20:].norm(dim=1))
    assert output_moments.size_of(10) == 4
    gradient = _evened(gradient)
    whole, start = gradient.T @ gradient, 0
    for block in output_moments.blocks(sums):
        here = slice(start, start + len(block))
        assert torch.allclose(block, whole[here, here], atol=1e-5)
        start += len(block)
    assert start == 10


def test_rearranged_moments_are_those_of_the_rearranged_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_moments, "MOST", 8)
    generator = torch.Generator().manual_seed(0)
    parts, wholes = [], []
    for rows in (8, 12):
        gradient = torch.randn(50, rows, generator=generator)
        sums = torch.zeros(2, rows, output_moments.size_of(rows))
        output_moments.add(sums[0], gradient, gradient.norm(dim=1))
        parts.append(sums)
        block = torch.arange(rows) // sums.shape[2]
        gradient = _evened(gradient)
        wholes.append((gradient.T @ gradient) * (block.unsqueeze(1) == block))
    source = torch.cat([torch.zeros(8, dtype=torch.int64), torch.ones(12, dtype=torch.int64)])
    rows = torch.cat([torch.randperm(8, generator=generator), torch.randperm(12, generator=generator)])
    joined = output_moments.rearranged(parts, source, rows)
    assert joined is not None
    expected = torch.block_diag(*wholes)
    at = source * 8 + rows
    expected = expected[at][:, at]
    start = 0
    for block in output_moments.blocks(joined[0]):
        here = slice(start, start + len(block))
        assert torch.allclose(block, expected[here, here])
        start += len(block)
    assert output_moments.rearranged([parts[0], None], source, rows) is None


def test_rescaled_moments_are_those_of_rescaled_gradients() -> None:
    gradient, factors = torch.randn(20, 6, generator=torch.Generator().manual_seed(0)), torch.rand(6) + 0.5
    plain = torch.zeros(2, 6, 6)
    output_moments.add(plain[0], gradient, gradient.norm(dim=1))
    divided = _evened(gradient) / factors  # tokens keep the weight that they had
    assert torch.allclose(output_moments.rescaled(plain, factors)[0], divided.T @ divided, rtol=1e-5)
