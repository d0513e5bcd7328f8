"""Rounds of plan, quantize and verify, until the smallest file is found that is accurate enough.

Each plan is made into a file that is run, and the measurement corrects the prediction of the next round. Measured quantities grow with
the predicted KL p as A p^b: b is known (1 for a KL and a log perplexity, 1/2 for the share of changed tokens), A is learnt. Plans that
passed and plans that failed bound the next one from both sides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from fewbits.planning.accuracy import Thresholds

ROUNDS = 5
_FIRST = 0.88  # of the limit, before anything was measured: the measured KL is mostly 1.1 to 1.2 times the predicted one
_AIM = 0.96  # of the limit: a plan aimed at the limit itself fails every second time
_CLOSE = 0.90  # of the limit in KL: from here on a smaller file could save about 1 % of its bytes
_NARROW = 1.12  # ratio of the least KL that failed to the most that passed: below it the search ends
_LEAST = 1e-3  # of the least KL that failed: a passing prediction counts as at least this
_INNER = 0.3  # the next plan stays this share of their logarithmic distance away from either bound
_STEP = 8.0  # the largest factor from one round to the next


class Verdict(Protocol):
    """What a file measured, as far as limits go."""

    @property
    def passed(self) -> bool: ...

    @property
    def kl_mean(self) -> float: ...

    @property
    def top1_agreement(self) -> float: ...

    @property
    def ppl_ratio(self) -> float: ...


@dataclass(frozen=True)
class Round:
    predicted: float  # KL of the plan
    nbytes: int
    verdict: Verdict

    @property
    def passed(self) -> bool:
        return self.verdict.passed


@dataclass(frozen=True)
class SearchResult:
    rounds: tuple[Round, ...]
    best: int | None  # index of the smallest that passed; None: none did


def search(first: float, limits: Thresholds, attempt: Callable[[float], Round | None], least: float, most: int = ROUNDS) -> SearchResult:
    """`attempt` makes and verifies the smallest plan within a predicted KL; None: that plan was made before. `least`: the predicted KL of
    the best plan there is."""
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
    return SearchResult(tuple(done), min(passed, key=lambda i: done[i].nbytes, default=None))


def _next(done: Sequence[Round], limits: Thresholds, least: float) -> float | None:
    """The predicted KL to plan for next; None: there is nothing left to gain."""
    last = done[-1]
    used = _used(last.verdict, limits)
    passing = max((each.predicted for each in done if each.passed), default=None)
    failing = min((each.predicted for each in done if not each.passed), default=None)
    if passing is not None and failing is not None:
        passing = max(passing, failing * _LEAST)  # an unquantized plan is predicted at 0
    if last.passed and used >= _CLOSE:
        return None
    if passing is not None and failing is not None and failing / passing < _NARROW:
        return None
    wanted = last.predicted * min(max(_AIM / max(used, 1e-9), 1 / _STEP), _STEP)
    if passing is not None and failing is not None:  # keep away from both bounds, whose results are known
        wide = failing / passing
        wanted = min(max(wanted, passing * wide**_INNER), passing * wide ** (1 - _INNER))
    if wanted < least:
        return least if failing is None or failing > least * 1.001 else None
    return wanted


def _used(verdict: Verdict, limits: Thresholds) -> float:
    """The share of the limit that is used up, in terms of KL; above 1: failed. Of several limits the largest share."""
    shares = []
    if limits.max_kl is not None:
        shares.append(verdict.kl_mean / max(limits.max_kl, 1e-12))
    if limits.min_agreement is not None:
        shares.append(((1 - verdict.top1_agreement) / max(1 - limits.min_agreement, 1e-9)) ** 2)
    if limits.max_ppl_ratio is not None:
        shares.append(max(math.log(verdict.ppl_ratio), 0.0) / max(math.log(max(limits.max_ppl_ratio, 1.0)), 1e-9))
    return max(share if math.isfinite(share) else math.inf for share in shares)
