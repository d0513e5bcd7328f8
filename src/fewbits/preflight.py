"""What the work itself will need on this machine, before it starts: memory, disk and about how long, from shapes and a look at the speed.

Memory and disk are counted from above: every weight as if it had an input of its own, every buffer as if the others were full. Memory is
what a process cannot do without: pages of mapped files (checkpoint, statistics, a GGUF) are not counted. It is bounded by the largest
block, the largest weight and `--memory`, except in a runtime that loads all of a file. Seconds are a forecast: operations over the rate
that a product of the model's own size reaches here now. Half of that rate is what a forward pass reaches (0.53 on the embedded model),
and what is not a product is given in operations that would take as long:

    calibrating   a forward pass with second moments, then another one and its gradients: 4.9 forward passes by count, 5.5 measured
    measuring     15,000 cols^2 for each weight and format (13,500 on the embedded model, 16,400 on SmolLM2)
    quantizing    10,000 a number by rounding; 70,000 with error feedback, and its products
    verifying     the float model and two files in the runtime, a forward pass each
"""

from __future__ import annotations

import math
import re
import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits import formats, hardware
from fewbits.capacity import machine
from fewbits.errors import InputError, MissingError
from fewbits.planning import budgets

if TYPE_CHECKING:
    from fewbits.model import Model, Weight
    from fewbits.planning import Plan
    from fewbits.targets import Target

_FLOAT, _DOUBLE, _HALF = 4, 8, 2
_BATCH = 2048  # tokens; calibration/collecting.py
_SHARD = 1 << 28  # bytes that an artifact holds back before it writes them; artifact.py
_WHOLE = 2048  # columns: second moments up to here are read as squares, wider ones stay mapped; calibration/storing.py
_INPUTS = 544  # tokens whose rounding is tried while a weight is measured; sensitivity/predicting.py
_PACKED_APART = 1024  # columns: up to here triangles are packed beside their square; calibration/triangles.py
_KEPT = 8  # inputs of each sample that are kept as they were; calibration/recording.py
_MARGIN = 64 << 20  # bytes of memory: what Python, the allocator and threads take on the way
_LIBRARY = 64 << 20  # bytes of memory: a runtime's own library, loaded when a file is first run in it
_HISTOGRAM = 64 << 10  # bytes of statistics for each weight beside its moments: ranges, histogram, names
_EFFICIENCY = 0.53
_MEASURED, _ROUNDED, _FED_BACK = 15_000, 10_000, 70_000  # operations that take as long
_FEEDBACK_PASSES = 6
_LOOK = 0.1  # seconds to look at the speed
_STARTING = 1.0  # seconds until two sessions of a runtime are there and have read a vocabulary
_DISK_RATE = 200e6  # bytes per second: a slow SSD


@dataclass(frozen=True)
class Work:
    """What is going to be done."""

    samples: int = 0  # to calibrate with; 0: nothing is calibrated
    length: int = 512  # tokens of each
    buffer: int = 1 << 30  # bytes of hidden states that stay in memory while calibrating
    formats: int = 0  # that every weight is measured in; 0: the plan is given
    feedback: bool = True  # codes are chosen by error feedback, or by trying both ways
    makes: int = 1  # plans that are made at most: rounds until an accuracy is met
    verified: int = 0  # tokens that the file is judged on; 0: it is not run
    size: str | None = None  # what `--size` asks for: the weights take no more, whatever the plan will be

    @property
    def tokens(self) -> int:
        return self.samples * self.length


@dataclass(frozen=True)
class Step:
    name: str
    memory: int  # bytes at the most, beyond the idle process
    disk: int  # bytes in the work folder and of the output: kept until the end, or for a while
    seconds: float


@dataclass(frozen=True)
class Preflight:
    steps: tuple[Step, ...]
    folder: str  # that the output goes to
    free_memory: int | None
    free_disk: int | None
    held: int = 0  # bytes that an earlier run has left in the work folder: they are gone on with, or make room

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
        """What cannot fit is refused now, not after an hour."""
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

    def line(self) -> str:
        """For a terminal."""
        names = ", ".join(f"{step.name} {_duration(step.seconds)}" for step in self.steps if step.seconds >= 1)
        needs = f"up to {_size(self.memory)} of memory, {_size(self.disk)} of disk, about {_duration(self.seconds)}"
        return f"this will need {needs}" + (f" ({names})" if names else "")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"memory": self.memory, "disk": self.disk, "seconds": self.seconds}


