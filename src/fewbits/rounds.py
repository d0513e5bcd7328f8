"""Rounds of plan, quantize and verify, until the smallest file is found that is accurate enough.

A forecast is never trusted: the file is run, and what it measured corrects the forecast of the next round. Measured quantities grow with
the predicted KL p as A p^b, with b known (a KL and a log perplexity as p, a share of changed tokens as its square root) and A learnt;
plans that passed and plans that failed bound the next one from both sides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fewbits.verification import Thresholds, Verdict

ROUNDS = 5
_FIRST = 0.88  # of the limit, before anything was measured: what is measured is mostly 1.1 to 1.2 times the forecast
_AIM = 0.96  # of the limit: a plan aimed at the limit itself fails every second time
_CLOSE = 0.90  # of the limit in KL: from here on a smaller file could save about 1 % of its bytes
_NARROW = 1.12  # between the least that failed and the most that passed: nothing is left to be found
_LEAST = 1e-3  # of a failing prediction: below that nothing is told apart
_INNER = 0.3  # of what is left between the two, in logarithms, is kept away from each
_STEP = 8.0  # at most, from one round to the next


@dataclass(frozen=True)
class Round:
    predicted: float  # KL of the plan
    nbytes: int
    verdict: Verdict

    @property
    def passed(self) -> bool:
        return self.verdict.passed


@dataclass(frozen=True)
class Outcome:
    rounds: tuple[Round, ...]
    best: int | None  # index of the smallest that passed; None: none did


def search(first: float, limits: Thresholds, attempt: Callable[[float], Round | None], least: float, most: int = ROUNDS) -> Outcome:
    """`attempt` makes and verifies the smallest plan within a predicted KL; None: it was made before. `least`: what the best plan is
    predicted at: below it there is nothing to try."""
    done: list[Round] = []
    allowed = max(first * _FIRST, least)
    while len(done) < most:
        made = attempt(allowed)
        if made is None:
            break
        done.append(made)
        following = _next(done, limits, least)
        if following is None:
            break
        allowed = following
    passed = [i for i, each in enumerate(done) if each.passed]
    return Outcome(tuple(done), min(passed, key=lambda i: done[i].nbytes, default=None))


def _next(done: Sequence[Round], limits: Thresholds, least: float) -> float | None:
    """The predicted KL to plan for next; None: there is nothing left to gain."""
    last = done[-1]
    used = _used(last.verdict, limits)
    passing = max((each.predicted for each in done if each.passed), default=None)
    failing = min((each.predicted for each in done if not each.passed), default=None)
    if passing is not None and failing is not None:
        passing = max(passing, failing * _LEAST)  # a plan that keeps all in float is predicted at nothing
    if last.passed and used >= _CLOSE:
        return None
    if passing is not None and failing is not None and failing / passing < _NARROW:
        return None
    wanted = last.predicted * min(max(_AIM / max(used, 1e-9), 1 / _STEP), _STEP)
    if passing is not None and failing is not None:  # not too near to either: they are known already
        wide = failing / passing
        wanted = min(max(wanted, passing * wide**_INNER), passing * wide ** (1 - _INNER))
    if wanted < least:
        return least if failing is None or failing > least * 1.001 else None
    return wanted


def _used(verdict: Verdict, limits: Thresholds) -> float:
    """How much of the limit is used up, as a factor of KL; above 1: failed. Of several limits the one that is used most."""
    shares = []
    if limits.max_kl is not None:
        shares.append(verdict.kl_mean / max(limits.max_kl, 1e-12))
    if limits.min_agreement is not None:
        shares.append(((1 - verdict.top1_agreement) / max(1 - limits.min_agreement, 1e-9)) ** 2)
    if limits.max_ppl_ratio is not None:
        shares.append(max(math.log(verdict.ppl_ratio), 0.0) / max(math.log(max(limits.max_ppl_ratio, 1.0)), 1e-9))
    return max(share if math.isfinite(share) else math.inf for share in shares)
