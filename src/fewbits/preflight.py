"""A model and the work to be done in; the memory, disk and time that it will need on this machine out, before it starts.

Memory and disk are upper bounds: every weight counts as if no other shared its input, every buffer as if it were full. Pages of mapped
files (checkpoint, statistics, a GGUF) are not counted, since the system may drop them. Memory is bounded by the largest block, the largest
weight and `--memory`, except in a runtime that loads all of a file. Seconds are a forecast: operations divided by the rate that a matrix
product of the model's size reaches now. A forward pass reaches half of that rate (0.53 on the embedded model). Work that is no product is
counted as the operations that would take as long:

    calibrating   a forward pass with second moments, then another one and its gradients: 4.9 forward passes by count, 5.5 measured
    measuring     1.85 million cols + 1,760 cols^2 for each weight and format that its columns divide into (256, 576 and 1536 columns:
                  9,000, 5,400 and 2,960 cols^2 on the embedded model and SmolLM2)
    quantizing    10,000 a number by rounding; 105,000 with error feedback, beside its products
    tuning        3.4 forward passes of a minibatch of 512 tokens for each step
    verifying     the float model and two files in the runtime, a forward pass each
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits import formats
from fewbits.artifact import SHARD_BYTES
from fewbits.calibration import output_moments
from fewbits.calibration.folder import WHOLE_COLUMNS
from fewbits.calibration.recorders import DRAWN_PER_SAMPLE
from fewbits.calibration.triangles import SMALL_COLUMNS
from fewbits.devices import host
from fewbits.errors import InputError, MissingError
from fewbits.formats.runtime import kv
from fewbits.model import Model
from fewbits.model.walk import BATCH_TOKENS
from fewbits.planning import budgets, footprint
from fewbits.progress import Part
from fewbits.reporting.meanwhile.steps import parts_of
from fewbits.reporting.meanwhile.whole import duration
from fewbits.reporting.terminal import size as _size
from fewbits.sensitivity import prediction

if TYPE_CHECKING:
    from fewbits.model.gguf.model import GgufModel
    from fewbits.model.weights import Weight
    from fewbits.planning import Plan
    from fewbits.targets import Target

    Source = Model | GgufModel

_FLOAT, _DOUBLE, _HALF = 4, 8, 2  # bytes
_MARGIN = 64 << 20  # bytes of memory for Python, the allocator and threads
_LIBRARY = 64 << 20  # bytes of memory for a runtime's library, loaded when a file is first run in it
_HISTOGRAM = 64 << 10  # bytes of statistics for each weight beside its moments: ranges, histogram, names
_EFFICIENCY = 0.53
_MEASURED = (1.85e6, 1760.0)  # equivalent operations, by columns and by their square
_ROUNDED, _FED_BACK = 10_000, 105_000
_FEEDBACK_PASSES, _TUNED, _MINIBATCH = 6, 3.4, 512
_LOOK = 0.1  # seconds to measure the speed
_STARTING = 1.0  # seconds to open two sessions of a runtime, which read a vocabulary
_DISK_RATE = 200e6  # bytes per second: a slow SSD


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
    tune: int = 0  # steps for each block
    verified: int = 0  # tokens that the file is judged on; 0: it is not run
    size: str | None = None  # `--size`, which the plan will not exceed
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
    "quantizing": "close other programs, or use `--method rtn`",
    "tuning": "use `--tune 0`",
    "verifying": "close other programs, or use `--no-verify` and verify on a larger machine",
}


def preflight(
    source: Source, target: Target, out: Path, work: Work, plan: Plan | None = None, *, clock: Callable[[], float] = time.perf_counter
) -> Preflight:
    """`out`: the file to be written; the work folder is beside it. `plan`: if it is known; else 16 bits for every weight are counted.
    `clock`: measures the speed; `time.process_time` ignores other programs."""
    sizes = _Sizes(source, target, work, plan)
    rate = _rate(source.weights, clock) * _EFFICIENCY
    steps = [_quantizing(sizes, work, rate)]
    if work.formats:
        steps.insert(0, _measuring(sizes, work, rate))
    if work.samples:
        steps.insert(0, _calibrating(sizes, work, rate))
    if work.tune:
        steps.append(_tuning(sizes, work, rate))
    if work.verified:
        steps.append(_verifying(sizes, work, rate))
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


@dataclass(frozen=True)
class _Sizes:
    """Sizes of the model that the steps share; in bytes unless said otherwise."""

    source: Source
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
        """Weights that a token is multiplied with: all but embeddings and the experts that are not chosen."""
        return sum(_numbers(weight) * self.met(weight) for weight in self.weights if weight.kind != "embedding" or weight.tied_to)

    def met(self, weight: Weight) -> float:
        """The share of tokens that it is multiplied with."""
        count = footprint.experts(self.text) if weight.expert is not None else 0
        return (kv.largest(self.text, "num_experts_per_tok") or count) / count if count else 1.0

    @cached_property
    def blocks(self) -> dict[str, list[Weight]]:
        """The weights of each block, by its name; those outside of blocks under ``."""
        blocks: dict[str, list[Weight]] = {}
        for weight in self.weights:
            inside = re.match(r".*?\.\d+(?=\.)", weight.name)
            blocks.setdefault(inside[0] if inside else "", []).append(weight)
        return blocks

    @property
    def layers(self) -> int:
        return len(self.blocks) - ("" in self.blocks)

    @cached_property
    def moments(self) -> int:
        """Second moments in the largest block."""
        return max(sum(_moments(weight) + output_moments.nbytes(weight) for weight in block) for block in self.blocks.values())

    @cached_property
    def packed_apart(self) -> int:
        """Second moments that are copied to triangles before they are written: those of few columns."""
        return max(sum(_moments(w) // 2 for w in block if w.shape[1] <= SMALL_COLUMNS) for block in self.blocks.values())

    @cached_property
    def block(self) -> int:
        """The largest block in float32, or the weights outside of blocks: they are in memory one after the other."""
        return _FLOAT * max(sum(map(_numbers, block)) for block in self.blocks.values())

    @cached_property
    def packed(self) -> int:
        """All weights in the plan's formats."""
        if self.plan is None:
            return min(_HALF * self.numbers, self._asked)
        return sum(max(entry.nbytes, formats.get(entry.format).nbytes(entry.shape)) for entry in self.plan.entries)

    @cached_property
    def _asked(self) -> int:
        size = budgets.parse_size(self.work.size) if self.work.size else None
        if isinstance(size, budgets.BitsPerWeight):
            return math.ceil(size.bits * self.numbers / 8)
        return size.nbytes if isinstance(size, budgets.FileBytes) else _HALF * self.numbers

    @cached_property
    def beside(self) -> int:
        """What an output holds beside the weights: norms and biases, tokenizer, config, the plan and a description of each weight."""
        path = self.source.path
        files = [file for file in path.iterdir() if file.is_file() and file.suffix not in (".safetensors", ".bin")] if path.is_dir() else []
        files = files or self.source.checkpoint.files()[:1]  # of a GGUF, the tokenizer is in the header
        rest = sum(_FLOAT * self.source.tensor(name).numel() for name in self.source.rest)
        return rest + 2 * sum(min(file.stat().st_size, 64 << 20) for file in files) + 2048 * sum(1 for _ in self.weights) + (1 << 20)

    @cached_property
    def session(self) -> int:
        """Memory of a runtime for one window, beside the weights."""
        try:
            shape = footprint.shape(self.text)
        except (InputError, AttributeError):  # a model whose KV cache cannot be counted: for one window it is small
            return 0
        return footprint.memory(shape, 0, footprint.Use(self.work.length)).total

    @property
    def text(self) -> Any:
        """The config of the language model; of a GGUF perhaps just its settings."""
        return kv.text_config(self.source.config)

    @cached_property
    def state(self) -> tuple[int, int]:
        """Numbers of a token between two blocks: those that every block writes anew, and all."""
        from fewbits.model.blocks import state_columns

        checkpoint = getattr(self.source, "origin", self.source)
        known = state_columns(checkpoint) if isinstance(checkpoint, Model) else None
        return known or (int(getattr(self.text, "hidden_size", 0)),) * 2

    @property
    def vocabulary(self) -> int:
        return int(getattr(self.text, "vocab_size", 0))

    @cached_property
    def largest(self) -> int:
        return max(_numbers(weight) for weight in self.weights)


