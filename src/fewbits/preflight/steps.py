"""What each step of the work takes: memory and disk as upper bounds, seconds as a forecast, `rate` operations in each.

Work that is no product is counted as the operations that would take as long:

    calibrating   a forward pass with second moments, then another one and its gradients: 4.9 forward passes by count, 5.5 measured
    measuring     1.85 million cols + 1,760 cols^2 for each weight and format that its columns divide into (256, 576 and 1536 columns:
                  9,000, 5,400 and 2,960 cols^2 on the embedded model and SmolLM2), and 9 rows x size^2 of its output moments
    forecasting   the float model and a damaged copy, a forward pass each; for its errors three factors of every weight, and 10,000 a number
    quantizing    10,000 a number by rounding; 40,000 with error feedback, beside its products
    tuning        4.5 forward passes of a minibatch of 1024 tokens for each step, and two of all samples
    verifying     the float model and two files in the runtime, a forward pass each
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from fewbits import formats
from fewbits.artifact import SHARD_BYTES
from fewbits.calibration import output_moments
from fewbits.calibration.folder import WHOLE_COLUMNS
from fewbits.calibration.recorders import DRAWN_PER_SAMPLE
from fewbits.formats.runtime import kv
from fewbits.methods.tuned_scales import STEP_TOKENS
from fewbits.model.walk import BATCH_TOKENS
from fewbits.preflight.sizes import DOUBLE, FLOAT, HALF, Sizes, moments_of, numbers_of
from fewbits.preflight.work import USUAL, Pace, Step, Work
from fewbits.sensitivity import prediction
from fewbits.store import threads

if TYPE_CHECKING:
    from fewbits.model.weights import Weight

_MARGIN = 64 << 20  # bytes of memory for Python, the allocator and threads
_LIBRARY = 64 << 20  # bytes of memory for a runtime's library, loaded when a file is first run in it
_HISTOGRAM = 64 << 10  # bytes of statistics for each weight beside its moments: ranges, histogram, names
EFFICIENCY = 0.53
_MEASURED = (1.85e6, 1760.0)  # equivalent operations, by columns and by their square
_OUTPUT_SIDE = 9  # times rows x size^2 of the output moments, which are factored in float64
_IN_DOUBLE = 4  # operations in float64 take twice as long, and a product counts two
_FEEDBACK_PASSES, _TUNED = 6, 4.5
_PER_SCALE, _UNDER_A_SCALE = 5 * FLOAT, 32  # tuning: bytes of an entry, its gradient and what Adam keeps of it; weights that share one
_ROUNDED, _FED_BACK = 10_000, 40_000
_IDLE = 400 << 20  # bytes of a worker process that has no weight
_LOOK = 0.1  # seconds to measure the speed
_STARTING = 1.0  # seconds to open two sessions of a runtime, which read a vocabulary
_DISK_RATE = 200e6  # bytes per second: a slow SSD


def steps_of(sizes: Sizes, work: Work, rate: float, pace: Pace = USUAL) -> list[Step]:
    """What `work` needs, in order. `rate`: operations a second in a large product; `pace`: how much longer each step takes here."""
    wanted = [
        (calibrating, work.samples), (measuring, work.formats), (forecasting, work.forecast), (quantizing, True), (tuning, work.tune),
        (verifying, work.verified),
    ]  # fmt: skip
    steps = [step(sizes, work, rate * EFFICIENCY) for step, is_wanted in wanted if is_wanted]
    return [replace(step, seconds=step.seconds * pace.of(step.name)) for step in steps]


def calibrating(sizes: Sizes, work: Work, rate: float) -> Step:
    changing, columns = sizes.state
    between = (sizes.layers * changing + 2 * columns) * work.tokens * FLOAT
    states = (2 if changing == columns else 3) * work.tokens * columns * FLOAT  # input and output of one block; the others are in files
    batch = max(BATCH_TOKENS, work.length)
    rows = max(sum(sum(weight.shape) for weight in block) for name, block in sizes.blocks.items() if name or len(sizes.blocks) == 1)
    heads = kv.largest(sizes.text, "num_attention_heads") or 1
    activations = FLOAT * batch * (2 * rows + 2 * heads * work.length)  # inputs and outputs with their gradients; scores and theirs
    logits = 6 * FLOAT * work.length * sizes.vocabulary
    drawn = work.samples * max(weight.shape[1] for weight in sizes.weights) * (FLOAT + HALF * DRAWN_PER_SAMPLE) * 8
    buffered = min(work.buffer, states + sizes.moments)
    memory = sizes.block + buffered + sizes.packed_apart + max(activations, logits) + drawn + _MARGIN
    seconds = sum(block_seconds(sizes, block, work.tokens, rate) for block in sizes.blocks.values())
    return Step("calibrating", memory, _statistics_bytes(sizes, work) + between, seconds)


def block_seconds(sizes: Sizes, block: Iterable[Weight], tokens: int, rate: float) -> float:
    """Of both passes through these weights."""
    return 2 * sizes.statistics_of(list(block)) * tokens / rate


def measured_seconds(weights: Iterable[tuple[Weight, int]], rate: float) -> float:
    """Of weights, each in so many formats; and for each once, what its rows can make up for."""
    total = 0.0
    for weight, count in weights:
        rows, columns = weight.shape
        total += (_MEASURED[0] + _MEASURED[1] * columns) * columns * count
        total += _OUTPUT_SIDE * output_moments.numbers(weight) * output_moments.size_of(rows)
    return total / rate


def feedback_seconds(weights: Iterable[Weight], rate: float, processes: int = 1) -> float:
    """Of rounding with error feedback; `rate` is that of all threads, which round narrow weights side by side, or `processes` do."""
    import torch

    shared = torch.get_num_threads() / processes if processes > 1 else 1.0
    total = 0.0
    for weight in weights:
        operations = numbers_of(weight) * (_FED_BACK + _FEEDBACK_PASSES * 2 * weight.shape[1] * (weight.kind != "embedding"))
        total += operations if threads.are_all_used(weight.shape) else operations * shared
    return total / rate


def _statistics_bytes(sizes: Sizes, work: Work) -> int:
    """Of every weight: triangles of second moments of inputs and gradients, for two halves of the samples; sums in float64; inputs at the
    first position and some others."""
    total = 0
    for weight in sizes.weights:
        rows, cols = weight.shape
        moments = 2 * 2 * cols * (cols + 1) // 2 * FLOAT
        sums = 2 * DOUBLE * (rows + 4 * cols) + 4 * FLOAT * cols
        samples = 0 if weight.kind == "embedding" and not weight.tied_to else work.samples * cols * (FLOAT + HALF * DRAWN_PER_SAMPLE)
        looked_up = DOUBLE * rows + 2 * cols * (cols + 1) // 2 * FLOAT if weight.kind == "embedding" else 0
        total += moments + output_moments.nbytes(weight) + sums + samples + looked_up + _HISTOGRAM
    return total + work.samples * 64


def measuring(sizes: Sizes, work: Work, rate: float) -> Step:
    import torch

    side_by_side, method = torch.get_num_threads(), "auto" if work.feedback else "rtn"
    here = _in_this_process(sizes, work)
    each = sorted((FLOAT * numbers_of(w) + prediction.tried_bytes(w.shape[0]) + _opened(w) for w in here), reverse=True)
    hessians = sorted((prediction.held_by(weight.shape[1], method) for weight in here), reverse=True)
    together = min(sum(hessians[:side_by_side]), max([threads.TOGETHER, *hessians[:1]]))
    seconds = measured_seconds([(weight, work.formats_of(weight.shape[1])) for weight in sizes.weights], rate)
    table = 256 * work.formats * sum(1 for _ in sizes.weights)
    memory = _with_workers(sizes, work, sum(each[:side_by_side]) + together)
    return Step("measuring", memory + _MARGIN, 2 * table, seconds)


def forecasting(sizes: Sizes, work: Work, rate: float) -> Step:
    """By kind of text: the float model and a damaged copy side by side."""
    seconds = 2 * 2 * sizes.multiplied * work.forecast / rate + sizes.numbers * _ROUNDED / rate
    for weight in sizes.weights if work.feedback else ():
        rows, cols = weight.shape
        size = output_moments.size_of(rows) if output_moments.numbers(weight) else 0
        seconds += _IN_DOUBLE * (cols**3 / 3 + rows * cols**2 + rows * size**2 / 3 + rows * size * cols) / rate
    states = min(work.buffer, 2 * work.forecast * sizes.state[1] * FLOAT)
    changed = 3 * DOUBLE * sizes.largest + max((_rounded_bytes(weight, work.feedback) for weight in sizes.weights), default=0)
    logits = 8 * FLOAT * work.length * sizes.vocabulary
    return Step("forecasting", 2 * sizes.block + changed + states + logits + _MARGIN, 0, seconds)


def quantizing(sizes: Sizes, work: Work, rate: float) -> Step:
    held = min(sizes.packed + sizes.beside, SHARD_BYTES + FLOAT * sizes.largest)
    each = _side_by_side([_rounded_bytes(weight, work.feedback) for weight in _in_this_process(sizes, work)])
    written = sizes.packed + sizes.beside
    rounding = feedback_seconds(sizes.weights, rate, work.processes) if work.feedback else sizes.numbers * _ROUNDED / rate
    seconds = rounding + 3 * written / _DISK_RATE
    disk = 2 * work.makes * written + work.makes * sizes.packed  # for every plan its cached weights, its artifact and its file
    return Step("quantizing", held + _with_workers(sizes, work, each) + _MARGIN, disk, work.makes * seconds)


def of_processes(sizes: Sizes, count: int) -> int:
    """Bytes that so many hold together at the most while they measure or quantize."""
    return count * _IDLE + sum(sorted((_rounded_bytes(weight, True) for weight in narrow(sizes)), reverse=True)[:count])


def narrow(sizes: Sizes) -> list[Weight]:
    """Weights that workers take."""
    return [weight for weight in sizes.weights if not threads.are_all_used(weight.shape)]


def _in_this_process(sizes: Sizes, work: Work) -> list[Weight]:
    """Beside workers: the weights that take all threads."""
    return [weight for weight in sizes.weights if work.processes == 1 or threads.are_all_used(weight.shape)]


def _with_workers(sizes: Sizes, work: Work, here: int) -> int:
    """Workers take their turn before this process, and wait until it is done."""
    return here if work.processes == 1 else max(here + work.processes * _IDLE, of_processes(sizes, work.processes))


def _side_by_side(each: Iterable[int]) -> int:
    """Bytes that weights hold at the most which are rounded several at a time (`outcomes.independent`)."""
    import torch

    largest = sorted(each, reverse=True)[: torch.get_num_threads()]
    return min(sum(largest), max([threads.TOGETHER, *largest[:1]]))


def _rounded_bytes(weight: Weight, feedback: bool) -> int:
    return prediction.rounded_bytes(numbers_of(weight), weight.shape[1], feedback) + _opened(weight)


def tuning(sizes: Sizes, work: Work, rate: float) -> Step:
    minibatch = max(STEP_TOKENS, work.length)
    between = FLOAT * sizes.state[1] * (work.tokens + (sizes.layers + 1) * minibatch)  # float states after the last block, quantized ones
    logits = FLOAT * sizes.vocabulary * (minibatch + 4 * work.length)  # of the float model, and one sample with its gradient
    scales = sizes.numbers // _UNDER_A_SCALE * _PER_SCALE
    memory = 4 * sizes.block + min(work.buffer, sizes.numbers + between) + logits + scales + _MARGIN
    seconds = 2 * (_TUNED * work.tune * minibatch + 2 * work.tokens) * sizes.multiplied / rate
    return Step("tuning", memory, 0, work.makes * seconds)


def verifying(sizes: Sizes, work: Work, rate: float) -> Step:
    """The float model block by block, the quantized file, and a file in 16 bits, with which the error of the runtime itself is measured;
    some targets write it from an artifact. llama.cpp maps its files, but may copy the quantized weights to another layout; the torch
    runtime reads block by block; other runtimes load both files."""
    floats = sum(formats.get(weight.dtype).nbytes(weight.shape) for weight in sizes.weights) + sizes.beside
    logits = 8 * FLOAT * work.length * sizes.vocabulary
    making = min(floats, 3 * FLOAT * sizes.largest if sizes.target.takes_drafts else SHARD_BYTES + 3 * FLOAT * sizes.largest)
    states = min(work.buffer, 2 * work.verified * sizes.state[1] * FLOAT)
    loaded = {"llama.cpp": sizes.packed, "torch": sizes.block}.get(sizes.target.runtime, sizes.packed + floats)
    memory = loaded + max(making, sizes.block + states + logits + 2 * sizes.session) + _MARGIN + _LIBRARY
    seconds = 3 * 2 * sizes.multiplied * work.verified / rate + 4 * floats / _DISK_RATE + _STARTING
    return Step("verifying", memory, floats if sizes.target.takes_drafts else 2 * floats, work.makes * seconds)


def _opened(weight: Weight) -> int:
    """Second moments of inputs and gradients while the weight is worked on; wide ones stay mapped. Of an expert also those that its layer
    lends it, and the sums of both."""
    held = output_moments.nbytes(weight) + (2 * moments_of(weight) if weight.shape[1] <= WHOLE_COLUMNS else 0)
    return held if weight.expert is None else 2 * held + output_moments.nbytes(weight) + 2 * moments_of(weight)


def rate_of(weights: Iterable[Weight], clock: Callable[[], float]) -> float:
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
