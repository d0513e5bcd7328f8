"""The whole way on the embedded model, with no arguments: calibrate, measure, plan, quantize, write, run in two real runtimes, judge."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fewbits import artifact as artifacts
from fewbits import calibration, embedded, formats, planning, sensitivity, targets
from fewbits import model as models
from fewbits.artifact import Artifact
from fewbits.calibration import split
from fewbits.calibration.folder import Statistics
from fewbits.calibration.text.coverage import Coverage, coverage
from fewbits.calibration.text.windows import Window
from fewbits.errors import InputError, MissingError
from fewbits.inspection import sizes
from fewbits.model import Model
from fewbits.planning import Plan
from fewbits.planning.accuracy import Thresholds
from fewbits.planning.decision import Budget, Decision, decide
from fewbits.progress import Progress, silent
from fewbits.reporting import results
from fewbits.reporting.results.demonstration import Demo, MadeFile
from fewbits.reporting.results.quantized import Quantized
from fewbits.sensitivity import Sensitivity
from fewbits.store.scratch import scratch_folder
from fewbits.targets import export, pricing
from fewbits.verification import files, metrics, runtimes
from fewbits.verification.crosscheck import crosscheck
from fewbits.verification.runtimes import torch as torch_runtime

# (format, target): one row of the table each. None: the weights as they are. A size: planned; it comes after the format of that size.
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
_REPORTED = (("4.5bpw", "gguf"), ("5bpw", "onnx"))  # the report is about the first of these that there is


@dataclass(frozen=True)
class _Written:
    """A file that is not judged yet."""

    format: str
    target: str
    path: Path
    plan: Plan
    artifact: Artifact
    decision: Decision | None  # of a planned one


def demo(out: str | Path = "fewbits-demo", model: str = "embedded", tokens: int | None = None, progress: Progress[Any] = silent) -> Demo:
    """The whole way on a small model: a file for each row of the table, run in its runtime and judged. `model`: embedded or smollm2."""
    folder = Path(out)
    source = models.open(_source(model, progress))
    windows = split.held_out_windows(source, (), None, tokens or (files.TOKENS if model == "embedded" else 4096))
    skipped = tuple(
        f"{r.name}: {reason} (pip install 'fewbits[{r.extra}]')" for r in map(_runtime, targets.all()) if (reason := r.missing())
    )
    rows = [(fmt, to) for fmt, to in _ROWS if not _runtime(to).missing()]
    if not rows:
        raise MissingError("no runtime is here to run a file in", "pip install 'fewbits[llamacpp,onnx]'")
    with scratch_folder() as scratch:
        samples = calibration.draw(source, (), _SAMPLES, None, 0)
        statistics = calibration.collect(source, samples, Path(scratch) / "statistics", progress=progress)
        written = _write(source, statistics, rows, folder, Path(scratch), progress)
        judged = _judge(source, written, windows, progress)
        detail = None
        by_row = {(file.format, file.target): (file, row) for file, row in zip(written, judged, strict=True)}
        if reported := next((by_row[key] for key in _REPORTED if key in by_row), None):
            command = f"fewbits demo -o {shlex.quote(str(out))} --model {model}"
            detail = _detail(source, *reported, statistics, coverage(samples, source.tokenizer, windows), windows, command, progress)
    result = Demo(model, str(folder), tuple(judged), skipped, detail)
    results.write(folder, result.to_dict())
    return result


def _write(
    source: Model, statistics: Statistics, rows: Sequence[tuple[str | None, str]], folder: Path, scratch: Path, progress: Progress[Any]
) -> list[_Written]:
    """Files in `folder`, and in `scratch` the artifacts that they are exported from."""
    written = []
    tables: dict[str, Sensitivity] = {}  # by target
    for fmt, to in progress(rows, len(rows), "quantizing and writing"):
        target, label, decision = targets.get(to), fmt or "float", None
        if fmt is None:
            plan = planning.unquantized(source.weights, target)
        elif fmt.endswith("bpw"):
            if to not in tables:
                tables[to] = sensitivity.measure(source, statistics, pricing.candidates_for(source, target, ()), progress=silent)
            decision = decide(tables[to], target, Budget(size=fmt))
            plan = decision.plan
        else:
            plan = planning.uniform(source.weights, target, formats.get(fmt), method="auto")
        artifact = artifacts.quantize(source, plan, scratch / f"{label}-{to}", silent, statistics)
        path = export.export(artifact, folder / f"{label}{Path(target.file_name).suffix}", to=to)
        written.append(_Written(label, to, path, plan, artifact, decision))
    return written


def _judge(source: Model, written: Sequence[_Written], windows: Sequence[Window], progress: Progress[Any]) -> list[MadeFile]:
    """Each file in its runtime against the float model, and on a few windows against torch with the same packed weights."""
    judged = []
    few = windows[:: max(1, len(windows) // _CROSSCHECK_WINDOWS)][:_CROSSCHECK_WINDOWS]
    with ExitStack() as opened:
        sessions = {
            f"{file.format}-{file.target}": opened.enter_context(closing(_runtime(file.target).open(file.path, len(windows[0]))))
            for file in written
        }
        measured = metrics.compare_logits(torch_runtime.of_module(source.module()), sessions, windows, progress)
        floors = {to: sum(m.kl) / len(m.kl) for to in targets.all() if (m := measured.get(f"float-{to}"))}
        for file in progress(written, len(written), "cross-checking with torch"):
            key, runtime, floor = f"{file.format}-{file.target}", _runtime(file.target), floors[file.target]
            verdict = metrics.judge(
                measured[key],
                Thresholds(),
                nbytes=file.path.stat().st_size,
                bits_per_weight=sizes.bits_per_weight(file.path, source),
                runtime=runtime.name,
                runtime_version=runtime.version(),
                kl_floor=floor,
            )
            check = crosscheck(file.artifact, targets.get(file.target), sessions[key], few, floor)
            judged.append(MadeFile(file.format, file.target, file.path.name, file.plan, verdict, check, file.decision))
    return judged


def _detail(
    source: Model,
    file: _Written,
    judged: MadeFile,
    statistics: Statistics,
    covered: Coverage,
    windows: Sequence[Window],
    command: str,
    progress: Progress[Any],
) -> dict[str, Any]:
    """All about one file, as `quantize` would write it."""
    gathered = results.gather(
        results.Subject(source, file.artifact, file.path), decision=file.decision, statistics=statistics, windows=windows,
        commands=(command,), progress=progress,
    )  # fmt: skip
    about = Quantized(
        file.path, file.artifact.path, file.plan, judged.verdict, covered, file.artifact.outcomes, decision=file.decision, gathered=gathered
    )
    return about.to_dict() | {"artifact": None}  # which was in a temporary folder


def _runtime(to: str) -> runtimes.Runtime:
    return runtimes.get(targets.get(to).runtime)


def _source(name: str, progress: Progress[Any]) -> Path:
    if name == "embedded":
        return embedded.MODEL
    if name == "smollm2":
        from fewbits.embedded import smollm2

        return smollm2.fetch(progress)
    raise InputError(f"no demo model is named `{name}`", "embedded (the default) or smollm2")
