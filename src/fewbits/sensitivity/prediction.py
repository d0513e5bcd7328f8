"""One weight in every format: the KL that its rounding errors are predicted to cost, and simpler scores of the same errors.

The second-order expansion of KL around the float model: half the sum over outputs i of g2_i e_i H e_i^T, with e the actual error of the
method, H the second moment of the inputs, each token weighted by its share in the loss, and g2 the mean square of the loss's gradient;
where error feedback lets rows compensate for each other, g2 is what remains of it (`methods.error_feedback.outputs`).
Rounding is judged on all samples; error feedback is fitted to one half of them and judged on the other, because on the samples it was
fitted to it looks better than on others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from fewbits.formats.runtime.activations import Activation, quantized
from fewbits.methods import error_feedback, gptq
from fewbits.methods.error_feedback.expected import DAMPING
from fewbits.sensitivity.rows import Drawn, draw
from fewbits.sensitivity.table import Cell, Scores, in_digits
from fewbits.sensitivity.table import rounded as in_few_digits
from fewbits.store.heap import return_free_memory
from fewbits.store.threads import TOGETHER, Turns

if TYPE_CHECKING:
    from fewbits.calibration.statistics import Half, WeightStatistics
    from fewbits.formats import Format

ENOUGH = 1 << 16  # weights (about) whose errors are computed
_FIRSTS, _DRAWN, _FEW = 32, 512, 128  # inputs whose rounding is tried, at position 0 and after it
_KEPT = 2048  # columns up to which matrices of second moments are kept from format to format: 17 MB each
_PIECE = 1 << 22  # values of a weight at a time, where a copy of all would take too much memory


_turns = Turns(TOGETHER)


def held_by(cols: int, method: str) -> int:
    """The most bytes for the Hessians of a weight: three in float32, or one in float32 and three in float64 while it is factored."""
    return (3 * 4 if method == "rtn" else 4 + 3 * 8) * cols**2


def rounded_bytes(numbers: int, cols: int, feedback: bool) -> int:
    """The most bytes for the arrays of a weight and its Hessians while it is rounded."""
    return 8 * 4 * numbers + (held_by(cols, "auto") if feedback else 0)


def tried_bytes(rows: int) -> int:
    """Bytes at the most for the outputs of the inputs whose rounding is tried: three copies in float32."""
    return 3 * 4 * (_FIRSTS + _DRAWN) * rows


class Predictor:
    """What the formats of one weight share: the rows that stand for it, and a factored Hessian."""

    def __init__(self, w: Tensor, statistics: WeightStatistics, method: str, weights: int = ENOUGH) -> None:
        self.statistics, self.method = statistics, method
        self.drawn = draw(_guess(w, statistics), max(1, weights // w.shape[1]))
        self.w = w[self.drawn.rows]
        self.rows = w.shape[0]
        # columns of a block and of a code, and the Hessian factored for them
        self._order: tuple[tuple[int, int], error_feedback.Ordered | None] = (0, 0), None
        self._by_row = None if method == "rtn" else gptq.output_cost(w, statistics, DAMPING)
        self._importance = statistics.importance() if statistics.has_importance else None
        self._scorer = Scorer(statistics, self.drawn)
        self._hessian: Tensor | None = None

    def cells(self, formats: Iterable[Format]) -> Iterator[tuple[str, Cell]]:
        """Formats with blocks and codes of one width come one after the other: their Hessian is factored once, and only one is held."""
        wanted, cols = list(formats), self.w.shape[1]
        with _turns.taken(held_by(cols, self.method)):
            cells = {fmt.name: self.cell(fmt) for fmt in sorted(wanted, key=lambda fmt: _widths(fmt, cols))}
            self._order, self._hessian = ((0, 0), None), None
        return_free_memory()
        yield from ((fmt.name, cells[fmt.name]) for fmt in wanted)

    def cell(self, fmt: Format) -> Cell:
        if fmt.is_cast:
            return self._of(self.w - fmt.pack(self.w, {})["values"].float(), None, "cast")
        plain = self._rounded(fmt)
        if self.method == "rtn" or (solved := self._fed_back(fmt)) is None:
            return self._of(plain, None, "rtn")
        if self.method == "gptq":
            return self._of(solved, 1, "gptq", self._by_row)
        fitted, rounded = self._damage(solved, 1, self._by_row), self._damage(plain, 1)  # on the same half, so that they are comparable
        better = in_digits(self.drawn.total(fitted)) < in_digits(self.drawn.total(rounded))
        return self._cell(solved, fitted, "gptq") if better else self._cell(plain, rounded, "rtn")

    def _rounded(self, fmt: Format) -> Tensor:
        grid = fmt.fit(self.w, self._importance)
        return self.w - fmt.decode(fmt.encode(self.w, grid, self._importance), grid)

    def _fed_back(self, fmt: Format) -> Tensor | None:
        """The error with feedback, fitted to the first half; None: there is no Hessian, or it is singular."""
        widths = _widths(fmt, self.w.shape[1])
        if widths != self._order[0]:
            self._order = (0, 0), None  # frees the memory before the next one is made
            self._order = widths, self._ordered(*widths)
        order = self._order[1]
        if order is None:
            return None
        solved = error_feedback.solve(self.w, fmt, order, passes=1)
        return self.w - fmt.decode(solved.codes, solved.grid)

    def _ordered(self, width: int, dimension: int) -> error_feedback.Ordered | None:
        if not self.statistics.has_hessian:
            return None
        try:
            hessian = self.statistics.hessian(0) if self._hessian is None else self._hessian
            self._hessian = hessian if len(hessian) <= _KEPT else None
            return error_feedback.ordered(hessian, width, "blocks", DAMPING, torch.float32, dimension)
        except error_feedback.Singular:
            return None

    def _of(self, error: Tensor, half: Half, method: str, by_row: Tensor | None = None) -> Cell:
        return self._cell(error, self._damage(error, half, by_row), method)

    def _damage(self, error: Tensor, half: Half, by_row: Tensor | None = None) -> Tensor:
        return self.statistics.row_damage(error, half, self.drawn.rows, by_row)

    def _cell(self, error: Tensor, damage: Tensor, method: str) -> Cell:
        return in_few_digits(Cell(self.drawn.total(damage), self.drawn.spread(damage), method, self._scorer.scores(error)))


def _widths(fmt: Format, cols: int) -> tuple[int, int]:
    return error_feedback.width(fmt, cols), fmt.dimension


def activation_kl(w: Tensor, statistics: WeightStatistics, activation: Activation) -> float | None:
    """Of rounding this weight's inputs, from samples stored in calibration; None: there are none, or no gradients."""
    return _inputs_kl(w, statistics, lambda x: quantized(x, activation), _DRAWN)