def _calibrating(sizes: _Sizes, work: Work, rate: float) -> Step:
    changing, columns = sizes.state
    between = (sizes.layers * changing + 2 * columns) * work.tokens * _FLOAT
    states = (2 if changing == columns else 3) * work.tokens * columns * _FLOAT  # input and output of one block; the others are in files
    batch = max(BATCH_TOKENS, work.length)
    rows = max(sum(sum(weight.shape) for weight in block) for name, block in sizes.blocks.items() if name or len(sizes.blocks) == 1)
    heads = kv.largest(sizes.text, "num_attention_heads") or 1
    activations = _FLOAT * batch * (2 * rows + 2 * heads * work.length)  # inputs and outputs with their gradients; scores and theirs
    logits = 6 * _FLOAT * work.length * sizes.vocabulary
    drawn = work.samples * max(weight.shape[1] for weight in sizes.weights) * (_FLOAT + _HALF * DRAWN_PER_SAMPLE) * 8
    buffered = min(work.buffer, states + sizes.moments)
    memory = sizes.block + buffered + sizes.packed_apart + max(activations, logits) + drawn + _MARGIN
    pairs = ((2 * w.shape[1] ** 2 + output_moments.numbers(w)) * sizes.met(w) for w in sizes.weights if w.kind != "embedding")
    multiplied = sizes.multiplied * 3 + sum(pairs)
    return Step("calibrating", memory, _statistics_bytes(sizes, work) + between, 2 * multiplied * work.tokens / rate)


