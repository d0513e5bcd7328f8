"""The whole way on the embedded model, with no arguments: calibrate, measure, plan, quantize, write, run in two real runtimes, judge."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from fewbits import artifact as artifacts
from fewbits import (
    budgeted,
    calibration,
    embedded,
    formats,
    model,
    pipeline,
    planning,
    preparation,
    results,
    runtimes,
    sensitivity,
    targets,
    verification,
)
from fewbits.artifact import Artifact
from fewbits.calibration.coverage import coverage
from fewbits.crosscheck import CrossCheck, crosscheck
from fewbits.errors import InputError, MissingError
from fewbits.planning import Plan, deciding
from fewbits.planning.deciding import Decision
from fewbits.progress import Progress, silent
from fewbits.runtimes import torch as torch_runtime
from fewbits.scratch import scratch_folder
from fewbits.sensitivity import Sensitivity
from fewbits.targets import Target
from fewbits.verification import Thresholds, Verdict

# (format, target): one row of the table each. None: the weights as they are. A size: planned, below the format that takes as much.
_ROWS = (
    (None, "gguf"),
    (None, "onnx"),
    ("q8_0", "gguf"),
    ("int8_channel", "onnx"),
    ("int4_g32", "onnx"),
    ("5bpw", "onnx"),
    ("int4_g32", "gguf"),
    ("q4_k", "gguf"),
    ("4.5bpw", "gguf"),
    ("q3_k", "gguf"),
    ("3.4375bpw", "gguf"),
)
_CROSSCHECK_WINDOWS = 8
_SAMPLES = 48  # to calibrate with: 24,576 tokens
_LOOKED_AT = (("4.5bpw", "gguf"), ("5bpw", "onnx"))  # the report is about the first of these that there is


@dataclass(frozen=True)
class Row:
    format: str
    target: str
    file: str
    plan: Plan
    verdict: Verdict
    crosscheck: CrossCheck
    decision: Decision | None = None  # of a planned one


@dataclass(frozen=True)
class Demo:
    model: str
    folder: str
    rows: tuple[Row, ...]
    skipped: tuple[str, ...]  # runtimes that are not here, and how to get them
    detail: Mapping[str, object] | None = None  # all about one planned file, as `quantize` would write it

    @property
    def passed(self) -> bool:
        return bool(self.rows) and all(row.verdict.passed and row.crosscheck.agrees for row in self.rows)

    def to_dict(self) -> dict[str, object]:
        rows = [
            {"format": r.format, "target": r.target, "file": r.file, "fallbacks": len(r.plan.fallbacks), **r.verdict.to_dict()}
            | {"crosscheck": asdict(r.crosscheck) | {"limit": r.crosscheck.limit, "agrees": r.crosscheck.agrees}}
            for r in self.rows
        ]
        return {
            "model": self.model, "folder": self.folder, "rows": rows, "skipped": list(self.skipped), "passed": self.passed,
            "detail": self.detail,
        }  # fmt: skip


def demo(out: str | Path = "fewbits-demo", name: str = "embedded", tokens: int | None = None, progress: Progress[Any] = silent) -> Demo:
    """The whole way on a small model: a file for each row of the table, run in its runtime and judged. `name`: embedded or smollm2."""
    folder = Path(out)
    source = model.open(_source(name, progress))
    tokens = tokens or (pipeline.TOKENS if name == "embedded" else 4096)
    windows = preparation.held_out_windows(source, (), None, tokens)
    length = len(windows[0])

    skipped = tuple(
        f"{r.name}: {reason} (pip install 'fewbits[{r.extra}]')" for r in map(_runtime, targets.all()) if (reason := r.missing())
    )
    rows = [(fmt, to) for fmt, to in _ROWS if not _runtime(to).missing()]
    if not rows:
        raise MissingError("no runtime is here to run a file in", "pip install 'fewbits[llamacpp,onnx]'")
    made: dict[tuple[str, str], tuple[Path, Plan, Artifact, Decision | None]] = {}
    sessions: dict[str, runtimes.Session] = {}
    with scratch_folder() as scratch, ExitStack() as opened:
        samples = calibration.draw(source, (), _SAMPLES, None, 0)
        statistics = calibration.collect(source, samples, Path(scratch) / "statistics", progress=progress)

        @cache
        def measured_for(target: Target) -> Sensitivity:
            return sensitivity.measure(source, statistics, budgeted.candidates_for(source, target, ()), progress=silent)

        for fmt, to in progress(rows, len(rows), "quantizing and writing"):
            target = targets.get(to)
            label = fmt or "float"
            plan, decision = _plan(source, target, fmt, lambda target=target: measured_for(target))  # type: ignore[misc]
            artifact = artifacts.quantize(source, plan, Path(scratch) / f"{label}-{to}", silent, statistics)
            path = pipeline.export(artifact, folder / f"{label}{Path(target.file_name).suffix}", to=to)
            made[label, to] = (path, plan, artifact, decision)
            sessions[f"{label}-{to}"] = opened.enter_context(closing(_runtime(to).open(path, length)))
        measured = verification.measure(torch_runtime.of_module(source.module()), sessions, windows, progress)
        floors = {to: sum(m.kl) / len(m.kl) for to in targets.all() if (m := measured.get(f"float-{to}"))}
        few = windows[:: max(1, len(windows) // _CROSSCHECK_WINDOWS)][:_CROSSCHECK_WINDOWS]
        done = []
        for (label, to), (path, plan, artifact, decision) in progress(made.items(), len(made), "cross-checking with torch"):
            verdict = verification.judge(
                measured[f"{label}-{to}"],
                Thresholds(),
                nbytes=path.stat().st_size,
                bits_per_weight=pipeline.bits_per_weight(path, source),
                runtime=_runtime(to).name,
                runtime_version=_runtime(to).version(),
                kl_floor=floors[to],
            )
            check = crosscheck(artifact, targets.get(to), sessions[f"{label}-{to}"], few, floors[to])
            done.append(Row(label, to, path.name, plan, verdict, check, decision))
        detail = None
        for row in [row for wanted in _LOOKED_AT for row in done if (row.format, row.target) == wanted][:1]:
            path, _, artifact, _ = made[row.format, row.target]
            again = (f"fewbits demo -o {shlex.quote(str(out))} --model {name}",)
            gathered = results.gather(
                source, artifact, path, decision=row.decision, statistics=statistics, windows=windows, commands=again, progress=progress
            )
            seen = coverage(samples, source.tokenizer, windows)
            about = pipeline.Quantized(
                path, artifact.path, row.plan, row.verdict, seen, artifact.outcomes, decision=row.decision, gathered=gathered
            )
            detail = about.to_dict() | {"artifact": None}  # which was in a temporary folder
    result = Demo(name, str(folder), tuple(done), skipped, detail)
    results.write(folder, result.to_dict())
    return result


def _plan(source: model.Model, target: Target, wanted: str | None, table: Callable[[], Sensitivity]) -> tuple[Plan, Decision | None]:
    if wanted is None:
        return planning.kept(source.weights, target), None
    if wanted.endswith("bpw"):
        decision = deciding.decide(table(), target, deciding.Budget(size=wanted))
        return decision.plan, decision
    return planning.uniform(source.weights, target, formats.get(wanted), method="auto"), None


def _runtime(to: str) -> runtimes.Runtime:
    return runtimes.get(targets.get(to).runtime)


def _source(name: str, progress: Progress[Any]) -> Path:
    if name == "embedded":
        return embedded.MODEL
    if name == "smollm2":
        from fewbits.embedded import smollm2

        return smollm2.fetch(progress)
    raise InputError(f"no demo model is named `{name}`", "embedded (the default) or smollm2")