def clipping_kl(w: Tensor, statistics: WeightStatistics, reach: float, fitted: bool = False) -> float | None:
    """Of values beyond a fixed range, on text that calibration has not seen: a limit that one half of the samples sets, met by the largest
    values of the other. `reach`: the range of all samples. `fitted`: factors bring every channel to that range (SmoothQuant), so that each
    has a limit of its own, and with a thousand channels one token in ten exceeds one of them.

    One token of a half is counted for each channel. That is too few; and too many, because all samples together set a wider range than
    half of them."""
    seen = statistics.input
    if seen is None or statistics.sensitivity is None or statistics.gradient_square is None:
        return None
    by_row = statistics.output_sensitivity()
    by_column = (by_row / by_row.mean().clamp(min=1e-30)) @ w.square()
    weight = statistics.share * float(statistics.sensitivity.sum()) / max(1, seen.tokens())
    largest, total = seen.absmax, 0.0
    halves: tuple[tuple[Half, Half], ...] = ((0, 1), (1, 0))
    for fit, judge in halves:
        known = seen.absmax_of(fit)
        limit = reach * (known / largest.clamp(min=1e-30) if fitted else known.max() / largest.max().clamp(min=1e-30))
        beyond = (seen.absmax_of(judge) - limit).clamp(min=0)
        total += 0.25 * weight * float((beyond.square() @ by_column).double()) / max(1, seen.tokens(judge))
    return total


def runtime_kl(w: Tensor, statistics: WeightStatistics, block: int) -> float | None:
    """Of inputs that a runtime itself rounds for a quantized matmul: to 8 bits, with a scale for each `block` of columns."""
    return _inputs_kl(w, statistics, lambda x: _in_blocks(x, block), _FEW)


