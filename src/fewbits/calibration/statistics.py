"""The statistics of a weight: what its inputs look like, and how its output moves the loss.

Everything is a sum over tokens, so that two runs add up to one. Every sum is held separately for two halves of the samples: what is
fitted to one half is judged on the other, and the drift from one half to both says whether more data would help. Position 0 is separate
too. It often carries massive activations (the attention sink) and matters far more to some weights than one position in 512 should, and
not at all to others: averaged with the rest it misleads, and without it something is missing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from fewbits.calibration import output_moments
from fewbits.calibration.triangles import Triangles

if TYPE_CHECKING:
    from fewbits.calibration.histogram import Histogram
    from fewbits.calibration.ranges import Levels, Range

Kind = Literal["aware", "plain", "fisher", "class"]
Half = Literal[0, 1] | None  # one half of the samples, or all of them
Moment = Tensor | Triangles  # (2, cols, cols) float32: in full, or as the triangles of a file
Rows = slice | Tensor  # some rows of a weight: every n-th, or by index
_PLAIN_SHARE = 0.05  # of the plain moments in the loss-weighted ones: an input that never moved the loss in calibration may do so later


@dataclass
class InputStatistics:
    """One tensor that one or more weights read. Moments are over positions after the first; inputs at position 0 are stored in full."""

    count: Tensor  # (2,) int64: tokens of each half
    total: Tensor  # (2, cols) float64
    square: Tensor  # (2, cols) float64
    low: Tensor  # (2, cols) float32, position 0 included; a half without tokens has the other's
    high: Tensor
    first: Tensor  # (samples, cols) float32: the inputs at position 0
    first_half: Tensor  # (samples,) uint8
    extremes: Tensor  # (batches, 2) float32: least and greatest value of each batch, in order
    some: Tensor  # (tokens, cols) float16: a few inputs in full, from positions after the first
    some_half: Tensor  # (tokens,) uint8
    histogram: Histogram | None = None  # of all values, position 0 included
    moment: Moment | None = None  # sum of x x^T

    @property
    def cols(self) -> int:
        return self.total.shape[1]

    @property
    def absmax(self) -> Tensor:
        """(cols,): in all samples."""
        return self.absmax_of(None)

    def absmax_of(self, half: Half) -> Tensor:
        largest = torch.maximum(-self.low, self.high)
        return largest.amax(0) if half is None else largest[half]

    def tokens(self, half: Half = None) -> int:
        return int(_of(self.count, half)) + len(self.firsts(half))

    def firsts(self, half: Half = None) -> Tensor:
        return self.first if half is None else self.first[self.first_half == half]

    def drawn(self, half: Half = None) -> Tensor:
        """(tokens, cols) float32: a few real inputs."""
        return (self.some if half is None else self.some[self.some_half == half]).float()

    def mean(self, half: Half = None) -> Tensor:
        total = _of(self.total, half) + self.firsts(half).double().sum(0)
        return (total / max(1, self.tokens(half))).float()

    def later_mean(self) -> Tensor:
        """Mean over positions after the first: a bias should not follow the massive activations at position 0."""
        return (self.total.sum(0) / self.count.sum().clamp(min=1)).float()

    def mean_square(self, half: Half = None, first: float = 1.0, rest: float = 1.0) -> Tensor:
        """Per channel, with these weights for position 0 and for the rest. With equal weights it is llama.cpp's importance matrix."""
        square = _of(self.square, half) * rest + self.firsts(half).double().square().sum(0) * first
        return (square / max(1, self.tokens(half))).float()

    def range(self, method: str, levels: Levels) -> Range:
        """The range of all values, by one of the estimators in fewbits.calibration.ranges."""
        from fewbits.calibration import ranges

        assert self.histogram is not None, "after rescaling there is no histogram"
        moving = ranges.MovingAverage()
        for low, high in self.extremes.tolist():
            moving.add_extremes(low, high)
        return ranges.estimate(method, self.histogram, levels, moving)

    def second_moment(self, half: Half = None, first: float = 1.0, rest: float = 1.0) -> Tensor:
        """Mean of x x^T with these weights for position 0 and for the positions after it."""
        assert self.moment is not None, "calibrated without Hessians"
        x = self.firsts(half)
        return _copy(self.moment, half).mul_(rest).add_((x.T @ x).mul_(first)).div_(max(1, self.tokens(half)))


