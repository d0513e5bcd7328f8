"""Files beside each other: all were run on the same tokens, so that their differences are known far better than the files themselves.

Whether one file is closer than another is asked position by position: the interval is of the mean difference, resampled in pairs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from fewbits.verification.metrics import MeasuredLogits, Verdict, bootstrap_ci95


@dataclass(frozen=True)
class Difference:
    """The mean KL of a file minus that of another, on the same tokens."""

    to: str  # the name of the other
    kl: float
    ci95: tuple[float, float]  # paired

    @property
    def sure(self) -> bool:
        """The interval leaves 0 out."""
        return self.ci95[0] > 0 or self.ci95[1] < 0


@dataclass(frozen=True)
class ComparedFile:
    name: str
    verdict: Verdict
    tokens_per_second: float | None = None  # generating, on this machine; None: the runtime does not run it as a user would
    to_best: Difference | None = None  # None: it is the closest of all
    beaten_by: Difference | None = None  # the closest file of no more bytes; None: it is on the frontier

    @property
    def on_frontier(self) -> bool:
        return self.beaten_by is None and math.isfinite(self.verdict.kl_mean)


@dataclass(frozen=True)
class Refused:
    """What was not run, and why."""

    file: str
    reason: str
    missing: bool = False  # nothing is wrong with it: its runtime is not here


@dataclass(frozen=True)
class Comparison:
    model: str
    tokens: int
    machine: str  # on which the speeds were measured
    compared: tuple[ComparedFile, ...]  # by rising bytes
    refused: tuple[Refused, ...] = ()
    reference: str | None = None  # what they were compared with, if that is no float model

    def __str__(self) -> str:
        closest = min(self.compared, key=lambda file: file.verdict.kl_mean, default=None)
        best = f"the closest is {closest.name}: KL {closest.verdict.kl_mean:.4g}" if closest else "none could be opened"
        frontier = ", ".join(file.name for file in self.compared if file.on_frontier)
        first = f"{len(self.compared)} files of {self.model} on {self.tokens} tokens, {len(self.refused)} left out"
        return f"{first}\n{best}\non the frontier of bytes and KL: {frontier or 'none'}"

    def to_dict(self) -> dict[str, Any]:
        content = asdict(self)
        for row, file in zip(content["compared"], self.compared, strict=True):
            row["verdict"] = file.verdict.to_dict()
            row["on_frontier"] = file.on_frontier
        return content


def ranked(
    measured: Mapping[str, MeasuredLogits], verdicts: Mapping[str, Verdict], speeds: Mapping[str, float | None]
) -> tuple[ComparedFile, ...]:
    """By rising bytes. Files at which a figure is not finite are beaten by nobody and are on no frontier."""
    finite = [name for name in measured if math.isfinite(verdicts[name].kl_mean)]
    best = min(finite, key=lambda name: verdicts[name].kl_mean, default=None)
    rows = []
    for name in sorted(measured, key=lambda name: (verdicts[name].bytes, verdicts[name].kl_mean)):
        closest = difference(measured, name, best) if best and name in finite and name != best else None
        better = _better(name, finite, verdicts)
        beaten = difference(measured, name, better) if better else None
        rows.append(ComparedFile(name, verdicts[name], speeds.get(name), closest, beaten))
    return tuple(rows)


def difference(measured: Mapping[str, MeasuredLogits], name: str, other: str) -> Difference:
    apart = np.array(measured[name].kl) - np.array(measured[other].kl)
    return Difference(other, float(apart.mean()), bootstrap_ci95(apart))


def _better(name: str, finite: Sequence[str], verdicts: Mapping[str, Verdict]) -> str | None:
    """The closest of the files that are no larger and closer, or smaller and as close."""
    if name not in finite:
        return None
    mine = verdicts[name]
    others = [
        other for other in finite
        if verdicts[other].bytes <= mine.bytes and verdicts[other].kl_mean <= mine.kl_mean
        and (verdicts[other].bytes, verdicts[other].kl_mean) != (mine.bytes, mine.kl_mean)
    ]  # fmt: skip
    return min(others, key=lambda other: verdicts[other].kl_mean, default=None)