def _in_blocks(x: Tensor, block: int) -> Tensor:
    parts: Tensor = pad(x, (0, -x.shape[1] % block)).unflatten(1, (-1, block))
    step = (parts.abs().amax(2, keepdim=True) / 127).clamp(min=1e-30)
    return ((parts / step).round() * step).flatten(1)[:, : x.shape[1]]


def _inputs_kl(w: Tensor, statistics: WeightStatistics, rounded: Callable[[Tensor], Tensor], tokens: int) -> float | None:
    seen = statistics.input
    if seen is None or statistics.sensitivity is None or statistics.gradient_square is None:
        return None
    by_row = statistics.output_sensitivity()
    by_row = by_row / by_row.mean().clamp(min=1e-30)
    total = 0.0
    drawn = seen.drawn()
    for place, x in enumerate((seen.firsts()[:_FIRSTS], drawn[:: max(1, len(drawn) // tokens)])):
        if len(x):
            square = ((x - rounded(x)) @ w.T).square()
            weight = statistics.share * float(statistics.sensitivity[:, place].sum()) / max(1, seen.tokens())
            total += 0.5 * weight * float((square @ by_row).double().mean())
    return total


class Scorer:
    """Simpler measures of the same errors, see `Scores`."""

    def __init__(self, stats: WeightStatistics, drawn: Drawn) -> None:
        self._stats, self._drawn = stats, drawn
        self._knows = stats.input is not None and stats.gradient_square is not None

    @cached_property
    def _by_column(self) -> tuple[Tensor, Tensor, Tensor]:
        """Mean squares of the inputs, the same weighted by the loss; and by row the gradients'."""
        stats = self._stats
        assert stats.input is not None and stats.fisher_square is not None and stats.sensitivity is not None
        by_token = (stats.fisher_square.sum(0) / stats.sensitivity.sum().clamp(min=1e-300)).float()
        return stats.input.mean_square(), by_token, stats.output_sensitivity()[self._drawn.rows]

    @cached_property
    def _kept_moments(self) -> Tensor | None:
        seen = self._stats.input
        return None if seen is None or seen.moment is None or seen.cols > _KEPT else seen.second_moment()

    def scores(self, error: Tensor) -> Scores:
        drawn, seen, square = self._drawn, self._stats.input, error.square()
        if not self._knows or seen is None:
            plain = drawn.total(square.sum(1))
            return Scores(plain, plain, plain, plain)
        mean_square, by_token, gradient = self._by_column
        if seen.moment is None:
            output = square @ mean_square
        else:
            moments = seen.second_moment() if self._kept_moments is None else self._kept_moments
            output = ((error @ moments) * error).sum(1)
        return Scores(
            weight=drawn.total(square.sum(1)),
            output=drawn.total(output),
            gradient=0.5 * drawn.total(gradient * (square @ mean_square)),
            diagonal=0.5 * drawn.total(gradient * (square @ by_token)),
        )


def _guess(w: Tensor, statistics: WeightStatistics) -> Tensor:
    """(rows,): a cheap estimate of the damage by 4 bits to each row, from importance by column and sensitivity by row."""
    group = 32 if w.shape[1] % 32 == 0 else w.shape[1]
    pieces = w.split(max(1, _PIECE // w.shape[1]))
    step = torch.cat([piece.unflatten(1, (-1, group)).abs().amax(2).square() for piece in pieces])
    importance = statistics.importance() if statistics.has_importance else torch.ones(w.shape[1])
    by_group = importance.unflatten(0, (step.shape[1], -1)).sum(1)
    guess: Tensor = step @ by_group
    rows = torch.zeros(len(w))
    if statistics.gradient_square is not None:
        rows += statistics.output_sensitivity()
    if statistics.lookup is not None and statistics.lookup.fisher is not None:
        role = statistics.lookup.mean_gradient() / statistics.lookup.tokens
        energy = _mean_energy(statistics)
        rows = rows * energy + statistics.lookup.frequency() * role
    return guess * rows if bool(rows.any()) else guess


def _mean_energy(statistics: WeightStatistics) -> float:
    """Of the inputs, each token weighted by its share in the loss: it makes the two uses of a tied matrix comparable."""
    if statistics.fisher_square is None or statistics.sensitivity is None:
        return 1.0
    return float(statistics.fisher_square.sum(0).mean() / statistics.sensitivity.sum().clamp(min=1e-300))
