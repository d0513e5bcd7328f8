"""Choosing scales: the searches that the formats share.

Each takes x (..., n): n weights under one scale, and an importance broadcastable to x (None: all alike), and
minimises sum(importance * (x - decoded)^2). Trial scales come from where the largest weight may be put; each is refined by
least squares for its own codes. Where they can, native/fitting*.cc do the same operations in the same order, and so give the same
bits: error feedback fits a few columns at a time, and torch would spend nearly all its time on being called.
`fewbits.fitting.superblocks` goes on from there where scales are themselves rounded to integers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fewbits import kernels
from fewbits.rounding import snap

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fewbits.formats import How

Levels = tuple[float, ...]

# Where the largest weight is put, in steps beyond (+) or inside (-) the outermost level. All places near it are as good on average,
# but in some the codes fall luckier: the best of 27 lowers the error of q8_0 by 22 %, of q4_0 by 12 %. A finer spacing gains nothing.
_STRETCHES = tuple(0.4 * k for k in range(-13, 14))
_NEAR_END = (0.6, 1.9)  # beyond these ratios to the outermost level, a few bold trials do
_CLIPS = (1.5, 2.0, 2.7, 3.6, 5.0)  # far beyond it: a weight that stands alone, or matters little, is clipped
_AROUND = (0.97, 1.03, 1.0)  # then around the best so far; 1.0 is one more step of codes for the scale, scale for the codes

# With a minimum both ends have a place. The widest first: it has the smallest scale, and of two lines through the same points (two
# distinct codes can be 0 and 1 or 0 and 3) the smaller scale leaves more of a super-block's integers to its neighbours.
_INSETS = (1.4, 0.9, 0.4, -0.1, -0.6)
_KEPT = ((0.5, 0.5), (0.5, 0.8), (0.8, 0.5), (0.7, 0.7), (0.7, 1.0), (1.0, 0.7))  # of the range below and above zero

_FLOAT16_MAX, _FLOAT16_STEP = 65504.0, 2.0**-24
_LARGEST = 1e14  # larger weights, which no float16 scale reaches by far, are searched for as this: their squares stay finite
_TINY = 1e-37  # a scale below has no finite inverse to rely on: it counts as zero
_MOST_CELLS = 4096


def as_float16(value: Tensor) -> Tensor:
    """What a value is after it was stored in 16 bits; an overflow would decode to infinity, so it saturates."""
    return value.clamp(-_FLOAT16_MAX, _FLOAT16_MAX).half().float()


def float16_scale(scale: Tensor) -> Tensor:
    """The same for a scale, which must not vanish either: with the smallest float16, tiny weights still get a few of their codes."""
    return torch.where(scale.abs() < _FLOAT16_STEP, scale.sign() * _FLOAT16_STEP, as_float16(scale))


def grouped(w: Tensor, run: int) -> Tensor:
    return w.reshape(w.shape[0], -1, run)


def importance_like(w: Tensor, importance: Tensor | None, run: int) -> Tensor | None:
    """A column importance (cols,) in the shape of grouped weights, normalised so that sums stay in range.

    A column that calibration never saw in use keeps a millionth, so that a group of such columns is still fitted to its weights.
    """
    if importance is None:
        return None
    if importance.shape != (w.shape[1],):
        raise ValueError(f"importance has shape {tuple(importance.shape)}, the weight has {w.shape[1]} columns")
    mean = importance.float().mean()
    return (importance.float() / mean if mean > 0 else torch.ones_like(importance)).clamp(min=1e-6).reshape(1, -1, run)


class Groups:
    """Weights that share a scale, one group per column: x (n, groups). Sums over the first dimension run along whole
    vectors: a trial takes 0.8 ns per weight, against 1.3 with groups of 16 as rows.
    """

    def __init__(self, x: Tensor, importance: Tensor | None) -> None:  # x (..., n)
        n = x.shape[-1]
        self.x = x.reshape(-1, n).clamp(-_LARGEST, _LARGEST).T.contiguous()
        self.importance = None if importance is None else importance.expand_as(x).reshape(-1, n).T.contiguous()

    def sum(self, values: Tensor) -> Tensor:
        """The weighted sum of each group; overwrites values."""
        return total(values if self.importance is None else values.mul_(self.importance), 0)

    def snapped(self, levels: Levels, scale: Tensor, offset: Tensor | None = None) -> Tensor:
        """The level that each weight is rounded to."""
        x = self.x * inverse(scale) if offset is None else (self.x - offset).mul_(inverse(scale))
        return _snap(x, levels)

    def error(self, levels: Levels, scale: Tensor, offset: Tensor | None = None) -> Tensor:
        decoded = self.snapped(levels, scale, offset).mul_(scale)
        return self.sum((decoded if offset is None else decoded.add_(offset)).sub_(self.x).square_())


def fit_scale(
    x: Tensor,
    levels: Levels,
    ends: tuple[float, ...],
    importance: Tensor | None = None,
    how: How = "search",
    store: Callable[[Tensor], Tensor] = float16_scale,
) -> Tensor:
    """The scale (...) of x ~ scale * level, as `store` keeps it.

    `ends` are the levels that the largest weight may be put at, the textbook one first. With both -8 and 7 the scale may
    turn out negative: that is how 4 symmetric bits get to use all 16 levels. With one end it never does.
    """
    if store is float16_scale and (found := _native_scale(x, levels, ends, importance, how)) is not None:
        return found
    groups = Groups(x, importance)
    peak = extreme(groups.x, 0)
    if len(ends) == 1:
        peak = peak.abs()
    best = store(peak / ends[0])
    if how == "max":
        return best.reshape(x.shape[:-1])

    # With v the levels that a trial scale rounds to, the best scale for them is sum(wxv) / sum(wvv), and it lowers the
    # error by sum(wxv)^2 / sum(wvv): one rounding and two sums judge a trial, and no second rounding is needed.
    wanted, most = best, torch.zeros_like(best)

    def consider(trial: Tensor) -> None:
        nonlocal wanted, most
        v = groups.snapped(levels, trial)
        along, size = groups.sum(v * groups.x), groups.sum(v.square_())
        scale = along / safe(size)
        gain = along * scale
        better = gain > most
        wanted, most = torch.where(better, scale, wanted), torch.where(better, gain, most)

    for place in _places(levels, ends):
        consider(peak / place)
    for factor in _AROUND:
        consider(wanted * factor)
    error = groups.error(levels, best)
    for trial in (store(wanted), store(wanted + wanted.sign() * _FLOAT16_STEP)):  # below 2^-14 the next float16 is another scale
        trial_error = groups.error(levels, trial)
        better = trial_error < error
        best, error = torch.where(better, trial, best), torch.where(better, trial_error, error)
    return best.reshape(x.shape[:-1])


def fit_scale_and_min(
    x: Tensor,
    top: int,
    importance: Tensor | None = None,
    how: How = "search",
    float16: bool = False,
) -> tuple[Tensor, Tensor]:
    """(scale, min), both >= 0, of x ~ scale * q - min with q in 0..top. With float16, as it keeps them, and min of any sign."""
    if (found := _native_scale_and_min(x, top, importance, how, float16)) is not None:
        return found
    groups, shape = Groups(x, importance), x.shape[:-1]

    def stored(scale: Tensor, minimum: Tensor) -> tuple[Tensor, Tensor]:
        return (float16_scale(scale), as_float16(minimum)) if float16 else (scale, minimum)

    low, high = groups.x.amin(0) + 0.0, groups.x.amax(0) + 0.0  # no negative zeros: which of two zeros is the least is chance
    if not float16:
        low, high = low.clamp(max=0), high.clamp(min=0)
    textbook = stored((high - low) / top, -low)
    if how == "max":
        return textbook[0].reshape(shape), textbook[1].reshape(shape)

    middle = (low + high) / 2 if float16 else torch.zeros_like(low)  # sums of squares around it do not cancel
    low, high, centred = low - middle, high - middle, groups.x - middle
    sum_w, sum_x = groups.sum(torch.ones_like(centred)), groups.sum(centred.clone())
    best_gain = torch.full_like(low, -torch.inf)
    best_scale, best_min = textbook
    starts = [((high * above - low * below) / top, -low * below) for below, above in _KEPT]
    for below in _INSETS:
        for above in _INSETS:
            scale = (high - low) / (top + below + above)
            starts.append((scale, below * scale - low))
    for scale, minimum in starts:
        for _ in range(2):  # codes for the grid, the least-squares grid for the codes, and once more
            q = (centred + minimum).mul_(inverse(scale)).round_().clamp_(0, top)
            sum_qx, sum_q, sum_qq = groups.sum(q * centred), groups.sum(q.clone()), groups.sum(q.square_())
            determinant = sum_w * sum_qq - sum_q * sum_q
            solvable = determinant > 1e-6 * sum_w * sum_qq  # all codes alike: no slope can be read off them
            slope = torch.where(solvable, (sum_w * sum_qx - sum_q * sum_x) / safe(determinant), scale)
            base = torch.where(solvable, (sum_qq * sum_x - sum_q * sum_qx) / safe(determinant), -minimum)
            if not float16:  # the stored minimum has no sign: where it wants one, the line goes through zero
                slope = torch.where(base > 0, sum_qx / safe(sum_qq), slope).clamp(min=0)
                base = base.clamp(max=0)
            gain = 2 * (slope * sum_qx + base * sum_x - slope * base * sum_q) - slope * slope * sum_qq - base * base * sum_w
            better = gain > best_gain
            best_gain = torch.where(better, gain, best_gain)
            best_scale, best_min = torch.where(better, slope, best_scale), torch.where(better, -base - middle, best_min)
            scale, minimum = slope, -base
    levels = tuple(float(q) for q in range(top + 1))
    best_scale, best_min = stored(best_scale, best_min)
    better = groups.error(levels, best_scale, -best_min) < groups.error(levels, textbook[0], -textbook[1])
    best_scale, best_min = torch.where(better, best_scale, textbook[0]), torch.where(better, best_min, textbook[1])
    return best_scale.reshape(shape), best_min.reshape(shape)


def in_row_chunks(fit: Callable[[Tensor], dict[str, Tensor]], w: Tensor, elements: int = 1 << 18) -> dict[str, Tensor]:
    """Fit a few rows at a time, so that the arrays of a search stay in the cache: rows are independent."""
    rows = max(1, elements // max(1, w.shape[1]))
    pieces = [fit(chunk) for chunk in w.split(rows)]
    return {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}


def total(values: Tensor, dim: int) -> Tensor:
    """Sum by folding, overwriting values. torch's own sum takes another order for other shapes and threads, and a search would then
    now and then choose another scale: same weight, same bytes."""
    while (n := values.shape[dim]) > 1:
        ways = 4 if n % 4 == 0 else 2
        first, *others = values.narrow(dim, 0, n // ways * ways).chunk(ways, dim)
        for other in others:
            first.add_(other)
        if n % ways:
            first.narrow(dim, 0, 1).add_(values.narrow(dim, n - 1, 1))
        values = first
    return values.squeeze(dim)


def extreme(x: Tensor, dim: int) -> Tensor:
    """The value of largest magnitude, with its sign (20 times as fast as argmax and gather)."""
    low, high = x.aminmax(dim=dim)
    return torch.where(-low > high, low, high)


def inverse(scale: Tensor) -> Tensor:
    return torch.where(scale.abs() < _TINY, 0.0, 1 / scale)


def safe(divisor: Tensor) -> Tensor:
    return torch.where(divisor == 0, 1.0, divisor)


@cache
def _places(levels: Levels, ends: tuple[float, ...]) -> list[float]:
    """Where trials put the largest weight, in units of the levels."""
    places = []
    for end in ends:
        inner = max((level for level in levels if abs(level) < abs(end) and level * end >= 0), key=abs)
        near = [end + stretch * (end - inner) for stretch in _STRETCHES]
        places += [place for place in near if _NEAR_END[0] < place / end < _NEAR_END[1]] + [end * clip for clip in _CLIPS]
    return places


def _snap(x: Tensor, levels: Levels) -> Tensor:
    """`rounding.snap` by a table of cells where all midpoints lie on a coarse grid (1.5 ns per weight, not 33)."""
    cells = _cells(levels)
    if cells is None:
        return snap(x, levels)
    per_unit, table = cells
    half = len(table) // 2
    return table.index_select(0, x.mul_(per_unit).floor_().clamp_(-half, half - 1).add_(half).int().reshape(-1)).reshape(x.shape)


@cache
def _cells(levels: Levels) -> tuple[float, Tensor] | None:
    """(cells per unit, the level of each cell), where no midpoint between two levels is inside a cell; None: no need, or no hope."""
    ordered = sorted(levels)
    if all(after - before == 1 for before, after in pairwise(ordered)):
        return None
    midpoints = [(before + after) / 2 for before, after in pairwise(ordered)]
    per_unit = next((2.0**k for k in range(-8, 9) if all((m * 2.0**k).is_integer() for m in midpoints)), None)
    if per_unit is None or (half := int(max(abs(m) for m in midpoints) * per_unit) + 1) * 2 > _MOST_CELLS:
        return None
    centres = (torch.arange(-half, half) + 0.5) / per_unit
    return per_unit, torch.tensor(ordered)[torch.bucketize(centres, torch.tensor(midpoints))]


def _native_scale(x: Tensor, levels: Levels, ends: tuple[float, ...], importance: Tensor | None, how: How) -> Tensor | None:
    """What `fit_scale` finds; None where it has to find it itself."""
    cells = _cells(levels)
    if (cells is None and not _are_integers(levels)) or (taken := _native_arrays(x, importance)) is None:
        return None
    isa, *arrays = taken
    per_unit, table = (1.0, None) if cells is None else (cells[0], cells[1].numpy())
    scale = torch.empty(x.shape[:-1])
    places, around = _trials(levels, ends if how != "max" else ())
    found = kernels.native().fit_scale(
        isa,
        *arrays,
        table,
        levels[0],
        levels[-1],
        per_unit,
        ends[0],
        len(ends) == 1,
        places,
        around,
        how != "max",
        scale.view(-1).numpy(),
        torch.get_num_threads(),
    )
    return scale if found else None  # a weight is NaN: how far it spreads is torch's affair


def _native_scale_and_min(x: Tensor, top: int, importance: Tensor | None, how: How, float16: bool) -> tuple[Tensor, Tensor] | None:
    """What `fit_scale_and_min` finds; None where it has to find it itself."""
    if (taken := _native_arrays(x, importance)) is None:
        return None
    isa, *arrays = taken
    scale, minimum = torch.empty(x.shape[:-1]), torch.empty(x.shape[:-1])
    into, threads = (scale.view(-1).numpy(), minimum.view(-1).numpy()), torch.get_num_threads()
    found = kernels.native().fit_scale_and_min(isa, *arrays, top, float16, *_starts(top), how != "max", *into, threads)
    return (scale, minimum) if found else None


def _native_arrays(x: Tensor, importance: Tensor | None) -> tuple[str, NDArray[Any], NDArray[Any] | None] | None:
    """(instruction set, x and importance with groups as rows); None where torch must search. Groups take the rows of importance in
    turn, so that what all rows of a weight share is not repeated for each."""
    tensors = [x] if importance is None else [x, importance]
    if any(t.dtype != torch.float32 or t.device.type != "cpu" for t in tensors) or x.numel() == 0 or (n := x.shape[-1]) < 2:
        return None
    if (backend := kernels.backend()) == "reference":
        return None
    rows = None
    if importance is not None:
        shared = importance.shape[next((i for i, size in enumerate(importance.shape) if size > 1), importance.ndim - 1) :]
        repeats = importance.ndim <= x.ndim and shared == x.shape[x.ndim - len(shared) :]
        rows = (importance if repeats else importance.expand_as(x)).detach().reshape(-1, n).contiguous().numpy()
    return backend.removeprefix("native-"), x.detach().reshape(-1, n).contiguous().numpy(), rows


@cache
def _trials(levels: Levels, ends: tuple[float, ...]) -> tuple[NDArray[Any], NDArray[Any]]:
    return torch.tensor(_places(levels, ends), dtype=torch.float32).numpy(), torch.tensor(_AROUND, dtype=torch.float32).numpy()


@cache
def _starts(top: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """The shares of the range that are kept below and above zero; an inset and the number of steps that the range is then."""
    insets = [(below, top + below + above) for below in _INSETS for above in _INSETS]
    return torch.tensor(_KEPT, dtype=torch.float32).numpy(), torch.tensor(insets, dtype=torch.float32).numpy()


@cache
def _are_integers(levels: Levels) -> bool:
    """Whether levels are consecutive integers in order, small enough for the native rounding."""
    return all(after - before == 1 for before, after in pairwise(levels)) and levels[0].is_integer() and max(map(abs, levels)) < 2**21
