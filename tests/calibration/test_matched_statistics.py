"""Statistics of a checkpoint that follow its rows into a file laid out for llama.cpp."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fewbits.calibration.matched import _in_columns, _joined, _turned
from fewbits.calibration.recorders import Gradients, Site
from fewbits.calibration.statistics import WeightStatistics
from fewbits.model.matching import Match
from fewbits.model.weights import Weight

COLS = 12


def inputs(seed: int = 0) -> Tensor:
    return torch.randn(6, 9, COLS, generator=torch.Generator().manual_seed(seed)) * torch.linspace(0.2, 3, COLS)


def recorded(x: Tensor, gradient: Tensor) -> WeightStatistics:
    """As the recorders see a weight that reads x and whose output has this gradient; three samples in each half."""
    site = Site(["w"], COLS, True)
    gradients = Gradients.of(Weight("w", (gradient.shape[-1], COLS), "mlp", "fp32"), True)
    for half in (0, 1):
        site.add(x[3 * half : 3 * half + 3], half)
        gradients.add(x[3 * half : 3 * half + 3], gradient[3 * half : 3 * half + 3], half)
    return WeightStatistics(site.finished(), **vars(gradients))


def gradient(rows: int, seed: int) -> Tensor:
    return torch.randn(6, 9, rows, generator=torch.Generator().manual_seed(seed)) * torch.linspace(0.1, 2, rows)


def match(sources: int, source: list[int], rows: list[int], columns: list[int] | None = None, transposed: bool = False) -> Match:
    order = None if columns is None else np.array(columns, np.int64)
    return Match(tuple("abc"[:sources]), np.array(source, np.int32), np.array(rows, np.int64), order, transposed)


def test_rows_of_several_weights_get_what_one_fused_matrix_would_have_been_given() -> None:
    x, first, second = inputs(), gradient(8, 1), gradient(4, 2)
    joined = _joined([recorded(x, first), recorded(x, second)], match(2, [0] * 8 + [1] * 4, [*range(8), *range(4)]))
    fused = recorded(x, torch.cat([first, second], -1))
    assert joined.gradient_square is not None and fused.gradient_square is not None
    rounding = {"rtol": 8 * torch.finfo(torch.float32).eps, "atol": 0.0}  # norms are taken in float32 before they are summed
    torch.testing.assert_close(joined.gradient_square, fused.gradient_square, **rounding)
    torch.testing.assert_close(joined.sensitivity, fused.sensitivity, **rounding)
    torch.testing.assert_close(joined.fisher_square, fused.fisher_square, **rounding)
    assert isinstance(fused.fisher, Tensor)
    most = 27 * torch.finfo(torch.float32).eps * float(fused.fisher.abs().max())  # of sums over 27 tokens of a half
    torch.testing.assert_close(joined.fisher, fused.fisher, rtol=0, atol=most)
    error = torch.randn(12, COLS, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(joined.row_damage(error), fused.row_damage(error))


def test_the_damage_of_a_row_follows_it() -> None:
    known = recorded(inputs(), gradient(8, 1))
    order = [5, 0, 7, 2]
    error = torch.randn(8, COLS, generator=torch.Generator().manual_seed(3))
    moved = _joined([known], match(1, [0] * 4, order))
    torch.testing.assert_close(moved.row_damage(error[order]), known.row_damage(error)[order])


def test_columns_in_another_order_bring_their_moments() -> None:
    known = recorded(inputs(), gradient(8, 1))
    order = torch.randperm(COLS, generator=torch.Generator().manual_seed(4))
    there = match(1, [0] * 8, list(range(8)), order.tolist())
    moved = _in_columns(_joined([known], there), there)
    error = torch.randn(8, COLS, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(moved.row_damage(error[:, order]), known.row_damage(error))
    torch.testing.assert_close(moved.hessian(), known.hessian()[order][:, order])
    torch.testing.assert_close(moved.importance(), known.importance()[order])
    assert moved.input is not None and known.input is not None
    torch.testing.assert_close(moved.input.second_moment(0), known.input.second_moment(0)[order][:, order])
    assert torch.equal(moved.input.firsts(), known.input.firsts()[:, order])


def test_a_transposed_part_costs_what_the_weight_costs_where_inputs_are_independent() -> None:
    """With one input channel at a time the second moments are a diagonal, and the two sides of the product know the same damage."""
    x = torch.zeros(6, 9, COLS)
    for token in range(54):
        x.view(54, COLS)[token, token % COLS] = 1 + token % 5
    known, rows = recorded(x, gradient(8, 1)), [6, 2, 3]
    turned = _turned([known], match(1, [0] * 3, rows, transposed=True))
    error = torch.randn(3, COLS, generator=torch.Generator().manual_seed(3))
    whole = torch.zeros(8, COLS)
    whole[rows] = error
    assert turned.predicts_kl and turned.has_hessian
    torch.testing.assert_close(turned.row_damage(error.T).sum(), known.row_damage(whole).sum(), rtol=1e-5, atol=0)
