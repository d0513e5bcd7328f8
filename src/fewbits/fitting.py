"""Choosing scales: the searches that the formats share.

Each takes x (..., n): n weights under one scale, and an importance broadcastable to x (None: all alike), and
minimises sum(importance * (x - decoded)^2). Candidates come from stretching the textbook scale; each is refined by
least squares for its own codes, which is where most of the gain over plain max scaling comes from.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fewbits.rounding import decode, encode, snap

if TYPE_CHECKING:
    from fewbits.formats import How

Levels = tuple[float, ...]

# How far beyond (+) or inside (-) the outermost level the largest weight is put: clipping it a little often pays.
_STRETCHES = (-0.9, -0.6, -0.3, 0.0, 0.3, 0.6, 0.9, 1.3, 1.8, 2.4)
_FLOAT16_MAX = 65504.0


def as_float16(scale: Tensor) -> Tensor:
    """What a scale is after it was stored in 16 bits; an overflow would decode to infinity, so it saturates."""
    return scale.clamp(-_FLOAT16_MAX, _FLOAT16_MAX).half().float()


def grouped(w: Tensor, run: int) -> Tensor:
    return w.reshape(w.shape[0], -1, run)


def importance_like(w: Tensor, importance: Tensor | None, run: int) -> Tensor | None:
    """A column importance (cols,) in the shape of grouped weights, normalised so that sums stay in range."""
    if importance is None:
        return None
    if importance.shape != (w.shape[1],):
        raise ValueError(f"importance has shape {tuple(importance.shape)}, the weight has {w.shape[1]} columns")
    mean = importance.float().mean()
    return (importance.float() / mean if mean > 0 else torch.ones_like(importance)).reshape(1, -1, run)


def fit_scale(
    x: Tensor,
    levels: Levels,
    ends: tuple[float, ...],
    importance: Tensor | None = None,
    how: How = "search",
    store: Callable[[Tensor], Tensor] = as_float16,
) -> Tensor:
    """The scale (...) of x ~ scale * level, as `store` keeps it.

    `ends` are the levels that the largest weight may be put at, the textbook one first. With both -8 and 7 the scale may
    turn out negative: that is how 4 symmetric bits get to use all 16 levels. With one end it never does.
    """
    peak = _peak(x)
    if len(ends) == 1:
        peak = peak.abs()
    best = store(peak / ends[0])
    if how == "max":
        return best

    # With v the levels that a trial scale rounds to, the best scale for them is sum(wxv) / sum(wvv), and it lowers the
    # error by sum(wxv)^2 / sum(wvv): one rounding and two sums judge a trial, and no second rounding is needed.
    weighted = x if importance is None else x * importance
    wanted, most = best, torch.zeros_like(best)

    def consider(trial: Tensor) -> None:
        nonlocal wanted, most
        v = snap(x * _inverse(trial).unsqueeze(-1), levels)
        along = (weighted * v).sum(-1)
        size = (v.square_() if importance is None else v.square_().mul_(importance)).sum(-1)
        gain = along * along / _safe(size)
        better = gain > most
        wanted, most = torch.where(better, along / _safe(size), wanted), torch.where(better, gain, most)

    for end in ends:
        for stretch in _STRETCHES:
            consider(peak / (end + (stretch if end > 0 else -stretch)))
    consider(wanted)
    wanted = store(wanted)
    return torch.where(_error(x, levels, importance, wanted) < _error(x, levels, importance, best), wanted, best)


def fit_scale_and_min(x: Tensor, top: int, importance: Tensor | None = None, how: How = "search") -> tuple[Tensor, Tensor]:
    """(scale, min), both >= 0, of x ~ scale * q - min with q in 0..top."""
    low, high = x.amin(-1).clamp(max=0), x.amax(-1).clamp(min=0)
    scale, minimum = (high - low) / top, -low
    if how == "max":
        return scale, minimum

    one = torch.ones_like(x) if importance is None else importance.expand_as(x)
    sum_w, sum_x, sum_xx = one.sum(-1), (one * x).sum(-1), (one * x * x).sum(-1)
    best_error = torch.full_like(scale, torch.inf)
    best_scale, best_min = scale, minimum
    for stretch in (-1.0, -0.6, -0.3, 0.0, 0.3, 0.7, 1.2, 1.8, 2.6):
        trial_scale, trial_min = (high - low) / (top + stretch), minimum
        for _ in range(2):  # codes for the grid, the least-squares grid for the codes, and once more
            q = (x + trial_min.unsqueeze(-1)).div_(_safe(trial_scale).unsqueeze(-1)).round_().clamp_(0, top)
            wq = one * q
            sum_q, sum_qq, sum_qx = wq.sum(-1), (wq * q).sum(-1), (wq * x).sum(-1)
            determinant = sum_w * sum_qq - sum_q * sum_q
            solvable = determinant > 1e-7 * sum_w * sum_qq  # all codes alike: no slope can be read off them
            slope = torch.where(solvable, (sum_w * sum_qx - sum_q * sum_x) / _safe(determinant), trial_scale)
            base = torch.where(solvable, (sum_qq * sum_x - sum_q * sum_qx) / _safe(determinant), -trial_min)
            positive = base > 0  # the stored minimum has no sign: where it wants one, the line goes through zero
            slope = torch.where(positive, sum_qx / _safe(sum_qq), slope).clamp(min=0)
            base = torch.where(positive, torch.zeros_like(base), base)
            error = sum_xx + slope * slope * sum_qq + base * base * sum_w
            error += 2 * (slope * base * sum_q - slope * sum_qx - base * sum_x)
            better = error < best_error
            best_error = torch.where(better, error, best_error)
            best_scale, best_min = torch.where(better, slope, best_scale), torch.where(better, -base, best_min)
            trial_scale, trial_min = slope, -base
    return best_scale, best_min


def fit_two_level_scale(
    x: Tensor,
    levels: Levels,
    wanted: Tensor,
    per_super: int,
    integers: range,
    importance: Tensor | None = None,
    how: How = "search",
) -> tuple[Tensor, Tensor]:
    """Scales (rows, n) as small integers under one float16 per `per_super` of them: (sub int8, d float16).

    The search refits d to the codes after everything was rounded, and rounds again under the new d.
    """
    rows, n = wanted.shape
    low, high = integers.start, integers.stop - 1
    w = wanted.reshape(rows, -1, per_super)
    peak = _peak(w)
    d = as_float16(peak / (low if -low > high else high))

    def integers_for(d: Tensor) -> Tensor:
        return (w / _safe(d).unsqueeze(-1)).round().clamp(low, high).reshape(rows, n)

    def scale_of(sub: Tensor, d: Tensor) -> Tensor:
        return sub * d.repeat_interleave(per_super, 1)

    def error_of(sub: Tensor, d: Tensor) -> Tensor:
        return _error(x, levels, importance, scale_of(sub, d)).reshape(rows, -1, per_super).sum(-1)

    sub = integers_for(d)
    if how == "search":
        error = error_of(sub, d)
        for _ in range(2):
            unit = sub.unsqueeze(-1) * snap(x * _inverse(scale_of(sub, d)).unsqueeze(-1), levels)
            weighted = unit if importance is None else unit * importance
            above = (weighted * x).sum(-1).reshape(rows, -1, per_super).sum(-1)
            below = (weighted * unit).sum(-1).reshape(rows, -1, per_super).sum(-1)
            new_d = as_float16(above / _safe(below))
            new_sub = integers_for(new_d)
            new_error = error_of(new_sub, new_d)
            better = new_error < error
            error, d = torch.where(better, new_error, error), torch.where(better, new_d, d)
            sub = torch.where(better.repeat_interleave(per_super, 1), new_sub, sub)
    return sub.to(torch.int8), d.half()


def fit_two_level_scale_and_min(
    x: Tensor,
    top: int,
    scale: Tensor,
    minimum: Tensor,
    per_super: int,
    largest: int,
    importance: Tensor | None = None,
    how: How = "search",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scales and minima (rows, n) >= 0 as integers 0..largest under a float16 each: (sub, sub_min uint8, d, dmin float16)."""
    rows, n = scale.shape
    levels = tuple(float(q) for q in range(top + 1))
    per_block = (rows, -1, per_super)

    def integers_for(wanted: Tensor, d: Tensor) -> Tensor:
        return (wanted.reshape(per_block) / _safe(d).unsqueeze(-1)).round().clamp(0, largest).reshape(rows, n)

    def decoded(sub: Tensor, sub_min: Tensor, d: Tensor, dmin: Tensor) -> tuple[Tensor, Tensor]:
        s = (sub * d.repeat_interleave(per_super, 1)).unsqueeze(-1)
        offset = -(sub_min * dmin.repeat_interleave(per_super, 1)).unsqueeze(-1)
        codes = encode(x, levels, s, offset)
        return codes, decode(codes, levels, s, offset)

    def error_of(values: Tensor) -> Tensor:
        difference = x - values
        square = difference * difference if importance is None else difference * difference * importance
        return square.sum(-1).reshape(per_block).sum(-1)

    def block_sum(product: Tensor) -> Tensor:
        return (product if importance is None else product * importance).sum(-1).reshape(per_block).sum(-1)

    d = as_float16(scale.reshape(per_block).amax(-1) / largest)
    dmin = as_float16(minimum.reshape(per_block).amax(-1) / largest)
    sub, sub_min = integers_for(scale, d), integers_for(minimum, dmin)
    if how == "search":
        codes, values = decoded(sub, sub_min, d, dmin)
        error = error_of(values)
        for _ in range(2):
            # x ~ d * (sub * q) - dmin * sub_min: two unknowns per super-block
            a, b = sub.unsqueeze(-1) * codes, -sub_min.unsqueeze(-1).expand_as(x)
            aa, ab, bb, ax, bx = block_sum(a * a), block_sum(a * b), block_sum(b * b), block_sum(a * x), block_sum(b * x)
            determinant = aa * bb - ab * ab
            solvable = determinant > 1e-7 * aa * bb
            new_d = torch.where(solvable, (bb * ax - ab * bx) / _safe(determinant), ax / _safe(aa))
            new_dmin = torch.where(solvable, (aa * bx - ab * ax) / _safe(determinant), dmin)
            new_d, new_dmin = as_float16(new_d.clamp(min=0)), as_float16(new_dmin.clamp(min=0))
            new_sub, new_sub_min = integers_for(scale, new_d), integers_for(minimum, new_dmin)
            codes, values = decoded(new_sub, new_sub_min, new_d, new_dmin)
            new_error = error_of(values)
            better = new_error < error
            error, d, dmin = torch.where(better, new_error, error), torch.where(better, new_d, d), torch.where(better, new_dmin, dmin)
            each = better.repeat_interleave(per_super, 1)
            sub, sub_min = torch.where(each, new_sub, sub), torch.where(each, new_sub_min, sub_min)
            codes, _ = decoded(sub, sub_min, d, dmin)
    return sub.to(torch.uint8), sub_min.to(torch.uint8), d.half(), dmin.half()


def in_row_chunks(fit: Callable[[Tensor], dict[str, Tensor]], w: Tensor, elements: int = 1 << 18) -> dict[str, Tensor]:
    """Fit a few rows at a time: the search holds a dozen arrays of its input's size, and rows are independent."""
    rows = max(1, elements // max(1, w.shape[1]))
    pieces = [fit(chunk) for chunk in w.split(rows)]
    return {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}


def _error(x: Tensor, levels: Levels, importance: Tensor | None, scale: Tensor) -> Tensor:
    square = (snap(x * _inverse(scale).unsqueeze(-1), levels).mul_(scale.unsqueeze(-1)).sub_(x)).square_()
    return (square if importance is None else square.mul_(importance)).sum(-1)


def _peak(x: Tensor) -> Tensor:
    """The value of largest magnitude, with its sign (20 times as fast as argmax and gather)."""
    low, high = x.aminmax(dim=-1)
    return torch.where(-low > high, low, high)


def _inverse(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, 0.0, 1 / scale)


def _safe(divisor: Tensor) -> Tensor:
    return torch.where(divisor == 0, 1.0, divisor)
