"""`fewbits quantize` and `fewbits verify` where the model is an .onnx file: plain arguments in, results that know their JSON out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits import activations as activation_rules
from fewbits import formats, machines, methods, onnx_files, planning, provenance, runtimes, trial
from fewbits.checkpoints.folder import read_text
from fewbits.errors import InputError
from fewbits.files import Staged, to_json
from fewbits.progress import silent

if TYPE_CHECKING:
    from fewbits.onnx_files.inputs import Inputs
    from fewbits.onnx_files.reading import OnnxModel
    from fewbits.onnx_files.verifying import FileVerdict
    from fewbits.planning import Plan
    from fewbits.progress import Progress

SAMPLES = 256  # to calibrate with
_JUDGED = 64


@dataclass(frozen=True)
class QuantizedFile:
    path: Path
    plan: Plan
    plan_path: Path
    verdict: FileVerdict | None
    outcomes: Mapping[str, Any]  # by weight: the method used, and the damage on held-out samples
    calibration: str | None = None  # sha256 of the inputs that it was calibrated with; None: none were used

    def to_dict(self) -> dict[str, object]:
        again = {"machine": asdict(machines.here()), "caveat": machines.caveat(self.calibration is not None)}
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
    """A float .onnx to a packed one, run beside it. `data`: a .npz of inputs, or text where the file reads text; part of it is set
    aside to judge on where static activations are calibrated with the rest."""
    source, path = onnx_files.open(model), _output(Path(out))
    from fewbits.onnx_files import calibrating, carrying, saving, verifying

    verifying.check_thresholds(min_cosine, max_error)
    saving.check_output(source, path)
    target = carrying.OnnxFile(source)
    made = _plan(source, target, format, plan, override, method, activations)
    if not no_verify or calibrating.needs_ranges(made) or calibrating.needs_statistics(made):
        trial.check(runtimes.get("onnxruntime"), source.path)
        verifying.session(source.path, source.path)  # what cannot be run is refused before anything is written
    given, judged = _inputs(source, made, [Path(p) for p in data], samples, seed)
    calibrates = calibrating.needs_ranges(made)
    if calibrates:
        made = calibrating.with_ranges(source, made, given, progress)
    made = carrying.priced(made, source, target)
    statistics = calibrating.Statistics(source, made, given, progress) if given.real and calibrating.needs_statistics(made) else None
    seen = given.sha256 if calibrates or statistics else None
    how = onnx_files.quantize(source, made, path, progress, accuracy_level=target.accuracy_level, statistics=statistics, calibration=seen)
    work = path.with_name(f"{path.name}.work")
    with Staged(work / "plan.json") as staged:
        staged.write_text(made.to_json())
    verdict = None if no_verify else onnx_files.verify(path, source.path, judged, min_cosine, max_error, progress)
    result = QuantizedFile(path, made, work / "plan.json", verdict, how, seen)
    with Staged(work / "results.json") as staged:
        staged.write_text(to_json(result.to_dict()))
    provenance.record(path)
    return result


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
    """Runs an .onnx file beside the float .onnx file that it was made of."""
    source = onnx_files.open(against)
    from fewbits.onnx_files import inputs

    given = inputs.gather(source, [Path(p) for p in data], samples, seed)
    provenance.check(Path(path))
    for file in (Path(path), source.path):
        trial.check(runtimes.get("onnxruntime"), file)
    return onnx_files.verify(path, source.path, given, min_cosine, max_error, progress)


def _inputs(source: OnnxModel, plan: Plan, data: Sequence[Path], samples: int, seed: int) -> tuple[Inputs, Inputs]:
    """To calibrate with and to judge on: never the same ones, unless nothing is calibrated."""
    from fewbits.onnx_files import calibrating, inputs

    judged = inputs.gather(source, data, _JUDGED, seed)
    if not (calibrating.needs_ranges(plan) or calibrating.needs_statistics(plan)):
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
    from fewbits.onnx_files import carrying

    if (format is None) == (plan is None):
        raise InputError(
            "give a format or a plan", "--format NAME for one format for all, or --plan FILE; an .onnx file takes no other budget"
        )
    if plan is not None:
        if override or activations != "none":
            raise InputError("`--override` and `--activations` go with `--format`", "the plan says it itself: edit plan.json instead")
        text = read_text(Path(plan), "`fewbits quantize` writes a plan.json beside its output")
        made = planning.read(text, source.weights, target)
    else:
        assert format is not None
        activation = activation_rules.parse(activations)
        made = carrying.plan_for(source, target, format, override, method.lower(), activation)
        if made.fallbacks and all(formats.get(entry.format).levels is None for entry in made.entries):
            first = made.fallbacks[0]
            found = f"no weight of `{source.path.name}` can be {format}: `{first.weight}` is {first.reason}"
            raise InputError(found, "choose another format")
    for name in {entry.method for entry in made.entries}:
        methods.get(name)
    return made


def _output(out: Path) -> Path:
    return out if out.suffix.lower() == ".onnx" else out / "model.onnx"
