"""GPTQ: columns not yet rounded compensate for each rounding error, by the inputs' second moments, and rows not yet rounded by those of
the gradients at the outputs (`methods.error_feedback`).

The Hessian is aware of the attention sink (`WeightStatistics.hessian`). How much of a diagonal to add to it (damping) decides between
fitting these samples and generalising to others: each amount is fitted to one half of the samples and judged on the other. The other half
says of the output side too how much damping it needs, and whether it helps at all.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fewbits import kernels
from fewbits.errors import InputError
from fewbits.methods import Outcome, error_feedback, rtn
from fewbits.methods.error_feedback import holdout, outputs

if TYPE_CHECKING:
    from torch import Tensor

    from fewbits.calibration.statistics import Kind, WeightStatistics
    from fewbits.formats import Format

DAMPINGS = (0.003, 0.01, 0.03, 0.1, 0.3)
TRIAL_WEIGHTS = 1 << 16  # the best damping hardly differs between rows, so that trials on some of them decide


@dataclass(frozen=True)
class Damping:
    inputs: float
    outputs: float | None  # None: rows do not compensate for each other


class Gptq:
    needs_statistics = True

    def __init__(self, kind: Kind = "aware") -> None:
        self.kind = kind

    def quantize(self, w: Tensor, fmt: Format, statistics: WeightStatistics | None = None) -> Outcome:
        if fmt.is_cast:
            return rtn.METHOD.quantize(w, fmt)  # a cast has no codes to choose
        if statistics is None or not statistics.has_hessian:
            raise InputError("gptq needs second moments of the inputs", "calibrate with Hessians, or use `--method rtn`")
        return solve(w, fmt, statistics, choose_damping(w, fmt, statistics, self.kind), self.kind)


def solve(w: Tensor, fmt: Format, statistics: WeightStatistics, damping: Damping, kind: Kind = "aware") -> Outcome:
    """On all samples, with this damping. Where the Hessian is singular, rounding to nearest by importance, and a note that says so."""
    try:
        hessian = statistics.hessian(kind=kind)
        if statistics.outputs is not None and damping.outputs is not None:
            coupled = outputs.coupled(statistics.output_moment(), stakes(w), damping.outputs)
            solved = error_feedback.solve_both_sides(w, fmt, hessian, coupled, damping=damping.inputs)
        else:
            solved = error_feedback.solve(w, fmt, hessian, damping=damping.inputs)
    except error_feedback.Singular as failure:
        note = f"no error feedback: {failure.args[0]}"
        return Outcome(rtn.METHOD.quantize(w, fmt, statistics).parts, "rtn", notes=(note,))
    return Outcome(kernels.pack(fmt, solved.codes, solved.grid), "gptq", solved.damping, notes=solved.notes)


def choose_damping(w: Tensor, fmt: Format, statistics: WeightStatistics, kind: Kind = "aware") -> Damping:
    """The amounts that do least damage on the other half of the samples.

    Scales are fitted once in these trials, not block by block: it takes a sixth of the time, and the best amount is within 2 % of
    the damage that the best one would do (nine weights of the embedded model).
    """
    rows, tried = holdout.some_rows(w, TRIAL_WEIGHTS), dict[float, float]()
    some = w[rows].contiguous()
    with suppress(error_feedback.Singular):
        undamped = error_feedback.visited(statistics.hessian(0, kind), error_feedback.width(fmt, w.shape[1]), "columns", fmt.dimension)
        for damping in DAMPINGS:
            with suppress(error_feedback.Singular):
                solved = error_feedback.solve(some, fmt, error_feedback.first_pass(undamped, damping, torch.float32), passes=0)
                tried[damping] = holdout.damage(some, fmt, solved.codes, solved.grid, statistics, rows)
    by_rows = (
        None if statistics.outputs is None else outputs.choose_damping(statistics.output_moment(0), statistics.output_moment(1), stakes(w))
    )
    return Damping(min(tried, key=lambda damping: tried[damping], default=DAMPINGS[-1]), by_rows)


def output_cost(w: Tensor, statistics: WeightStatistics, damping: float | None) -> Tensor | None:
    """(rows,): what a miss of each row's target costs on the other half of the samples, where rows compensate for each other; None: they
    do not."""
    if statistics.outputs is None or damping is None or statistics.input is None:
        return None
    try:
        coupled = outputs.coupled(statistics.output_moment(0), stakes(w), damping)
    except error_feedback.Singular:
        return None
    return coupled.held_out(statistics.output_moment(1), statistics.input.tokens(1))


def judged(w: Tensor, fmt: Format, statistics: WeightStatistics, damping: Damping) -> holdout.HeldOut | None:
    """Fitted to one half of the samples, judged on the other; None: the Hessian is singular."""
    rows = holdout.some_rows(w, TRIAL_WEIGHTS)
    try:
        solved = error_feedback.solve(w[rows], fmt, statistics.hessian(0), damping=damping.inputs)
    except error_feedback.Singular:
        return None
    return holdout.judge(w[rows], fmt, solved.codes, solved.grid, statistics, rows, output_cost(w, statistics, damping.outputs))


def stakes(w: Tensor) -> Tensor:
    """(rows,): the size of rounding errors in a row goes with that of its weights."""
    return w.float().square().mean(1)


METHOD = Gptq()
