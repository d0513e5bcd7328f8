"""`--within 2h`: the best that there is time for.

Settings go from the least that makes a plan worth its name to all that was asked for, in the order of what they are worth: error
feedback first, then all formats to choose from, more text, tuned scales, and the rest of the text. The last step up is taken as far as time
goes. What was forecast is corrected by a block that was timed before, and by the clock: after calibrating and after measuring, the settings
of what is left are chosen anew.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from fewbits.errors import InputError
from fewbits.preflight.work import Step
from fewbits.reporting.meanwhile.whole import duration

if TYPE_CHECKING:
    from fewbits.formats import Format
    from fewbits.model.weights import Weight

LEAST_SAMPLES, SOME_SAMPLES = 16, 64
_LEAST_TOKENS, _FEWEST_TOKENS = 4096, 1024  # to judge on, planned and when there is no time left
_FEW = 6  # formats that make a plan with little more KL than all of them
_USED = 0.9  # of the time: forecasts are that good
# What a step takes beside its forecast, as a share of it: after measuring, a curve of the model where damage is large; small weights, which
# cost more for each number than the one that was timed; after verifying, how errors add up.
_BESIDE = {"calibrating": 0.02, "measuring": 0.15, "quantizing": 0.2, "verifying": 0.3}
_ANY = (256, 256)


@dataclass(frozen=True)
class Settings:
    """What time is spent on."""

    samples: int  # to calibrate with
    formats: tuple[Format, ...]  # to measure every weight in
    tune: int  # steps of tuning scales
    tokens: int  # to judge on

    def between(self, other: Settings, share: float) -> Settings:
        """On the way to the other one."""

        def part(low: int, high: int, unit: int) -> int:
            return low + int(share * (high - low)) // unit * unit

        added = [fmt for fmt in other.formats if fmt not in self.formats]
        kept = {*self.formats, *added[: part(0, len(added), 1)]}
        return Settings(
            part(self.samples, other.samples, 2),
            tuple(fmt for fmt in other.formats if fmt in kept),
            part(self.tune, other.tune, 1),
            part(self.tokens, other.tokens, 1),
        )


@dataclass(frozen=True)
class Deadline:
    """When the work must be over, by the clock that was read when it began."""

    seconds: float
    began: float
    clock: Callable[[], float] = time.monotonic

    @property
    def left(self) -> float:
        return self.began + self.seconds - self.clock()

    def check(self, least: float) -> None:
        """Refuses, before the work, what cannot be done in time."""
        if least > self.left:
            raise InputError(
                f"`--within {duration(self.seconds)}` is too short: the least that is worth doing takes about {duration(least)}",
                "give more time, `--method rtn --format NAME`, which calibrates nothing, or fewer `--formats`",
            )


def ladder(full: Settings, weights: Sequence[Weight], done: Sequence[str] = ()) -> list[Settings]:
    """From the least to all that was asked for. What is done already stays as it is."""
    if "quantizing" in done:
        return [replace(full, tokens=min(full.tokens, _FEWEST_TOKENS)), full]
    samples = full.samples if done else min(full.samples, LEAST_SAMPLES)
    formats = full.formats if "measuring" in done else few(full.formats, weights)
    steps = [replace(full, samples=samples, formats=formats, tune=0, tokens=min(full.tokens, _LEAST_TOKENS))]
    steps.append(replace(steps[-1], formats=full.formats, tokens=full.tokens))
    steps.append(replace(steps[-1], samples=max(samples, min(full.samples, SOME_SAMPLES))))
    steps.append(replace(steps[-1], tune=full.tune))
    steps.append(full)
    return list(dict.fromkeys(steps))


def few(formats: Sequence[Format], weights: Sequence[Weight]) -> tuple[Format, ...]:
    """Some of all widths that each weight can take: the smallest file stays possible, and the largest."""
    if len(formats) <= _FEW:
        return tuple(formats)
    taking = {tuple(fmt for fmt in formats if fmt.fits(weight.shape) is None) for weight in weights}
    picked: set[Format] = set()
    for possible in taking:
        by_bits = {fmt.bits_per_weight(_ANY): fmt for fmt in possible}  # of several as wide, the last
        widths = sorted(by_bits)
        picked |= {by_bits[widths[round(i * (len(widths) - 1) / (_FEW - 1))]] for i in range(_FEW) if widths}
    return tuple(fmt for fmt in formats if fmt in picked)


def choose(steps: Sequence[Settings], seconds: Callable[[Settings], float], left: float) -> Settings:
    """The farthest on this way that `left` seconds allow; the first if not even that fits."""
    allowed, best = _USED * left, steps[0]
    for low, high in pairwise(steps):
        if seconds(high) <= allowed:
            best = high
            continue
        share, step = 0.0, 0.5
        while step > 1 / 256:
            if seconds(low.between(high, share + step)) <= allowed:
                share += step
            step /= 2
        return low.between(high, share) if seconds(low.between(high, share)) <= allowed else best
    return best


def total(steps: Sequence[Step], done: Sequence[str] = ()) -> float:
    """Seconds of the steps that are not done, with what comes after each."""
    return sum(step.seconds * (1 + _BESIDE.get(step.name, 0.0)) for step in steps if step.name not in done)


def left_out(full: Settings, chosen: Settings) -> tuple[str, ...]:
    """For a person."""
    said = []
    if chosen.samples < full.samples:
        said.append(f"{chosen.samples} of {full.samples} samples")
    if len(chosen.formats) < len(full.formats):
        said.append(f"{len(chosen.formats)} of {len(full.formats)} formats to choose from")
    if chosen.tune < full.tune:
        said.append(f"{chosen.tune} of {full.tune} steps of tuning" if chosen.tune else "no tuned scales")
    if chosen.tokens < full.tokens:
        said.append(f"judged on {chosen.tokens:,} of {full.tokens:,} tokens")
    return tuple(said)


def gained(before: Settings, after: Settings) -> tuple[str, ...]:
    """For a person."""
    said = [(len(after.formats) - len(before.formats), f"{len(after.formats)} formats to choose from")]
    said += [
        (after.tune - before.tune, f"{after.tune} steps of tuning"),
        (after.tokens - before.tokens, f"judged on {after.tokens:,} tokens"),
    ]
    return tuple(text for more, text in said if more > 0)
