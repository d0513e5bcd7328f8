"""`fewbits bench workers`: how much faster more workers are, each of one thread, and what every unit of work costs.

A Llama of random weights is calibrated in shards, measured and quantized by 1, 2, ... workers, each time from nothing. Starting the
workers is timed apart: it is paid once, and is nothing beside the hours that workers are for. All must leave the same files.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fewbits import calibration, executors, formats, model, outcomes, planning, sensitivity, targets
from fewbits import kept as results
from fewbits.benchmarks.synthetic import Shape, write_checkpoint
from fewbits.calibration import sharding
from fewbits.calibration.storing import Statistics
from fewbits.errors import InputError
from fewbits.files import remove, to_json
from fewbits.progress import Progress, say, silent

if TYPE_CHECKING:
    from fewbits.calibration.data import Samples
    from fewbits.executors.crew import Crew, Wanted
    from fewbits.kept import Kept
    from fewbits.model import Model

FORMATS = ("q4_k", "q6_k")
STEPS = ("start", "calibrate", "measure", "quantize")
_SHARDS = 4
_SAMPLES, _LENGTH = 16, 256


@dataclass(frozen=True)
class Point:
    """What so many workers took; 0 of them: all in one process, on one thread."""

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
        found = {step: one.seconds[step] / point.seconds[step] for step in STEPS[1:]}
        whole = sum(one.seconds[step] for step in STEPS[1:]) / sum(point.seconds[step] for step in STEPS[1:])
        return found | {"all": whole}


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
    from fewbits.reporting import workers as pictures

    if 1 not in workers or executor not in ("local", "ray"):
        raise InputError("speed is told against one worker, of this machine", "--workers 1,2,4 and --executor local or ray")
    out.mkdir(parents=True, exist_ok=True)
    write_checkpoint(out / "model", shape)
    source = model.open(out / "model")
    drawn = calibration.draw(source, (), _SAMPLES, _LENGTH, 0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        bench = _Bench(source, drawn, tuple(names), out / "work", progress)
        points = [bench.point(0, executor), *(bench.point(number, executor) for number in sorted(set(workers)))]
    finally:
        torch.set_num_threads(threads)
        remove(out / "work")
        remove(out / "model")
    processors = len(os.sched_getaffinity(0))
    found = Speedup(
        shape, executor, processors, tuple(names), drawn.tokens, _SHARDS, bench.statistics_bytes, tuple(points), tuple(bench.units)
    )
    (out / "workers.json").write_text(to_json(found.to_dict()))
    (out / "workers.svg").write_text(pictures.picture(found))
    return found


class _Bench:
    def __init__(self, source: Model, drawn: Samples, names: tuple[str, ...], work: Path, progress: Progress[Any]) -> None:
        self.source, self.drawn, self.names, self.work, self.progress = source, drawn, names, work, progress
        self.target = targets.get("gguf")
        self.plan = planning.uniform(source.weights, self.target, formats.get(names[0]), (), "auto")
        self.units: list[UnitCost] = []
        self.statistics_bytes = 0
        self._files: set[str] | None = None  # as the first left them

    def point(self, workers: int, executor: str) -> Point:
        say(self.progress, f"{workers or 'no'} workers")
        remove(self.work)
        seconds: dict[str, float] = {}
        memory: dict[str, int] = {}

        def timed(step: str, work: Callable[[], object]) -> None:
            with _peak(memory, step):
                begun = time.perf_counter()
                work()
                seconds[step] = time.perf_counter() - begun

        with results.opened(self.work) as kept, _hired(workers, executor, self.source) as crew:
            timed("start", lambda: self._start(kept, crew, workers) if crew else None)
            folder = self.work / "statistics"
            shards: dict[str, Any] = {"kept": kept, "crew": crew, "memory": 1 << 30, "progress": self.progress}
            timed("calibrate", lambda: sharding.collect(self.source, self.drawn, folder, _SHARDS, **shards))
            statistics = Statistics(folder)
            self.statistics_bytes = sum(path.stat().st_size for path in folder.iterdir())
            every = [formats.get(name) for name in self.names]
            alone = workers == 1 and executor == "local"  # what comes between two answers is then one unit
            clock = _Clock(self.progress)
            measured = {"kept": kept, "crew": crew, "progress": clock.progress}
            timed("measure", lambda: sensitivity.measure(self.source, statistics, every, **measured))  # type: ignore[arg-type]
            self.units += self._costs("measure", clock) if alone else []
            clock = _Clock(self.progress)
            timed("quantize", lambda: self._quantize(statistics, kept, crew, clock.progress))
            self.units += self._costs("quantize", clock) if alone else []
            self._same_files()
        return Point(workers, seconds, memory)

    def _start(self, kept: Kept, crew: Crew, workers: int) -> None:
        """Every worker loads torch and opens the model: one small weight each, without statistics, under names of their own."""
        small = min(self.source.weights, key=lambda weight: weight.shape[0] * weight.shape[1])
        one = {"weight": small.name, "format": "q8_0", "version": 1, "method": "rtn"}
        wanted: list[Wanted] = [({**one, "worker": number}, {}) for number in range(workers)]
        crew.finish("weight", wanted, kept.of(start=True), silent, "starting")
        kept.drop_step("weight")

    def _quantize(self, statistics: Statistics, kept: Kept, crew: Crew | None, progress: Progress[Any]) -> None:
        own = kept.of(source=self.source.fingerprint, statistics=statistics.digest)
        for _ in outcomes.independent(self.source, self.plan, statistics, progress, own, crew):
            pass

    def _costs(self, step: str, clock: _Clock) -> list[UnitCost]:
        """Units are answered in the order of the weights, where one worker has them."""
        pairs = zip(self.source.weights, clock.seconds, strict=True)
        return [UnitCost(step, *weight.shape, seconds) for weight, seconds in pairs if weight.kind in ("attention", "mlp")]

    def _same_files(self) -> None:
        """Named by their own hashes."""
        there = {path.name for step in ("row", "weight") for path in (self.work / "kept").glob(f"{step}-*")}
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
        with executors.opened(executors.parse("ray" if executor == "ray" else f"local:{workers}"), source, source.path, True) as crew:
            yield crew
    finally:
        if executor == "ray":
            ray.shutdown()


class _Clock:
    """Seconds between the items of the first bar: a worker's units come before what the coordinator does with them."""

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


@contextmanager
def _peak(found: dict[str, int], step: str) -> Iterator[None]:
    """The most anonymous memory of any one worker process of this one's while inside, looked at 20 times a second."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.05):
            for children in Path(f"/proc/{os.getpid()}/task").glob("*/children"):
                with suppress(OSError, StopIteration):
                    for child in children.read_text().split():
                        lines = Path(f"/proc/{child}/status").read_text().splitlines()
                        now = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))
                        found[step] = max(now, found.get(step, 0))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()
