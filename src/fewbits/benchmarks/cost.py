"""What calibration and quantization cost, as multiples of one plain forward pass over the same tokens in the same run, and in memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from fewbits import artifact as artifacts
from fewbits import budgeted, calibration, formats, model, planning, sensitivity, targets
from fewbits.calibration.collecting import batches
from fewbits.calibration.storing import Statistics
from fewbits.planning.allocation import allocator
from fewbits.progress import Progress, silent
from fewbits.scratch import scratch_folder


@dataclass(frozen=True)
class Step:
    name: str
    seconds: float
    cpu_seconds: float  # of all threads: what a busy machine does not change much
    multiple: float  # of the forward pass, by the clock
    cpu_multiple: float
    peak_memory: int | None  # anonymous bytes; None: this system does not say


@dataclass(frozen=True)
class Cost:
    model: str
    tokens: int
    threads: int
    steps: tuple[Step, ...]

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


def cost(
    name: str | Path,
    *,
    data: calibration.Paths = (),
    samples: int = 64,
    length: int | None = None,
    format: str = "q4_0",
    method: str = "gptq",
    progress: Progress[Any] = silent,
) -> Cost:
    source = model.open(name)
    drawn = calibration.draw(source, data, samples, length, 0)
    steps: list[Step] = []

    def timed(what: str, work: Callable[[], object]) -> None:
        with _peak() as peak:
            clock, cpu = time.perf_counter(), time.process_time()
            work()
            seconds, cpu_seconds = time.perf_counter() - clock, time.process_time() - cpu
        base = steps[0] if steps else None
        multiples = (seconds / base.seconds, cpu_seconds / base.cpu_seconds) if base else (1.0, 1.0)
        steps.append(Step(what, seconds, cpu_seconds, *multiples, peak.get("bytes")))

    def forward(module: Any) -> None:
        with torch.inference_mode():
            for batch in progress(batches(drawn.ids), len(batches(drawn.ids)), "forward"):
                for ids in batch.ids:  # one at a time, as wide logits want it
                    module(input_ids=ids.unsqueeze(0), use_cache=False)

    module: Any = source.module()
    with torch.inference_mode():
        module(input_ids=batches(drawn.ids)[0].ids[:1], use_cache=False)  # the first call allocates
    timed("forward", lambda: forward(module))
    module = None
    with scratch_folder() as scratch:
        folder = Path(scratch)
        plain: dict[str, Any] = {"hessians": False, "gradients": False, "progress": progress}
        timed("statistics", lambda: calibration.collect(source, drawn, folder / "plain", **plain))
        timed("statistics, Hessians and gradients", lambda: calibration.collect(source, drawn, folder / "all", progress=progress))
        statistics = Statistics(folder / "all")
        target = targets.get("gguf")
        plan = planning.uniform(source.weights, target, formats.get(format), (), method)
        timed(f"{method}, {format}", lambda: artifacts.quantize(source, plan, folder / "artifact", progress, statistics))
        candidates, found = budgeted.candidates_for(source, target, ()), []
        timed(
            f"measuring, {len(candidates)} formats",
            lambda: found.append(sensitivity.measure(source, statistics, candidates, progress=progress)),
        )
        timed("planning, 20 sizes", lambda: allocator(found[0], target).frontier())
    return Cost(source.path.name, drawn.tokens, torch.get_num_threads(), tuple(steps))


@contextmanager
def _peak() -> Iterator[dict[str, int]]:
    """The most anonymous memory of this process while inside, looked at 50 times a second."""
    found: dict[str, int] = {}
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.02):
            if (now := anonymous_bytes()) is not None:
                found["bytes"] = max(now, found.get("bytes", 0))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield found
    finally:
        done.set()
        watcher.join()


def anonymous_bytes() -> int | None:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon")), None)