_LESS_MEMORY = {
    "calibrating": "give fewer `--samples`, a smaller `--memory`, or `--method rtn`, which calibrates nothing",
    "measuring": "give fewer threads (OMP_NUM_THREADS), or a plan or a `--format` instead of a budget",
    "quantizing": "close other programs, or use `--method rtn`",
    "verifying": "close other programs, or use `--no-verify` and verify on a larger machine",
}


def preflight(
    source: Model, target: Target, out: Path, work: Work, plan: Plan | None = None, *, clock: Callable[[], float] = time.perf_counter
) -> Preflight:
    """`out`: what will be written; the work folder lies beside it. `plan`: where it is known; else 16 bits for every weight are counted.
    `clock`: what the speed is looked at with; `time.process_time` leaves out what other programs take."""
    sizes = _Sizes(source, target, work, plan)
    rate = _rate(source.weights, clock) * _EFFICIENCY
    steps = [_quantizing(sizes, work, rate)]
    if work.formats:
        steps.insert(0, _measuring(sizes, work, rate))
    if work.samples:
        steps.insert(0, _calibrating(sizes, work, rate))
    if work.verified:
        steps.append(_verifying(sizes, work, rate))
    left = out.with_name(f"{out.name}.work").rglob("*")
    return Preflight(
        steps=tuple(steps),
        folder=str(out.parent),
        free_memory=machine.free_memory(),
        free_disk=_free(_existing(out)),
        held=sum(file.stat().st_size for file in left if file.is_file() and not file.is_symlink()),
    )


