"""What is to be done, and what a step of it takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Work:
    """What is to be done."""

    samples: int = 0  # to calibrate with; 0: nothing is calibrated
    length: int = 512  # tokens of the longest
    buffer: int = 1 << 30  # bytes of hidden states that stay in memory while calibrating
    formats: int = 0  # how many every weight is measured in; 0: the plan is given
    divisors: tuple[int, ...] = ()  # columns that each of these formats packs together; weights that they do not divide skip it
    feedback: bool = True  # some codes are chosen by error feedback
    makes: int = 1  # the most plans that are made: rounds until an accuracy is met
    tune: int = 0  # steps of tuning scales
    verified: int = 0  # tokens that the file is judged on; 0: it is not run
    forecast: int = 0  # tokens that a damaged copy of the model is run on, for a forecast by kind of text
    size: str | None = None  # `--size`, which the plan will not exceed
    processes: int = 1  # that measure and quantize; 1: this one alone
    text: int | None = None  # tokens of all samples; None: all are as long as the longest

    def formats_of(self, columns: int) -> int:
        return sum(columns % block == 0 for block in self.divisors) if self.divisors else self.formats

    @property
    def tokens(self) -> int:
        return self.samples * self.length if self.text is None else self.text


@dataclass(frozen=True)
class Step:
    name: str
    memory: int  # bytes at the most, beyond the idle process
    disk: int  # bytes in the work folder and of the output
    seconds: float


@dataclass(frozen=True)
class Pace:
    """How many times as long as forecast the steps take on this machine, as far as something of this model was timed."""

    by_step: Mapping[str, float] = field(default_factory=dict)

    def of(self, step: str) -> float:
        return self.by_step.get(step, 1.0)


USUAL = Pace()
