"""What quantizing a model too large to try here would cost: operations counted, at the speed that `fewbits bench workers` measured.

A unit over (rows, cols) takes a cols^3 (factoring its Hessian) + b rows cols^2 (feeding errors back) + c rows cols (searching scales).
b is counted: quantizing takes 9 operations, measuring none, as its few rows stand for all. a and c are fitted to the units of `fewbits
bench workers`. Calibration is 8 operations for a weight and a token (forward, forward again, backward twice over) and 2 for a token and
an entry of every second moment. The speed of all that is counted is the one that calibration had in the bench.

Assumed: storage and network run at their full speed, the processors of a worker divide its work evenly, everybody reads a shared folder.
Left out: retries, other users, and that large products run nearer to a processor's limit than the small ones of the bench.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fewbits.errors import InputError
from fewbits.store.executors.crew import held_by

_HINT = "give the workers.json that `fewbits bench workers -o FOLDER` wrote"
_SAMPLES, _LENGTH = 512, 512
_JUDGED = 16384  # tokens
_FED_BACK = {"measure": 0, "quantize": 9}  # operations: rounding takes 1, each of two passes 4


@dataclass(frozen=True)
class Llama:
    name: str
    hidden: int
    inner: int
    blocks: int
    kv: int  # rows of keys, and of values
    vocabulary: int

    @property
    def block(self) -> list[tuple[int, int]]:
        """(rows, cols) of its weights."""
        h, i = self.hidden, self.inner
        return [(h, h), (self.kv, h), (self.kv, h), (h, h), (i, h), (i, h), (h, i)]

    @property
    def every(self) -> list[tuple[int, int]]:
        return self.block * self.blocks + [(self.vocabulary, self.hidden)] * 2

    @property
    def weights(self) -> int:
        return sum(rows * cols for rows, cols in self.every)

    @property
    def inputs(self) -> list[int]:
        """Columns of what the weights of a block read: q, k and v share theirs, and so do gate and up."""
        return [self.hidden, self.hidden, self.hidden, self.inner]

    @property
    def moments(self) -> int:
        """Entries of the second moments of a block: of every input, and for every weight weighted by the loss."""
        return sum(cols**2 for cols in self.inputs) + sum(cols**2 for _, cols in self.block)

    @property
    def statistics(self) -> int:
        """Bytes: two halves of the samples, each symmetric matrix as its triangle, in float32."""
        return self.blocks * 4 * self.moments


LLAMA_405B = Llama("Llama 3.1 405B", 16384, 53248, 126, 1024, 128256)


@dataclass(frozen=True)
class Speed:
    """How fast one thread works."""

    measure: tuple[float, float, float]  # a, b, c
    quantize: tuple[float, float, float]
    calibrate: float  # operations in a second
    memory: float  # bytes that a unit was seen to hold, for each byte that `held_by` counts
    misfit: float  # the largest ratio of a unit's seconds to those of the formula, or the other way round

    def seconds(self, step: str, rows: int, cols: int) -> float:
        return float(np.dot(getattr(self, step), _terms(rows, cols)))


@dataclass(frozen=True)
class ProjectedRun:
    """A whole run by so many workers."""

    workers: int
    shards: int
    calibrate: float  # seconds
    measure: float
    quantize: float
    alone: float  # seconds of what one machine does: writing the files and judging them
    memory: int  # bytes that a worker needs
    storage: int  # bytes in the shared folder at the most
    network: int  # bytes read and written over a whole run

    @property
    def seconds(self) -> float:
        return self.calibrate + self.measure + self.quantize + self.alone


@dataclass(frozen=True)
class Projection:
    model: str
    weights: int
    tokens: int
    cores: int
    disk: float  # bytes in a second, of each worker
    network: float
    speed: Speed
    rows: tuple[ProjectedRun, ...]

    def to_dict(self) -> dict[str, object]:
        return asdict(self) | {"seconds": [row.seconds for row in self.rows]}


def project(
    measured: Path,
    workers: Sequence[int] = (1, 8, 64),
    cores: int = 32,
    memory: float = 512e9,
    disk: float = 2e9,
    network: float = 1.25e9,
    bits: float = 4.5,
    model: Llama = LLAMA_405B,
) -> Projection:
    """`measured`: the workers.json of `fewbits bench workers`."""
    if not measured.is_file():
        raise InputError(f"there is no `{measured}`", _HINT)
    try:
        speed = speed_of(json.loads(measured.read_text()))
    except (OSError, ValueError, KeyError, TypeError) as failure:
        raise InputError(f"`{measured}` holds no measurement: {failure!r}", _HINT) from failure
    assumed = _Assumed(model, speed, cores, memory, disk, network, bits)
    return Projection(
        model.name, model.weights, assumed.tokens, cores, disk, network, speed, tuple(assumed.row(number) for number in workers)
    )


def speed_of(bench: dict[str, Any]) -> Speed:
    shape, fits, worst = bench["shape"], {}, 1.0
    tried = Llama("", shape["hidden"], shape["inner"], shape["blocks"], shape["hidden"], shape["vocabulary"])
    one = next(point for point in bench["points"] if point["workers"] == 1)
    rate = _operations(tried, bench["tokens"]) / one["seconds"]["calibrate"]
    for step in ("measure", "quantize"):
        units = [(each["rows"], each["cols"], each["seconds"]) for each in bench["units"] if each["step"] == step]
        fits[step] = _fitted(units, _FED_BACK[step] / rate)
        for rows, cols, seconds in units:
            ratio = seconds / float(np.dot(fits[step], _terms(rows, cols)))
            worst = max(worst, ratio, 1 / ratio)
    held = one.get("memory", {})
    beside = max((held[step] - held["start"] for step in fits if step in held and "start" in held), default=0)  # torch and the model
    memory = beside / max(held_by(rows, cols) for rows, cols in tried.block)
    return Speed(fits["measure"], fits["quantize"], rate, max(1.0, memory), worst)


@dataclass(frozen=True)
class _Assumed:
    model: Llama
    speed: Speed
    cores: int
    ram: float
    disk: float
    wire: float
    bits: float
    tokens: int = _SAMPLES * _LENGTH

    def row(self, workers: int) -> ProjectedRun:
        shards = min(range(1, workers + 1), key=lambda number: self._calibrate(number))
        source, packed = 2 * self.model.weights, int(self.bits / 8 * self.model.weights)
        units = sum(map(_read, self.model.every))
        states = 2 * 4 * self.tokens * self.model.hidden * self.model.blocks  # written, and read on the way back
        statistics = self.model.statistics
        summed = (shards + 1) * statistics if shards > 1 else 0  # what a sum reads and writes
        return ProjectedRun(
            workers,
            shards,
            self._calibrate(shards),
            self._measure(workers),
            self._quantize(workers),
            self._alone(packed),
            int(self.speed.memory * max(held_by(rows, cols) for rows, cols in self.model.every)),
            source + statistics * (shards + 1 if shards > 1 else 1) + states // 2 + 3 * packed,
            shards * (2 * source + statistics) + states + summed + 2 * units + 2 * packed,
        )

    def _calibrate(self, shards: int) -> float:
        """Every shard reads the whole model twice, works, and writes statistics of full size; one machine adds them up."""
        reading = 2 * 2 * self.model.weights / min(self.disk, self.wire)
        working = _operations(self.model, self.tokens) / shards / (self.speed.calibrate * self.cores)
        writing = self.model.statistics / min(self.disk, self.wire)
        adding = (shards + 1) * self.model.statistics / min(self.disk, self.wire) if shards > 1 else 0.0
        return max(reading, working) + writing + adding

    def _measure(self, workers: int) -> float:
        """One thread each, as many at a time as the memory of a worker holds."""
        each = [(self.speed.seconds("measure", *shape), held_by(*shape), _read(shape)) for shape in self.model.every]
        busy = sum(seconds for seconds, _, _ in each) / (self.cores * workers)
        held = self.speed.memory * sum(seconds * nbytes for seconds, nbytes, _ in each) / (self.ram * workers)
        reading = sum(nbytes for _, _, nbytes in each) / (min(self.disk, self.wire) * workers)
        return max(busy, held, reading, max(seconds for seconds, _, _ in each))

    def _quantize(self, workers: int) -> float:
        """All threads of a worker on one weight, one after the other."""
        slowest = min(self.disk, self.wire)
        each = [self.speed.seconds("quantize", *shape) / self.cores + _read(shape) / slowest for shape in self.model.every]
        return max(sum(each) / workers, max(each))

    def _alone(self, packed: int) -> float:
        """The artifact and the file written out of finished weights; the float model, and the file, run over the text to judge on."""
        writing = 4 * packed / self.disk + 2 * self.model.weights / self.disk
        running = 2 * 2 * self.model.weights * _JUDGED / (self.speed.calibrate * self.cores)
        return writing + running


def _read(shape: tuple[int, int]) -> int:
    """Bytes of a unit's inputs: its weight, and its second moments plain and weighted."""
    rows, cols = shape
    return 2 * rows * cols + 8 * cols**2