def _statistics_bytes(sizes: _Sizes, work: Work) -> int:
    """Of every weight: triangles of second moments of inputs and gradients, for two halves of the samples; sums in float64; inputs at the
    first position and some others."""
    total = 0
    for weight in sizes.weights:
        rows, cols = weight.shape
        moments = 2 * 2 * cols * (cols + 1) // 2 * _FLOAT
        sums = 2 * _DOUBLE * (rows + 4 * cols) + 4 * _FLOAT * cols
        samples = 0 if weight.kind == "embedding" and not weight.tied_to else work.samples * cols * (_FLOAT + _HALF * DRAWN_PER_SAMPLE)
        looked_up = _DOUBLE * rows + 2 * cols * (cols + 1) // 2 * _FLOAT if weight.kind == "embedding" else 0
        total += moments + output_moments.nbytes(weight) + sums + samples + looked_up + _HISTOGRAM
    return total + work.samples * 64


def _measuring(sizes: _Sizes, work: Work, rate: float) -> Step:
    import torch

    threads, method = torch.get_num_threads(), "auto" if work.feedback else "rtn"
    each = sorted((_FLOAT * _numbers(w) + prediction.tried_bytes(w.shape[0]) + _opened(w) for w in sizes.weights), reverse=True)
    hessians = sorted((prediction.held_by(weight.shape[1], method) for weight in sizes.weights), reverse=True)
    together = min(sum(hessians[:threads]), max(hessians[0], prediction.TOGETHER))
    multiplied = sum((_MEASURED[0] + _MEASURED[1] * w.shape[1]) * w.shape[1] * work.formats_of(w.shape[1]) for w in sizes.weights)
    table = 256 * work.formats * len(each)
    return Step("measuring", sum(each[:threads]) + together + _MARGIN, 2 * table, multiplied / rate)


def _quantizing(sizes: _Sizes, work: Work, rate: float) -> Step:
    held = min(sizes.packed + sizes.beside, SHARD_BYTES + _FLOAT * sizes.largest)
    hessians = [prediction.held_by(w.shape[1], "auto") + _opened(w) if work.feedback else _opened(w) for w in sizes.weights]
    each = max(8 * _FLOAT * _numbers(weight) + hessian for weight, hessian in zip(sizes.weights, hessians, strict=True))
    flat = sizes.numbers * (_FED_BACK if work.feedback else _ROUNDED)
    products = _FEEDBACK_PASSES * 2 * sum(_numbers(w) * w.shape[1] for w in sizes.weights if w.kind != "embedding" and work.feedback)
    written = sizes.packed + sizes.beside
    seconds = (flat + products) / rate + 3 * written / _DISK_RATE
    disk = 2 * work.makes * written + work.makes * sizes.packed  # for every plan its cached weights, its artifact and its file
    return Step("quantizing", held + each + _MARGIN, disk, work.makes * seconds)


def _tuning(sizes: _Sizes, work: Work, rate: float) -> Step:
    memory = 3 * sizes.block + min(work.buffer, 2 * work.tokens * sizes.state[1] * _FLOAT) + _MARGIN
    seconds = _TUNED * 2 * work.tune * max(_MINIBATCH, work.length) * sizes.multiplied / rate
    return Step("tuning", memory, 0, work.makes * seconds)


def _verifying(sizes: _Sizes, work: Work, rate: float) -> Step:
    """The float model block by block, the quantized file, and a file in 16 bits, with which the error of the runtime itself is measured;
    some targets write it from an artifact. llama.cpp maps its files, but may copy the quantized weights to another layout; the torch
    runtime reads block by block; other runtimes load both files."""
    floats = sum(formats.get(weight.dtype).nbytes(weight.shape) for weight in sizes.weights) + sizes.beside
    logits = 8 * _FLOAT * work.length * sizes.vocabulary
    making = min(floats, 3 * _FLOAT * sizes.largest if sizes.target.takes_drafts else SHARD_BYTES + 3 * _FLOAT * sizes.largest)
    states = min(work.buffer, 2 * work.verified * sizes.state[1] * _FLOAT)
    loaded = {"llama.cpp": sizes.packed, "torch": sizes.block}.get(sizes.target.runtime, sizes.packed + floats)
    memory = loaded + max(making, sizes.block + states + logits + 2 * sizes.session) + _MARGIN + _LIBRARY
    seconds = 3 * 2 * sizes.multiplied * work.verified / rate + 4 * floats / _DISK_RATE + _STARTING
    return Step("verifying", memory, floats if sizes.target.takes_drafts else 2 * floats, work.makes * seconds)


def _opened(weight: Weight) -> int:
    """Second moments of inputs and gradients while the weight is worked on; wide ones stay mapped."""
    return output_moments.nbytes(weight) + (2 * _moments(weight) if weight.shape[1] <= WHOLE_COLUMNS else 0)


def _numbers(weight: Weight) -> int:
    return weight.shape[0] * weight.shape[1]


def _moments(weight: Weight) -> int:
    """Bytes of the second moments of its inputs: columns squared in float32, for two halves of the samples."""
    return 2 * _FLOAT * weight.shape[1] ** 2


def _rate(weights: Iterable[Weight], clock: Callable[[], float]) -> float:
    """Multiplications and additions per second in a product of the size of the largest weight. The best of a few calls: the first ones
    start threads."""
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
