"""Contenders timed in turn: one, the next, and again, so that what disturbs the machine disturbs all of them, and ratios hold.

A round gives every contender one burst of calls, one after the other. Each call has its own time, the latency that a caller sees; a burst
stands for its fastest one. Ratios are taken between bursts of the same round, and their median over the rounds is reported with its
quartiles.

On a machine that is never idle, a call that had to wait for a processor says nothing about the contender. With one thread, the clock is
therefore the process's own processor time. With several, threads wait for each other, and one that waits for a processor holds up all:
Linux says how long threads waited and how long they ran, and calls that were disturbed are repeated, with some patience.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

ROUNDS = 7
_BURST = 0.03  # seconds of calls in a round
_MOST_CALLS = 2000  # in a burst
_LONG = 0.02  # seconds: beside a call as long, threads that must wake up first do not show
_CHUNK = 0.001  # seconds of calls, at least, between two looks at who waited: a look takes some 0.1 ms
_PRESENT = 0.85  # share of the processors that a contender was seen to use: a call that had fewer was disturbed
_WAITED = 0.02  # share of a call's time: a call that waited no longer was not disturbed
_PATIENCE = 0.6  # seconds for a burst, when calls are disturbed
_PAUSE = 0.03  # seconds: threads of OpenMP and of onnxruntime spin for up to 20 ms after a call, on the cores that the next one needs


@dataclass(frozen=True)
class Contender:
    name: str
    call: Callable[[int], object]  # given the number of the call: it takes the next copy of its weights each time
    processors: float = 0.0  # that it is known to use, if that is known: where the work is small, a library may leave some idle


@dataclass(frozen=True)
class Spread:
    """The median, and the quartiles around it."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Timed:
    name: str
    calls: tuple[float, ...]  # seconds of every single call that was not disturbed, or of all where each one was
    rounds: tuple[float, ...]  # seconds of the fastest call, for every round
    quiet: tuple[bool, ...]  # for every round: whether there was a call that was not disturbed

    @property
    def latency(self) -> Spread:
        return spread(self.calls)

    @property
    def undisturbed(self) -> Spread:
        """Seconds of the fastest call in a round, over the rounds that were quiet, if any was."""
        return spread(within(self.rounds, self.quiet))


@contextmanager
def on_threads(threads: int | None) -> Iterator[int]:
    """Kernels, ours and torch's, run on so many threads inside; None: on as many as before. Gives the number."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        yield threads or before
    finally:
        torch.set_num_threads(before)


def spread(values: Sequence[float]) -> Spread:
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, low, high)


def speedup(ours: Timed, other: Timed) -> Spread:
    """How many times as fast as the other one we are."""
    return ratio(other.rounds, other.quiet, ours.rounds, ours.quiet)


def ratio(upper: Sequence[float], upper_quiet: Sequence[bool], lower: Sequence[float], lower_quiet: Sequence[bool]) -> Spread:
    """Round by round, over rounds in which neither was disturbed. Without any, between all undisturbed rounds of the one and of the other;
    and if one of them has none, over all rounds."""
    rows = list(zip(upper, upper_quiet, lower, lower_quiet, strict=True))
    paired = [a / b for a, calm, b, calm_too in rows if calm and calm_too]
    apart = [a / b for a, calm, _, _ in rows if calm for _, _, b, calm_too in rows if calm_too]
    return spread(paired or apart or [a / b for a, _, b, _ in rows])


def within(values: Sequence[float], quiet: Sequence[bool]) -> list[float]:
    """The values of quiet rounds, or all of them if there was none."""
    return [value for value, calm in zip(values, quiet, strict=True) if calm] or list(values)


def interleaved(
    contenders: Sequence[Contender],
    rounds: int = ROUNDS,
    threads: int = 1,
    machine: Machine | None = None,
) -> list[Timed]:
    """`threads`: that each contender uses. With several, each burst begins when the threads of the one before are asleep."""
    machine = machine or (one_thread() if threads == 1 else several_threads())
    bursts = [_Bursts(contender, machine) for contender in contenders]
    for turn in range(rounds):
        for each in bursts if turn % 2 == 0 else reversed(bursts):  # nobody comes always after the same one
            if threads > 1:
                machine.sleep(_PAUSE)
            each.round()
    return [each.timed() for each in bursts]


@dataclass(frozen=True)
class Machine:
    """The clocks, in seconds."""

    now: Callable[[], float]
    worked: Callable[[], float]  # what the threads of this process have used of the processors, in all
    waited: Callable[[], float]  # how long they were ready to run while others had the processors
    sleep: Callable[[float], None]


def one_thread() -> Machine:
    """Processor time stands still while others have the processor: nothing to wait for."""
    return Machine(time.process_time, time.process_time, float, time.sleep)


def several_threads() -> Machine:
    return Machine(time.perf_counter, time.process_time, seconds_waited, time.sleep)


class _Bursts:
    """One contender's calls."""

    def __init__(self, contender: Contender, machine: Machine) -> None:
        self._contender, self._machine, self._number = contender, machine, 0
        self._rounds: list[tuple[list[tuple[float, float]], list[float]]] = []  # (seconds, processors) of calls left alone; all calls
        self._call()  # the first one allocates and starts threads
        first = self._call()
        self._expected = max(1e-9, first if first > _LONG else min(first, self._call(), self._call()))
        self._count = max(1, min(_MOST_CALLS, int(_BURST / self._expected)))
        self._most = contender.processors  # that a call is known to use, or was seen to

    def round(self) -> None:
        if self._expected < _LONG:
            self._call()  # its threads wake up
        chunk, end = max(1, min(self._count, int(_CHUNK / self._expected))), self._machine.now() + _PATIENCE
        left_alone: list[tuple[float, float]] = []
        every: list[float] = []
        while len(self._with_all(left_alone)) < self._count and (len(every) < self._count or self._machine.now() < end):
            waited, worked, begin = self._machine.waited(), self._machine.worked(), self._machine.now()
            some = [self._call() for _ in range(chunk)]
            processors = (self._machine.worked() - worked) / max(1e-9, self._machine.now() - begin)
            every += some
            if self._machine.waited() - waited <= _WAITED * sum(some):
                left_alone += [(seconds, processors) for seconds in some]
                self._most = max(self._most, processors)
        self._rounds.append((left_alone, every))

    def timed(self) -> Timed:
        undisturbed = [self._with_all(left_alone) for left_alone, _ in self._rounds]
        rounds = [min(good or every) for good, (_, every) in zip(undisturbed, self._rounds, strict=True)]
        calls = [seconds for good in undisturbed for seconds in good] or [seconds for _, every in self._rounds for seconds in every]
        return Timed(self._contender.name, tuple(calls), tuple(rounds), tuple(bool(good) for good in undisturbed))

    def _with_all(self, left_alone: list[tuple[float, float]]) -> list[float]:
        """Calls that had all their threads: one that still waits to run for the first time is in no statistics, but its work is missing."""
        return [seconds for seconds, processors in left_alone if processors >= _PRESENT * self._most]

    def _call(self) -> float:
        begin = self._machine.now()
        self._contender.call(self._number)
        self._number += 1
        return self._machine.now() - begin


def seconds_waited() -> float:
    """How long threads of this process were ready to run while others had the processors, in all. Zero where the system does not say."""
    total = 0
    try:
        for task in os.scandir("/proc/self/task"):
            with open(f"{task.path}/schedstat") as file:  # noqa: PTH123 - some microseconds less, hundreds of times
                total += int(file.read().split()[1])
    except (OSError, IndexError):  # no such system, or a thread that has just ended
        return 0.0
    return total / 1e9
