"""`fewbits quantize` and `fewbits verify` for a float .onnx file."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from fewbits import formats, methods, onnx_graphs, planning
from fewbits.artifact import machine, outcomes, written
from fewbits.errors import InputError
from fewbits.formats.runtime import activations as activation_rules
from fewbits.planning import uninformed
from fewbits.progress import silent
from fewbits.store.files import Staged, to_json
from fewbits.store.untrusted import read_text
from fewbits.verification import runtimes, sandbox

if TYPE_CHECKING:
    from fewbits.artifact.outcomes import StatisticsSource, Stream
    from fewbits.model.onnx.graph import OnnxModel
    from fewbits.onnx_graphs.inputs import Inputs
    from fewbits.onnx_graphs.outputs import FileVerdict
    from fewbits.planning import Plan
    from fewbits.progress import Progress

SAMPLES = 256  # to calibrate with
_JUDGED = 64  # samples to judge on


@dataclass(frozen=True)
class QuantizedFile:
    path: Path
    plan: Plan
    plan_path: Path
    verdict: FileVerdict | None
    outcomes: Mapping[str, Any]  # by weight: the method used, and the damage on held-out samples
    calibration: str | None = None  # sha256 of the inputs that it was calibrated with; None: none were used

    def to_dict(self) -> dict[str, object]:
        again = {"machine": asdict(machine.here()), "caveat": machine.caveat(self.calibration is not None)}
        return {
            "file": str(self.path),
            "plan": json.loads(self.plan.to_json()),
            "verdict": self.verdict.to_dict() if self.verdict else None,
            "outcomes": dict(self.outcomes),
            "reproduction": {"calibration_sha256": self.calibration} | again,
        }


def quantize(
    model: str | Path,
    out: str | Path,
    *,
    format: str | None = None,
    plan: str | Path | None = None,
    override: Sequence[str] = (),
    method: str = "auto",
    activations: str = "none",
    data: Sequence[str | Path] = (),
    samples: int = SAMPLES,
    seed: int = 0,
    min_cosine: float | None = None,
    max_error: float | None = None,
    no_verify: bool = False,
    progress: Progress[Any] = silent,
) -> QuantizedFile:
    """Quantizes a float .onnx file and runs both. `data`: a .npz of inputs, or text if the file reads text. If something is calibrated, a
    part of it is set aside to judge on."""
    source, path = onnx_graphs.open(model), _output(Path(out))
    from fewbits.onnx_graphs import card, outputs, save, statistics
    from fewbits.onnx_graphs.inputs import declarations
    from fewbits.onnx_graphs.target import OnnxFile, priced

    outputs.check_thresholds(min_cosine, max_error)
    save.check_output(source, path)
    target = OnnxFile(source)
    made = _plan(source, target, format, plan, override, method, activations)
    calibrates = statistics.needs_ranges(made), statistics.needs_statistics(made)
    if not no_verify or any(calibrates):
        sandbox.check(runtimes.get("onnxruntime"), source.path)
        outputs.session(source.path, source.path)  # a file that cannot be run is refused before anything is written
    given, judged = _inputs(source, any(calibrates), [Path(p) for p in data], samples, seed)
    if calibrates[1] and not given.real:
        uninformed.check_plan(made, "give `--data` to calibrate with, or `--method rtn` to round without it")
    if calibrates[0]:
        made = statistics.with_ranges(source, made, given, progress)
    made = priced(made, source, target)
    known = statistics.Statistics(source, made, given, progress) if given.real and calibrates[1] else None
    seen = given.sha256 if calibrates[0] or known else None
    how = write_quantized(source, made, path, progress, accuracy_level=target.accuracy_level, statistics=known, calibration=seen)
    work = path.with_name(f"{path.name}.work")
    with Staged(work / "plan.json") as staged:
        staged.write_text(made.to_json())
    verdict = None if no_verify else outputs.verify(path, source.path, judged, min_cosine, max_error, progress)
    result = QuantizedFile(path, made, work / "plan.json", verdict, how, seen)
    with Staged(work / "results.json") as staged:
        staged.write_text(to_json(result.to_dict()))
    options: dict[str, Any] = {"format": format, "plan": plan, "override": list(override), "method": method, "activations": activations}
    command = _command(model, out, options | {"data": list(data)})
    card.write(path, source.path, list(declarations(source)), made, verdict, command)
    written.record(path)
    return result


def _command(model: str | Path, out: str | Path, options: Mapping[str, Any]) -> str:
    words = ["fewbits", "quantize", str(model), "-o", str(out)]
    for name, value in options.items():
        given = value if isinstance(value, list) else [] if value in (None, "auto", "none") else [value]
        words += [word for each in given for word in (f"--{name}", str(each))]
    return shlex.join(words)


def write_quantized(
    model: OnnxModel,
    plan: Plan,
    out: Path,
    progress: Progress[Any] = silent,
    *,
    accuracy_level: int | None = None,
    statistics: StatisticsSource | None = None,
    calibration: str | None = None,
) -> dict[str, dict[str, object]]:
    """Writes the file of a plan; returns how the codes of each weight were chosen. `accuracy_level` of MatMulNBits; None: that of the
    ONNX target. `calibration`: the hash of the inputs that were calibrated with."""
    from fewbits.onnx_graphs import rewrite, save
    from fewbits.targets.onnx import ACCURACY_LEVEL

    how: dict[str, dict[str, object]] = {}

    def noted(stream: Stream) -> Stream:
        for weight, outcome in stream:
            how[weight.name] = {key: value for key, value in vars(outcome).items() if key not in {"parts", "bias"} and value}
            yield weight, outcome

    stream = outcomes.independent(cast(Any, model), plan, statistics, progress)
    level = ACCURACY_LEVEL if accuracy_level is None else accuracy_level
    save.save(rewrite.rewritten(model, plan, level, noted(stream), calibration), model, out)
    return how


def verify(
    path: str | Path,
    against: str | Path,
    *,
    data: Sequence[str | Path] = (),
    samples: int = _JUDGED,
    seed: int = 0,
    min_cosine: float | None = None,
    max_error: float | None = None,
    progress: Progress[Any] = silent,
) -> FileVerdict:
    """Runs an .onnx file beside the float .onnx file that it was made from."""
    source = onnx_graphs.open(against)
    from fewbits.onnx_graphs import inputs, outputs

    given = inputs.gather(source, [Path(p) for p in data], samples, seed)
    written.check(Path(path))
    for file in (Path(path), source.path):
        sandbox.check(runtimes.get("onnxruntime"), file)
    return outputs.verify(Path(path), source.path, given, min_cosine, max_error, progress)


def _inputs(source: OnnxModel, calibrates: bool, data: Sequence[Path], samples: int, seed: int) -> tuple[Inputs, Inputs]:
    """Samples to calibrate with and samples to judge on: never the same ones, unless nothing is calibrated."""
    from fewbits.onnx_graphs import inputs

    judged = inputs.gather(source, data, _JUDGED, seed)
    if not calibrates:
        return judged, judged
    given = inputs.gather(source, data, samples + _JUDGED if data else samples, seed, calibration=True)
    return given.split() if data else (given, judged)


def _plan(
    source: OnnxModel,
    target: Any,
    format: str | None,
    plan: str | Path | None,
    override: Sequence[str],
    method: str,
    activations: str,
) -> Plan:
    from fewbits.onnx_graphs.target import plan_for

    if (format is None) == (plan is None):
        raise InputError(
            "give a format or a plan", "`--format NAME` for one format for all, or `--plan FILE`; an .onnx file takes no other budget"
        )
    if plan is not None:
        if override or activations != "none":
            raise InputError("`--override` and `--activations` go with `--format`", "the plan says it itself: edit plan.json instead")
        text = read_text(Path(plan), "`fewbits quantize` writes a plan.json beside its output")
        made = planning.read(text, source.weights, target)
    else:
        assert format is not None
        activation = activation_rules.parse(activations)
        made = plan_for(source, target, format, override, method.lower(), activation)
        if made.fallbacks and all(formats.get(entry.format).is_cast for entry in made.entries):
            first = made.fallbacks[0]
            failure = f"no weight of `{source.path.name}` can be {format}: `{first.weight}` is {first.reason}"
            raise InputError(failure, "choose another format")
    for name in {entry.method for entry in made.entries}:
        methods.get(name)
    return made


def _output(out: Path) -> Path:
    return out if out.suffix.lower() == ".onnx" else out / "model.onnx"
