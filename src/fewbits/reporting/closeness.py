"""How close a file is to what it was made of, in a word and a sentence, for the page and the terminal. Thresholds or not: a file that met
the limits it was given may still be far away.

The steps are those of docs/reading-a-report.md. A perplexity counts only where its interval leaves 1 out.
"""

from __future__ import annotations

from typing import NamedTuple

from fewbits.verification.metrics import Verdict


class Closeness(NamedTuple):
    look: str  # close, near, far or broken: a class of the page's style
    word: str
    said: str


class _Step(NamedTuple):
    agreement: float  # at least
    ppl_ratio: float  # at most
    closeness: Closeness


_STEPS = (
    _Step(0.97, 1.02, Closeness("close", "Close", "the difference is hard to notice in text")),
    _Step(0.90, 1.05, Closeness("near", "Near", "some words differ")),
    _Step(0.80, 1.20, Closeness("far", "Far", "expect it to word things differently, and to be wrong more often")),
)
_BROKEN = Closeness("broken", "Damaged", "expect worse answers: it needs more bits")


def closeness(verdict: Verdict) -> Closeness | None:
    """None: the figures are not finite, which is a failure of its own."""
    if not (verdict.ppl_ratio > 0 and verdict.ppl_ratio < float("inf") and 0 <= verdict.top1_agreement <= 1):
        return None
    ratio = verdict.ppl_ratio if verdict.ppl_ratio_ci95[0] > 1 else 1.0
    return next((step.closeness for step in _STEPS if verdict.top1_agreement >= step.agreement and ratio <= step.ppl_ratio), _BROKEN)