def _operations(model: Llama, tokens: int) -> float:
    inside = sum(rows * cols for rows, cols in model.block)
    return float(tokens) * model.blocks * (8 * inside + 2 * model.moments) + float(tokens) * 8 * model.vocabulary * model.hidden


def _terms(rows: int, cols: int) -> list[float]:
    return [float(cols) ** 3, float(rows) * cols**2, float(rows) * cols]


def _fitted(units: Iterable[tuple[int, int, float]], fed_back: float) -> tuple[float, float, float]:
    """(a, b, c) by least squares of the ratios to the measured seconds. b is `fed_back`; a or c is zero where it would be negative."""
    terms = np.array([[term / seconds for term in _terms(rows, cols)] for rows, cols, seconds in units])
    rest = 1 - fed_back * terms[:, 1]
    best, least = (0.0, fed_back, 0.0), float("inf")
    for chosen in ([0, 2], [0], [2]):
        factors = np.linalg.lstsq(terms[:, chosen], rest, rcond=None)[0]
        misfit = float(np.square(terms[:, chosen] @ factors - rest).sum())
        if (factors > 0).all() and misfit < least:
            values = dict(zip(chosen, map(float, factors), strict=True))
            best, least = (values.get(0, 0.0), fed_back, values.get(2, 0.0)), misfit
    return best
