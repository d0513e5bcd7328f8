"""`fewbits bench workers`: how much faster more workers are, each of one thread, and what every unit of work costs.

A Llama of random weights is calibrated in shards, measured and quantized by 1, 2, ... workers, each time from nothing. Starting the
workers is timed apart: it happens once, and takes little beside the hours that workers are for. All must leave the same files.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits import calibration, formats, model, planning, sensitivity, targets
from fewbits.artifact import outcomes
from fewbits.benchmarks.scale.process_usage import peak
from fewbits.benchmarks.synthetic_llama import Shape, write_checkpoint
from fewbits.benchmarks.timing import on_threads
from fewbits.calibration.folder import Statistics
from fewbits.calibration.shards import CollectOptions, collect_shards
from fewbits.errors import InputError
from fewbits.progress import Progress, say, silent
from fewbits.store import executors
from fewbits.store.cache import open_cache
from fewbits.store.files import remove, to_json

if TYPE_CHECKING:
    from fewbits.calibration.text.samples import Samples
    from fewbits.model import Model
    from fewbits.store.cache import Cache
    from fewbits.store.executors.crew import Crew, Wanted

FORMATS = ("q4_k", "q6_k")
STEPS = ("start", "calibrate", "measure", "quantize")
_SHARDS = 4
_SAMPLES, _LENGTH = 16, 256


@dataclass(frozen=True)
class Point:
    """What so many workers took; with 0 all happens in one process, on one thread."""

    workers: int
    seconds: dict[str, float]  # by step
    memory: dict[str, int]  # by step: anonymous bytes of the largest worker at the most; empty: this system does not say


@dataclass(frozen=True)
class UnitCost:
    """One unit of work by one worker of one thread."""

    step: str
    rows: int
    cols: int
    seconds: float


@dataclass(frozen=True)
class Speedup:
    shape: Shape
    executor: str
    processors: int
    formats: tuple[str, ...]
    tokens: int
    shards: int
    statistics: int  # bytes
    points: tuple[Point, ...]
    units: tuple[UnitCost, ...]

    def to_dict(self) -> dict[str, object]:
        return asdict(self) | {"speedup": {point.workers: self.speedup(point) for point in self.points if point.workers}}

    def speedup(self, point: Point) -> dict[str, float]:
        """Against one worker, by step; without the start."""
        one = next(each for each in self.points if each.workers == 1)
        by_step = {step: one.seconds[step] / point.seconds[step] for step in STEPS[1:]}
        whole = sum(one.seconds[step] for step in STEPS[1:]) / sum(point.seconds[step] for step in STEPS[1:])
        return by_step | {"all": whole}


def shape_of(hidden: int = 1024, blocks: int = 4) -> Shape:
    """An inner width of 2.75 times the outer one, both in whole blocks of the K formats."""
    if hidden % 1024:
        raise InputError(f"`--hidden {hidden}` is no multiple of 1024", "for example 1024 or 2048")
    return Shape(blocks=blocks, hidden=hidden, inner=hidden * 11 // 4, vocabulary=4096)


def bench_workers(
    out: Path,
    workers: Sequence[int],
    shape: Shape,
    names: Sequence[str] = FORMATS,
    executor: str = "local",
    progress: Progress[Any] = silent,
) -> Speedup:
    """In `out`, where workers.json and workers.svg stay, and the model does not."""
    from fewbits.benchmarks.tables import workers as pictures

    if 1 not in workers or executor not in ("local", "ray"):
        raise InputError("speed is told against one worker, of this machine", "--workers 1,2,4 and --executor local or ray")
    out.mkdir(parents=True, exist_ok=True)
    write_checkpoint(out / "model", shape)
    source = model.open(out / "model")
    drawn = calibration.draw(source, (), _SAMPLES, _LENGTH, 0)
    try:
        with on_threads(1):
            bench = _Bench(source, drawn, tuple(names), out / "work", progress)
            points = [bench.point(0, executor), *(bench.point(number, executor) for number in sorted(set(workers)))]
    finally:
        remove(out / "work")
        remove(out / "model")
    processors = len(os.sched_getaffinity(0))
    result = Speedup(
        shape, executor, processors, tuple(names), drawn.tokens, _SHARDS, bench.statistics_bytes, tuple(points), tuple(bench.units)
    )
    (out / "workers.json").write_text(to_json(result.to_dict()))
    (out / "workers.svg").write_text(pictures.picture(result))
    return result


class _Bench:
    def __init__(self, source: Model, drawn: Samples, names: tuple[str, ...], work: Path, progress: Progress[Any]) -> None:
        self.source, self.drawn, self.names, self.work, self.progress = source, drawn, names, work, progress
        self.target = targets.get("gguf")
        self.plan = planning.uniform(source.weights, self.target, formats.get(names[0]), (), "auto")
        self.units: list[UnitCost] = []
        self.statistics_bytes = 0
        self._files: set[str] | None = None  # names of the results of the first number of workers

    def point(self, workers: int, executor: str) -> Point:
        say(self.progress, f"{workers or 'no'} workers")
        remove(self.work)
        seconds: dict[str, float] = {}
        memory: dict[str, int] = {}

        def timed(step: str, work: Callable[[], object]) -> None:
            with peak(_children, 0.05) as most:
                begun = time.perf_counter()
                work()
                seconds[step] = time.perf_counter() - begun
            if most:
                memory[step] = most[0]

        with open_cache(self.work) as cache, _hired(workers, executor, self.source) as crew:
            timed("start", lambda: self._start(cache, crew, workers) if crew else None)
            folder = self.work / "statistics"
            shared: dict[str, Any] = {"cache": cache, "crew": crew, "progress": self.progress}
            timed("calibrate", lambda: collect_shards(self.source, self.drawn, folder, _SHARDS, CollectOptions(1 << 30), **shared))
            statistics = Statistics(folder)
            self.statistics_bytes = sum(path.stat().st_size for path in folder.iterdir())
            every = [formats.get(name) for name in self.names]
            alone = workers == 1 and executor == "local"  # the time between two answers is then that of one unit
            clock = _Clock(self.progress)
            measured = {"cache": cache, "crew": crew, "progress": clock.progress}
            timed("measure", lambda: sensitivity.measure(self.source, statistics, every, **measured))  # type: ignore[arg-type]
            self.units += self._costs("measure", clock) if alone else []
            clock = _Clock(self.progress)
            timed("quantize", lambda: self._quantize(statistics, cache, crew, clock.progress))
            self.units += self._costs("quantize", clock) if alone else []
            self._same_files()
        return Point(workers, seconds, memory)

    def _start(self, cache: Cache, crew: Crew, workers: int) -> None:
        """Every worker loads torch and opens the model: each gets a small weight to round, under a name that no later step has."""
        small = min(self.source.weights, key=lambda weight: weight.shape[0] * weight.shape[1])
        one = {"weight": small.name, "format": "q8_0", "version": 1, "method": "rtn"}
        wanted: list[Wanted] = [({**one, "worker": number}, {}) for number in range(workers)]
        crew.finish("weight", outcomes.UNIT, wanted, cache.of(start=True), silent, "starting")
        cache.drop_step("weight")

    def _quantize(self, statistics: Statistics, cache: Cache, crew: Crew | None, progress: Progress[Any]) -> None:
        step_cache = cache.of(source=self.source.fingerprint, statistics=statistics.digest)
        for _ in outcomes.independent(self.source, self.plan, statistics, progress, step_cache, crew):
            pass

    def _costs(self, step: str, clock: _Clock) -> list[UnitCost]:
        """Units are answered in the order of the weights, where one worker has them."""
        pairs = zip(self.source.weights, clock.seconds, strict=True)
        return [UnitCost(step, *weight.shape, seconds) for weight, seconds in pairs if weight.kind in ("attention", "mlp")]

    def _same_files(self) -> None:
        """Results are named by their own hashes."""
        there = {path.name for step in ("row", "weight") for path in (self.work / "cache").glob(f"{step}-*")}
        self._files = self._files or there
        assert there == self._files, "the number of workers changed the bytes of a result"


@contextmanager
def _hired(workers: int, executor: str, source: Model) -> Iterator[Crew | None]:
    if not workers:
        yield None
        return
    if executor == "ray":
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        import ray

        ray.init(num_cpus=workers, include_dashboard=False, log_to_driver=False)
    try:
        with executors.open_crew(executors.parse("ray" if executor == "ray" else f"local:{workers}"), source, source.path, True) as crew:
            yield crew
    finally:
        if executor == "ray":
            ray.shutdown()


class _Clock:
    """Seconds between the items of the first progress bar, which counts the units of workers; later bars are the coordinator's."""

    def __init__(self, shown: Progress[Any]) -> None:
        self.seconds: list[float] = []
        self._shown, self._bars = shown, 0

    def progress(self, items: Iterable[Any], total: int, what: str) -> Iterator[Any]:
        self._bars += total >= 0
        yield from self._shown(self._clocked(items) if self._bars == 1 and total >= 0 else items, total, what)

    def _clocked(self, items: Iterable[Any]) -> Iterator[Any]:
        last = time.perf_counter()
        for item in items:
            now = time.perf_counter()
            self.seconds.append(now - last)
            last = now
            yield item


def _children() -> Iterator[int]:
    for listed in Path(f"/proc/{os.getpid()}/task").glob("*/children"):
        with suppress(OSError):  # a thread that has just ended
            yield from map(int, listed.read_text().split())
