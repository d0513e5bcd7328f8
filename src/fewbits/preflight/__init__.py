"""A model and the work to be done in; the memory, disk and time that it will need on this machine out, before it starts.

Memory and disk are upper bounds: every weight counts as if no other shared its input, every buffer as if it were full. Pages of mapped
files (checkpoint, statistics, a GGUF) are not counted, since the system may drop them. Memory is bounded by the largest block, the largest
weight and `--memory`, except in a runtime that loads all of a file. Seconds are a forecast: operations divided by the rate that a matrix
product of the model's size reaches now. A forward pass reaches half of that rate (0.53 on the embedded model).

work.py   what is to be done        sizes.py     of the model                              steps.py      what each step takes
probe.py  one block of it, timed    within.py    what there is time for, with `--within`   schedule.py   the same, by the clock of the run
processes.py  how many processes measure and quantize
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits.devices import host
from fewbits.errors import MissingError
from fewbits.preflight.sizes import Sizes
from fewbits.preflight.steps import rate_of, steps_of
from fewbits.preflight.work import USUAL, Pace, Step, Work
from fewbits.progress import Part
from fewbits.reporting.meanwhile.steps import parts_of
from fewbits.reporting.meanwhile.whole import duration
from fewbits.reporting.terminal import size as _size

if TYPE_CHECKING:
    from fewbits.planning import Plan
    from fewbits.preflight.sizes import Source
    from fewbits.targets import Target

__all__ = ["Pace", "Preflight", "Step", "Work", "preflight"]


@dataclass(frozen=True)
class Preflight:
    steps: tuple[Step, ...]
    folder: str  # of the output
    free_memory: int | None
    free_disk: int | None
    held: int = 0  # bytes of an earlier run in the work folder: reused or replaced
    blocks: int = 0  # of the model
    parts: tuple[Part, ...] = ()  # of the steps, as progress is told of them, in their order

    @property
    def memory(self) -> int:
        return max(step.memory for step in self.steps)

    @property
    def disk(self) -> int:
        return sum(step.disk for step in self.steps)

    @property
    def seconds(self) -> float:
        return sum(step.seconds for step in self.steps)

    def check(self) -> None:
        """Refuses now, not after an hour, what does not fit."""
        largest = max(self.steps, key=lambda step: step.memory)
        if self.free_memory is not None and self.memory > self.free_memory:
            raise MissingError(
                f"{largest.name} needs {_size(self.memory)} of memory, and {_size(self.free_memory)} are free", _LESS_MEMORY[largest.name]
            )
        if self.free_disk is not None and self.disk > self.free_disk + self.held:
            calibrates = any(step.name == "calibrating" for step in self.steps)
            raise MissingError(
                f"the work needs {_size(self.disk)} on the disk of `{self.folder}`, and {_size(self.free_disk)} are free",
                "free some space, or choose another `-o`" + (", or calibrate with fewer `--samples`" if calibrates else ""),
            )

    def line(self, done: Mapping[str, float] | None = None) -> str:
        """For a person. `done`: the share of a step that an earlier run did."""
        left = {step.name: step.seconds * (1 - (done or {}).get(step.name, 0.0)) for step in self.steps}
        names = ", ".join(f"{name} {duration(seconds)}" for name, seconds in left.items() if seconds >= 1)
        needs = f"up to {_size(self.memory)} of memory, {_size(self.disk)} of disk, about {duration(sum(left.values()))}"
        earlier = ", with what an earlier run did" if any((done or {}).values()) else ""
        return f"this will need {needs}" + (f" ({names}{earlier})" if names else "")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"memory": self.memory, "disk": self.disk, "seconds": self.seconds}


_LESS_MEMORY = {
    "calibrating": "give fewer `--samples`, a smaller `--memory`, or `--method rtn`, which calibrates nothing",
    "measuring": "give fewer threads (OMP_NUM_THREADS), or a plan or a `--format` instead of a budget",
    "forecasting": "give a smaller `--memory`, or close other programs",
    "quantizing": "close other programs, or use `--method rtn`",
    "tuning": "use `--tune 0`",
    "verifying": "close other programs, or use `--no-verify` and verify on a larger machine",
}


def preflight(
    source: Source,
    target: Target,
    out: Path,
    work: Work,
    plan: Plan | None = None,
    pace: Pace = USUAL,
    *,
    rate: float | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Preflight:
    """`out`: the file to be written; the work folder is beside it. `plan`: if it is known; else 16 bits for every weight are counted.
    `rate`: operations a second, if that is known; else `clock` measures it: `time.process_time` ignores other programs."""
    sizes = Sizes(source, target, work, plan)
    steps = steps_of(sizes, work, rate or rate_of(source.weights, clock), pace)
    left = out.with_name(f"{out.name}.work").rglob("*")
    return Preflight(
        blocks=sizes.layers,
        parts=parts_of([(step.name, step.seconds) for step in steps], len(list(sizes.weights)), sizes.layers, work.makes),
        steps=tuple(steps),
        folder=str(out.parent),
        free_memory=host.free_memory(),
        free_disk=host.free_disk(out),
        held=sum(file.stat().st_size for file in left if file.is_file() and not file.is_symlink()),
    )
