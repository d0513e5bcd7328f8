"""What calibration and quantization cost, as multiples of one plain forward pass over the same tokens in the same run, and in memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from fewbits import artifact as artifacts
from fewbits import calibration, formats, model, planning, sensitivity, targets
from fewbits.benchmarks.scale.process_usage import peak
from fewbits.calibration.folder import Statistics
from fewbits.model import placement
from fewbits.model.walk import batches
from fewbits.planning.allocation import allocator
from fewbits.progress import Progress, silent
from fewbits.store.scratch import scratch_folder
from fewbits.targets import pricing


@dataclass(frozen=True)
class Step:
    name: str
    seconds: float
    cpu_seconds: float  # of all threads: other programs change it less than the seconds
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
    device: str = placement.CPU,
    progress: Progress[Any] = silent,
) -> Cost:
    source = model.open(name)
    drawn = calibration.draw(source, data, samples, length, 0)
    steps: list[Step] = []

    def timed(what: str, work: Callable[[], object]) -> None:
        with peak() as most:
            clock, cpu = time.perf_counter(), time.process_time()
            work()
            seconds, cpu_seconds = time.perf_counter() - clock, time.process_time() - cpu
        base = steps[0] if steps else None
        multiples = (seconds / base.seconds, cpu_seconds / base.cpu_seconds) if base else (1.0, 1.0)
        steps.append(Step(what, seconds, cpu_seconds, *multiples, most[0] if most else None))

    def forward(module: Any) -> None:
        with torch.inference_mode():
            for batch in progress(batches(drawn.ids), len(batches(drawn.ids)), "forward"):
                for ids in batch.ids:  # one at a time: the logits of a batch would take gigabytes
                    module(input_ids=ids.unsqueeze(0), use_cache=False)

    def placed(folder: Path, **how: Any) -> None:
        with placement.passes_on(device):
            calibration.collect(source, drawn, folder, **how)

    module: Any = source.module()
    with torch.inference_mode():
        module(input_ids=batches(drawn.ids)[0].ids[:1], use_cache=False)  # the first call allocates
    timed("forward", lambda: forward(module))
    module = None
    with scratch_folder() as scratch:
        folder = Path(scratch)
        plain: dict[str, Any] = {"hessians": False, "gradients": False, "progress": progress}
        timed("statistics", lambda: placed(folder / "plain", **plain))
        timed("statistics, Hessians and gradients", lambda: placed(folder / "all", progress=progress))
        statistics = Statistics(folder / "all")
        target = targets.get("gguf")
        plan = planning.uniform(source.weights, target, formats.get(format), (), method)
        timed(f"{method}, {format}", lambda: artifacts.quantize(source, plan, folder / "artifact", progress, statistics))
        candidates, tables = pricing.candidates_for(source, target, ()), []
        timed(
            f"measuring, {len(candidates)} formats",
            lambda: tables.append(sensitivity.measure(source, statistics, candidates, progress=progress)),
        )
        timed("planning, 20 sizes", lambda: allocator(tables[0], target).frontier())
    return Cost(source.path.name, drawn.tokens, torch.get_num_threads(), tuple(steps))