@dataclass
class Lookup:
    """An embedding used as a table: its rows are the inputs of the model. An error d in one costs d G d^T, with G the second moment of
    the gradient there."""

    usage: Tensor  # (rows,) int64: how often each was looked up
    square: Tensor | None = None  # (2, cols) float64: sum over tokens of g^2
    fisher: Moment | None = None  # sum of g g^T

    @property
    def tokens(self) -> int:
        return max(1, int(self.usage.sum()))

    def mean_gradient(self) -> float:
        """Mean of g^2 over columns, summed over tokens."""
        assert self.fisher is not None, "calibrated without Hessians"
        return float(_of(self.fisher, None).diagonal().mean())

    def frequency(self) -> Tensor:
        """(rows,): the expected share of lookups of each row. By Good and Turing's estimate, rows never seen share as many lookups as all
        rows seen once have together."""
        usage = self.usage.float()
        unseen = self.usage == 0
        usage[unseen] = float((self.usage == 1).sum()) / max(1, int(unseen.sum()))
        return usage / self.tokens


@dataclass
class WeightStatistics:
    """One weight: its inputs, and how its output moves the loss, from one backward pass with labels drawn from the model's predictions."""

    input: InputStatistics | None  # None: an embedding that is not the output matrix too
    sensitivity: Tensor | None = None  # (2 halves, 2: position 0, later) float64: sum of the tokens' loss weights
    gradient_square: Tensor | None = None  # (2, rows) float64: sum over tokens of g^2
    fisher_square: Tensor | None = None  # (2, cols) float64: sum of w_t x^2, w_t the mean over outputs of g_t^2
    fisher: Moment | None = None  # sum of w_t x_t x_t^T
    outputs: Tensor | None = None  # (2, rows, size) float32: sum of g_t g_t^T / |g_t|, as `output_moments` keeps it
    lookup: Lookup | None = None  # of an embedding
    share: float = 1.0  # of the text's tokens that reach it: an expert is given only some, and costs the others nothing
    borrowed: float = 0.0  # of its tokens, those that are its layer's: an expert that saw few has most of its statistics from there

    @property
    def has_importance(self) -> bool:
        return self.input is not None or (self.lookup is not None and self.lookup.square is not None)

    @property
    def has_hessian(self) -> bool:
        return (self.input is not None and self.input.moment is not None) or (self.lookup is not None and self.lookup.fisher is not None)

    def importance(self, half: Half = None) -> Tensor:
        """Per column, with mean 1: the diagonal of the Hessian, by which a search for scales weights its errors."""
        by_token = self._by_token(half, self.fisher_square, self.lookup.square if self.lookup else None)
        if by_token is None or self.input is None or self.sensitivity is None:
            return _normal(self._input.mean_square(half) if by_token is None else by_token)
        by_class = self._input.mean_square(half, *self._class_weights(half))
        plain = _PLAIN_SHARE * _normal(self.input.mean_square(half))
        return _normal(_normal(_normal(by_token) + plain) + _normal(by_class))

    def hessian(self, half: Half = None, kind: Kind = "aware") -> Tensor:
        """(cols, cols), with mean diagonal 1. The default takes the attention sink into account; it is the average of

        fisher  every token by its weight in the loss, with a little of the plain moments
        class   position 0 and the positions after it, each class by its mean weight: coarser, and less noisy
        """
        by_token = self._by_token(half, self.fisher, self.lookup.fisher if self.lookup else None)
        if by_token is not None and self.input is None:
            return _normalized(by_token)
        plain = _normalized(self._input.second_moment(half))
        if by_token is None or self.sensitivity is None or kind == "plain":
            return plain
        fisher = _normalized(_normalized(by_token).add_(plain.mul_(_PLAIN_SHARE)))
        if kind == "fisher":
            return fisher
        del plain  # for a wide layer it takes a gigabyte
        by_class = _normalized(self._input.second_moment(half, *self._class_weights(half)))
        return by_class if kind == "class" else _normalized(fisher.add_(by_class))

    def damage(self, error: Tensor, w: Tensor, half: Half = None, rows: Rows = slice(None), output: Tensor | None = None) -> float:
        """The predicted KL of this error (rows, cols) in the weight; without gradients the squared error of the output, relative to the
        output."""
        if self.predicts_kl and self.outputs is not None and output is None and rows == slice(None):
            return self._joint_damage(error, half)
        if self.predicts_kl:
            return float(self.row_damage(error, half, rows, output).sum())
        plain = self.hessian(half, "plain") if self.has_hessian else self.importance(half).diag()
        return float(_quadratic(error, plain).sum() / _quadratic(w, plain).sum().clamp(min=1e-30))

    @property
    def predicts_kl(self) -> bool:
        by_output = self.fisher is not None and self.sensitivity is not None and self.gradient_square is not None
        return by_output if self.input is not None else self.lookup is not None and self.lookup.fisher is not None

    def row_damage(self, error: Tensor, half: Half = None, rows: Rows = slice(None), output: Tensor | None = None) -> Tensor:
        """(rows,): the predicted KL of each row's error: half of g2_i e_i H e_i^T, with H weighted by the tokens' share in the loss.
        `output`: (all rows,) in place of g2, where rows make up for each other's errors and e is what they miss their targets by.
        For the lookups of an embedding: half of how often row i is looked up times e_i G e_i^T."""
        assert self.predicts_kl, "calibrated without gradients"
        damage = torch.zeros(len(error))
        if self.fisher is not None and self.sensitivity is not None:
            weighted = _copy(self.fisher, half).div_(_of(self.sensitivity, half).sum().float().clamp(min=1e-30))
            by_row = self.output_sensitivity(half) if output is None else output
            damage += 0.5 * self.share * by_row[rows] * _quadratic(error, weighted)
        if self.lookup is not None and self.lookup.fisher is not None:
            tokens = self.input.tokens(half) if self.input else self.lookup.tokens / (1 if half is None else 2)
            damage += 0.5 * self.lookup.frequency()[rows] * _quadratic(error, _copy(self.lookup.fisher, half).div_(max(1, tokens)))
        return damage

    def output_moment(self, half: Half = None) -> Tensor:
        """(rows, size), see `output_moments`: in the units of a sum of g g^T."""
        assert self.outputs is not None and self.gradient_square is not None, "calibrated without Hessians"
        return output_moments.in_squares(_of(self.outputs, half), _of(self.gradient_square, half))

    def _joint_damage(self, error: Tensor, half: Half) -> float:
        """Half of tr(G E H E^T): of all rows together, whose errors may make up for each other."""
        assert self.fisher is not None and self.sensitivity is not None
        weighted = error @ _copy(self.fisher, half).div_(_of(self.sensitivity, half).sum().float().clamp(min=1e-30))
        joint, start = 0.0, 0
        for block in output_moments.blocks(self.output_moment(half)):
            here = slice(start, start + len(block))
            joint += float((block @ weighted[here]).mul_(error[here]).sum(dtype=torch.float64))
            start = here.stop
        return 0.5 * self.share * joint / max(1, self._input.tokens(half))

    def errors_by_place(self, error: Tensor, w: Tensor, half: Half = None) -> tuple[float, float]:
        """Squared error of the output relative to the output, at position 0 and after it; nan where there is no such position."""
        if self.input is None or self.input.moment is None:
            return math.nan, math.nan
        first, later = self.input.firsts(half), _of(self.input.moment, half)
        at_first = float((error @ first.T).square().sum() / (w @ first.T).square().sum()) if len(first) else math.nan
        return at_first, float(_quadratic(error, later).sum() / _quadratic(w, later).sum())

    def output_sensitivity(self, half: Half = None) -> Tensor:
        """(rows,): mean of g^2 over the tokens that reach it."""
        assert self.gradient_square is not None, "calibrated without gradients"
        return (_of(self.gradient_square, half) / max(1, self._input.tokens(half))).float()

    @property
    def _input(self) -> InputStatistics:
        assert self.input is not None, "an embedding has no input"
        return self.input

    def _class_weights(self, half: Half) -> tuple[float, float]:
        assert self.sensitivity is not None
        first, rest = _of(self.sensitivity, half).tolist()
        firsts = len(self._input.firsts(half))
        return first / max(1, firsts), rest / max(1, self._input.tokens(half) - firsts)

    def _by_token(self, half: Half, output: Moment | None, lookup: Moment | None) -> Tensor | None:
        """Loss-weighted sums. A tied matrix has two roles: over its rows, the loss as an output sums to rows * fisher, as a table to
        the lookups' fisher."""
        both = [_copy(sums, half).float().mul_(times) for sums, times in ((output, self._rows), (lookup, 1)) if sums is not None]
        return both[0].add_(both[1]) if len(both) == 2 else both[0] if both else None

    @property
    def _rows(self) -> int:
        return 1 if self.gradient_square is None else self.gradient_square.shape[1]


def _of(sums: Moment, half: Half) -> Tensor:
    """Sums of one half or of both. Do not write to it: it may be a view of the sums."""
    if half is not None:
        return sums[half]
    return sums.total() if isinstance(sums, Triangles) else sums.sum(0)


def _copy(sums: Moment, half: Half) -> Tensor:
    """The same as a tensor that may be written to."""
    return _of(sums, half).clone() if half is not None and isinstance(sums, Tensor) else _of(sums, half)


def _quadratic(rows: Tensor, matrix: Tensor) -> Tensor:
    """r M r^T for each row r."""
    return ((rows @ matrix) * rows).sum(1)


def _normal(values: Tensor) -> Tensor:
    """Scaled to mean 1 (a vector) or mean diagonal 1 (a matrix); all zeros stay zeros."""
    return _normalized(values.clone())


def _normalized(values: Tensor) -> Tensor:
    """`_normal` in place."""
    diagonal = values.diagonal() if values.dim() == 2 else values
    mean = diagonal.mean()
    return values.div_(mean) if mean > 0 else values
