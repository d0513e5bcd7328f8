"""Tokens per second that a runtime generates here. A rate of this machine at this moment, not of the file."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fewbits.verification.session import Session

_PROMPT, _NEW = 16, 33  # tokens; the first new one comes with the prompt and is not counted
_SECONDS = 10.0  # at most


def tokens_per_second(session: Session, window: Sequence[int]) -> float | None:
    """None: the runtime decodes weights, or keeps no cache, so that its speed is not a user's."""
    prompt = list(window[: min(_PROMPT, len(window) // 2)])
    count = min(_NEW, len(window) - len(prompt))
    if not session.timed or count < 2:
        return None
    times: list[float] = []
    for _ in session.following(prompt, count):
        times.append(time.perf_counter())
        if times[-1] - times[0] > _SECONDS:
            break
    waits = [after - before for before, after in pairwise(times)]
    return 1 / wait if waits and (wait := median(waits)) > 0 else None  # the median: another program may stop ours for a while