@dataclass(frozen=True)
class _Sizes:
    """Bytes and numbers that the steps share."""

    source: Model
    target: Target
    work: Work
    plan: Plan | None

    @property
    def weights(self) -> Iterable[Weight]:
        return self.source.weights

    @cached_property
    def numbers(self) -> int:
        return sum(_numbers(weight) for weight in self.weights)

    @cached_property
    def multiplied(self) -> float:
        """By each token: all but tables that are looked up in, and experts that are not chosen."""
        return sum(_numbers(weight) * self.met(weight) for weight in self.weights if weight.kind != "embedding" or weight.tied_to)

    def met(self, weight: Weight) -> float:
        """The share of tokens that go through it."""
        count = hardware.experts(self.source.config) if weight.expert is not None else 0
        return int(getattr(self.source.config, "num_experts_per_tok", count)) / count if count else 1.0

    @cached_property
    def blocks(self) -> dict[str, list[Weight]]:
        """By the block that they lie in; what lies in none under ``."""
        found: dict[str, list[Weight]] = {}
        for weight in self.weights:
            inside = re.match(r".*?\.\d+(?=\.)", weight.name)
            found.setdefault(inside[0] if inside else "", []).append(weight)
        return found

    @property
    def layers(self) -> int:
        return len(self.blocks) - ("" in self.blocks)

    @cached_property
    def moments(self) -> int:
        """Of the block that has most: two halves of the samples, columns squared, in float32, for each of its weights."""
        return max(sum(_moments(weight) for weight in own) for own in self.blocks.values())

    @cached_property
    def packed_apart(self) -> int:
        """Of these, what is copied once more on its way to the disk."""
        return max(sum(_moments(weight) // 2 for weight in own if weight.shape[1] <= _PACKED_APART) for own in self.blocks.values())

    @cached_property
    def block(self) -> int:
        """Bytes of the largest block in float32, or of what lies at both ends of the model: they are there in turn."""
        return _FLOAT * max(sum(map(_numbers, own)) for own in self.blocks.values())

    @cached_property
    def packed(self) -> int:
        """Of all weights, in the plan's formats."""
        if self.plan is None:
            return min(_HALF * self.numbers, self._asked)
        entries = self.plan.entries
        return sum(max(entry.nbytes, formats.get(entry.format).nbytes(entry.shape)) for entry in entries)

    @cached_property
    def _asked(self) -> int:
        size = budgets.parse_size(self.work.size) if self.work.size else None
        if isinstance(size, budgets.BitsPerWeight):
            return math.ceil(size.bits * self.numbers / 8)
        return size.nbytes if isinstance(size, budgets.FileBytes) else _HALF * self.numbers

    @cached_property
    def beside(self) -> int:
        """What goes into an output beside the weights: norms and biases, tokenizer, config, a plan and an account of each weight."""
        path = self.source.path
        files = [file for file in path.iterdir() if file.is_file() and file.suffix not in (".safetensors", ".bin")] if path.is_dir() else []
        if not files:  # a GGUF: its tokenizer is in its header
            files = self.source.checkpoint.files()[:1]
        kept = sum(_FLOAT * self.source.tensor(name).numel() for name in self.source.rest)
        return kept + 2 * sum(min(file.stat().st_size, 64 << 20) for file in files) + 2048 * sum(1 for _ in self.weights) + (1 << 20)

    @cached_property
    def session(self) -> int:
        """What a runtime takes beside the weights, for one window."""
        try:
            shape = hardware.shape(self.source.config)
        except (InputError, AttributeError):  # a model whose cache is not counted: a window's is small
            return 0
        return hardware.memory(shape, 0, hardware.Use(self.work.length)).total

    @property
    def hidden(self) -> int:
        return int(self.source.config.hidden_size)

    @property
    def vocabulary(self) -> int:
        return int(getattr(self.source.config, "vocab_size", 0))

    @cached_property
    def largest(self) -> int:
        return max(_numbers(weight) for weight in self.weights)


def _calibrating(sizes: _Sizes, work: Work, rate: float) -> Step:
    between = (sizes.layers + 2) * work.tokens * sizes.hidden * _FLOAT
    states = 2 * work.tokens * sizes.hidden * _FLOAT  # what a block reads and what it gives; the others lie in files
    batch = max(_BATCH, work.length)
    rows = max(sum(sum(weight.shape) for weight in own) for name, own in sizes.blocks.items() if name or len(sizes.blocks) == 1)
    heads = int(getattr(sizes.source.config, "num_attention_heads", 1))
    passing = _FLOAT * batch * (2 * rows + 2 * heads * work.length)  # inputs and outputs with their gradients; scores and theirs
    logits = 6 * _FLOAT * work.length * sizes.vocabulary
    kept = work.samples * max(weight.shape[1] for weight in sizes.weights) * (_FLOAT + _HALF * _KEPT) * 8
    spilling = min(work.buffer, states + sizes.moments)
    memory = sizes.block + spilling + sizes.packed_apart + max(passing, logits) + kept + _MARGIN
    multiplied = sizes.multiplied * 3 + sum(
        2 * weight.shape[1] ** 2 * sizes.met(weight) for weight in sizes.weights if weight.kind != "embedding"
    )
    return Step("calibrating", memory, _statistics_bytes(sizes, work) + between, 2 * multiplied * work.tokens / rate)


def _statistics_bytes(sizes: _Sizes, work: Work) -> int:
    """Upper triangles of two halves, of inputs and of gradients; sums in float64; inputs at the first position, and some others."""
    found = 0
    for weight in sizes.weights:
        rows, cols = weight.shape
        triangles = 2 * 2 * cols * (cols + 1) // 2 * _FLOAT
        sums = 2 * _DOUBLE * (rows + 4 * cols) + 4 * _FLOAT * cols
        samples = 0 if weight.kind == "embedding" and not weight.tied_to else work.samples * cols * (_FLOAT + _HALF * _KEPT)
        looked_up = _DOUBLE * rows + 2 * cols * (cols + 1) // 2 * _FLOAT if weight.kind == "embedding" else 0
        found += triangles + sums + samples + looked_up + _HISTOGRAM
    return found + work.samples * 64


def _measuring(sizes: _Sizes, work: Work, rate: float) -> Step:
    import torch

    from fewbits.sensitivity import predicting

    threads, method = torch.get_num_threads(), "auto" if work.feedback else "rtn"
    each = sorted((_FLOAT * (_numbers(w) + 3 * _INPUTS * w.shape[0]) + _opened(w) for w in sizes.weights), reverse=True)
    hessians = sorted((predicting.held_by(weight.shape[1], method) for weight in sizes.weights), reverse=True)
    together = min(sum(hessians[:threads]), max(hessians[0], predicting.TOGETHER))
    multiplied = sum(_MEASURED * weight.shape[1] ** 2 for weight in sizes.weights) * work.formats
    table = 256 * work.formats * len(each)
    return Step("measuring", sum(each[:threads]) + together + _MARGIN, 2 * table, multiplied / rate)


def _quantizing(sizes: _Sizes, work: Work, rate: float) -> Step:
    from fewbits.sensitivity import predicting

    held = min(sizes.packed + sizes.beside, _SHARD + _FLOAT * sizes.largest)
    hessians = [predicting.held_by(w.shape[1], "auto") + _opened(w) if work.feedback else _opened(w) for w in sizes.weights]
    each = max(8 * _FLOAT * _numbers(weight) + hessian for weight, hessian in zip(sizes.weights, hessians, strict=True))
    flat = sizes.numbers * (_FED_BACK if work.feedback else _ROUNDED)
    squares = sum(_numbers(weight) * weight.shape[1] for weight in sizes.weights if weight.kind != "embedding")
    products = _FEEDBACK_PASSES * 2 * squares if work.feedback else 0
    written = sizes.packed + sizes.beside
    seconds = (flat + products) / rate + 3 * written / _DISK_RATE
    # the weights that are kept, the artifact and the file of every plan, and the file under its temporary name
    disk = 2 * work.makes * written + work.makes * sizes.packed
    return Step("quantizing", held + each + _MARGIN, disk, work.makes * seconds)


def _verifying(sizes: _Sizes, work: Work, rate: float) -> Step:
    """The float model block by block beside the files; one in 16 bits, made for the runtime's own error, and the artifact it is made of
    where the target wants one. llama.cpp maps its files, and may lay the quantized one out anew; other runtimes load all of both."""
    floats = sum(formats.get(weight.dtype).nbytes(weight.shape) for weight in sizes.weights) + sizes.beside
    logits = 8 * _FLOAT * work.length * sizes.vocabulary
    making = min(floats, 3 * _FLOAT * sizes.largest if sizes.target.takes_drafts else _SHARD + 3 * _FLOAT * sizes.largest)
    states = min(work.buffer, 2 * work.verified * sizes.hidden * _FLOAT)
    loaded = {"llama.cpp": sizes.packed, "torch": sizes.block}.get(sizes.target.runtime, sizes.packed + floats)
    memory = loaded + max(making, sizes.block + states + logits + 2 * sizes.session) + _MARGIN + _LIBRARY
    seconds = 3 * 2 * sizes.multiplied * work.verified / rate + 4 * floats / _DISK_RATE + _STARTING
    return Step("verifying", memory, floats if sizes.target.takes_drafts else 2 * floats, work.makes * seconds)


def _opened(weight: Weight) -> int:
    """Second moments of inputs and gradients, as they are read; as squares, or mapped."""
    return 2 * _moments(weight) if weight.shape[1] <= _WHOLE else 0


def _numbers(weight: Weight) -> int:
    return weight.shape[0] * weight.shape[1]


def _moments(weight: Weight) -> int:
    return 2 * _FLOAT * weight.shape[1] ** 2


def _rate(weights: Iterable[Weight], clock: Callable[[], float]) -> float:
    """Multiplications and additions per second in a product of the size that this model has most of. Its best of a few: the first calls
    wake threads up."""
    import torch

    inside = [weight for weight in weights if weight.kind not in ("embedding", "convolution")] or list(weights)
    rows, cols = max((weight.shape for weight in inside), key=lambda shape: shape[0] * shape[1])
    x, w = torch.ones(512, cols), torch.ones(cols, min(rows, 4096))
    operations, best = 2 * x.shape[0] * w.shape[0] * w.shape[1], 0.0
    until = time.perf_counter() + _LOOK
    calls = 0
    while calls < 3 or time.perf_counter() < until:
        start, done = clock(), 0
        while done < 1 or clock() - start < _LOOK / 10:  # long enough for a clock that ticks in milliseconds
            x @ w
            done += 1
        best, calls = max(best, done * operations / (clock() - start)), calls + 1
    return best


def _existing(path: Path) -> Path:
    return next(folder for folder in path.absolute().parents if folder.is_dir())


def _free(folder: Path) -> int | None:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def _size(nbytes: float) -> str:
    from fewbits.reporting.terminal import size

    return size(nbytes)


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{max(1, seconds):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
