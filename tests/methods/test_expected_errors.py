"""Errors that feedback is expected to leave: the maps from misses to errors are those that feedback itself follows."""

from __future__ import annotations

import pytest
import slow
import torch
from test_error_feedback import DAMPING, inputs, weights
from test_output_feedback import moment
from torch import Tensor

from fewbits import calibration, formats
from fewbits.calibration.folder import Statistics
from fewbits.methods import error_feedback, gptq
from fewbits.methods.error_feedback import outputs
from fewbits.methods.error_feedback.expected import after_feedback
from fewbits.methods.error_feedback.hessian import errors_from
from fewbits.model import Model
from fewbits.progress import silent

FMT = formats.get("int8_channel")  # one scale for a row


def misses_of(errors: Tensor, hessian: Tensor) -> Tensor:
    """By the definition: a column's target is the value that is best given the errors before it, with all later columns free."""
    h = slow.damped(hessian, DAMPING)
    (order,) = slow.visiting_order(hessian, len(h), "columns")
    missed = torch.zeros_like(errors)
    for k, column in enumerate(order):
        free, done = order[k:], order[:k]
        best = torch.linalg.solve(h[free][:, free], -h[free][:, done] @ errors[:, done].T)[0] if done else torch.zeros(len(errors))
        missed[:, column] = errors[:, column] - best
    return missed


def test_columns_that_miss_their_targets_by_rounding_have_the_errors_of_feedback() -> None:
    w, h = weights(5, 48), inputs(48)
    solved = error_feedback.solve(w, FMT, h, damping=DAMPING, order="columns", passes=0, refits=0, dtype=torch.float64)
    errors = w.double() - FMT.decode(solved.codes, solved.grid).double()
    misses = misses_of(errors, h)
    scale, _ = FMT.affine(solved.grid, slice(None))
    half, most = scale.double() / 2 * (1 + 1e-5), max(FMT.levels or ()) * scale
    within = FMT.decode(solved.codes, solved.grid).abs() < 0.99 * most  # a target beyond the largest value is missed by more
    assert within.double().mean() > 0.8
    assert (misses.abs() <= half)[within].all()  # they are rounding errors: else feedback follows another map
    assert (errors.abs() > half)[within].any()  # and the errors are not
    assert torch.allclose(errors_from(misses, h, DAMPING), errors, rtol=1e-9, atol=1e-9 * float(scale.max()))


def test_rows_that_miss_their_targets_have_the_errors_of_feedback_on_both_sides() -> None:
    rows, cols = 80, 48
    w, h = weights(rows, cols), inputs(cols)
    coupled = outputs.coupled(moment(rows, 500, 2), w.square().mean(1), DAMPING)
    solved = error_feedback.solve_both_sides(w, FMT, h, coupled)
    errors = (w - FMT.decode(solved.codes, solved.grid)).double()
    targets = w.double()
    for some, earlier in coupled:
        targets[some] += outputs.correction(earlier, errors).double()
    misses = targets - w.double() + errors
    assert not torch.allclose(misses, errors)
    assert torch.allclose(coupled.errors_from(misses), errors, rtol=1e-6, atol=1e-9)  # corrections are added in float32


@pytest.fixture(scope="module")
def statistics(embedded_model: Model, tmp_path_factory: pytest.TempPathFactory) -> Statistics:
    folder = tmp_path_factory.mktemp("calibrated") / "statistics"
    return calibration.collect(embedded_model, calibration.draw(embedded_model, (), 16, 128, 0), folder, progress=silent)


@pytest.mark.parametrize("name", ["model.layers.1.self_attn.v_proj", "model.layers.2.mlp.down_proj"])
def test_they_fit_one_half_of_the_samples_as_feedback_does(name: str, embedded_model: Model, statistics: Statistics) -> None:
    """Beside plain rounding they do less damage, and more of it on the half that they were not fitted to."""
    fmt, known = formats.get("q4_0"), statistics.of(name)
    w = embedded_model.load(next(weight for weight in embedded_model.weights if weight.name == name))
    plain = w - fmt.decode(*_fitted(w, known))
    shaped = after_feedback(plain, gptq.stakes(w), known)
    on = [known.damage(shaped, w, half) for half in (0, 1)]
    assert on[0] < on[1] < known.damage(plain, w, 1)
    again = after_feedback(plain, gptq.stakes(w), known)
    assert torch.equal(shaped, again)


def _fitted(w: Tensor, known: calibration.statistics.WeightStatistics) -> tuple[Tensor, dict[str, Tensor]]:
    fmt = formats.get("q4_0")
    grid = fmt.fit(w, known.importance())
    return fmt.encode(w, grid, known.importance()), grid


def test_without_second_moments_they_are_those_of_rounding(embedded_model: Model, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("without") / "statistics"
    samples = calibration.draw(embedded_model, (), 4, 64, 0)
    known = calibration.collect(embedded_model, samples, folder, hessians=False, progress=silent)
    weight = embedded_model.weights[3]
    w = embedded_model.load(weight)
    misses = w - formats.get("q4_0").decode(*_fitted(w, known.of(weight.name)))
    assert torch.equal(after_feedback(misses, gptq.stakes(w), known.of(weight.name)), misses)
