"""The whole way: open -> plan -> quantize -> export -> verify. Each step hands one plain value to the next."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits import artifact as artifacts
from fewbits import embedded, formats, planning, runtimes, targets, texts, verification
from fewbits import model as models
from fewbits.artifact import Artifact
from fewbits.errors import InputError
from fewbits.files import Staged
from fewbits.inspection import tensor_bytes
from fewbits.progress import silent
from fewbits.verification import Thresholds, Verdict

if TYPE_CHECKING:
    from fewbits.model import Model
    from fewbits.planning import Plan
    from fewbits.progress import Progress
    from fewbits.runtimes import Runtime
    from fewbits.targets import Target

TOKENS = 16384  # predicted in a verification by default: the interval of the mean KL is then about 3 % wide


@dataclass(frozen=True)
class Quantized:
    path: Path
    artifact: Path
    plan: Plan
    verdict: Verdict | None

    def to_dict(self) -> dict[str, object]:
        return {
            "file": str(self.path),
            "artifact": str(self.artifact),
            "plan": json.loads(self.plan.to_json()),
            "verdict": self.verdict.to_dict() if self.verdict else None,
        }


def quantize(
    model: str | Path,
    out: str | Path,
    *,
    to: str = "gguf",
    format: str | None = None,
    plan: str | Path | None = None,
    override: Sequence[str] = (),
    method: str = "rtn",
    data: Sequence[str | Path] = (),
    thresholds: Thresholds = Thresholds(),  # noqa: B008 - frozen
    verify_file: bool = True,
    offline: bool = False,
    progress: Progress[Any] = silent,
) -> Quantized:
    """A checkpoint to a file of `to`, by one format for all with overrides or by a plan.json, verified in its runtime."""
    source, target = models.open(model, offline), targets.get(to)
    made = make_plan(source, target, format, plan, override, method)
    path = output_path(Path(out), target)
    if verify_file:  # what verifying will need, asked for before hours of work
        runtimes.needed(runtimes.get(target.runtime))
        held_out_windows(source, data, None, TOKENS)
    work = path.with_name(f"{path.name}.work")
    artifact = artifacts.quantize(source, made, work / "artifact", progress)
    export(artifact, path, to=to, progress=progress)
    verdict = verify(path, source, data=data, thresholds=thresholds, progress=progress) if verify_file else None
    result = Quantized(path, work / "artifact", made, verdict)
    with Staged(work / "results.json") as staged:
        staged.write_text(json.dumps(result.to_dict(), indent=1))
    return result


def make_plan(source: Model, target: Target, format: str | None, plan: str | Path | None, override: Sequence[str], method: str) -> Plan:
    """Everything that can be refused is refused here, before any work."""
    if why_not := target.supports(source.config, source.tokenizer):
        raise InputError(f"{target.name} cannot hold `{source.path.name}`: {why_not}", f"other targets: {', '.join(targets.all())}")
    if (format is None) == (plan is None):
        raise InputError("give a budget", "--format NAME for one format for all, or --plan plan.json")
    if format is not None:
        return planning.uniform(source.weights, target, formats.get(format), override, method)
    if override:
        raise InputError("`--override` goes with `--format`", "edit plan.json instead")
    try:
        text = Path(str(plan)).read_text()
    except OSError as failure:
        raise InputError(
            f"`{plan}` cannot be read: {failure.strerror}", "`fewbits quantize` writes a plan.json into its artifact"
        ) from None
    return planning.read(text, source.weights, target)


def export(artifact: Artifact | str | Path, out: str | Path, *, to: str, progress: Progress[Any] = silent) -> Path:
    """One artifact to any target that accepts its formats."""
    if not isinstance(artifact, Artifact):
        artifact = Artifact(Path(artifact))
    target = targets.get(to)
    path = output_path(Path(out), target)
    if why_not := target.supports(artifact.config, artifact.tokenizer):
        raise InputError(f"{target.name} cannot hold `{artifact.path}`: {why_not}", f"other targets: {', '.join(targets.all())}")
    for weight in artifact.weights:
        fmt = formats.get(artifact.plan[weight.name].format)
        if why_not := planning.refuses(weight, target, fmt):
            raise InputError(f"{target.name} cannot hold `{weight.name}` in {fmt.name}: {why_not}", f"quantize with `--to {to}`")
    with Staged(path) as staged:
        target.write(artifact, staged, progress)
    return path


def verify(
    path: str | Path,
    against: str | Path | Model,
    *,
    data: Sequence[str | Path] = (),
    runtime: str = "auto",
    thresholds: Thresholds = Thresholds(),  # noqa: B008 - frozen
    length: int | None = None,
    tokens: int = TOKENS,
    floor: bool = True,
    progress: Progress[Any] = silent,
) -> Verdict:
    """Runs the file itself in the runtime it is meant for, beside the float model in torch."""
    from fewbits.runtimes import torch as torch_runtime

    path = Path(path)
    if not path.exists():
        raise InputError(f"there is nothing at `{path}`", "give a .gguf, an .onnx or a fewbits artifact folder")
    source = against if isinstance(against, models.Model) else models.open(against)
    judge = runtimes.needed(runtimes.for_file(path) if runtime == "auto" else runtimes.get(runtime))
    windows = held_out_windows(source, data, length, tokens)
    length = len(windows[0])

    with tempfile.TemporaryDirectory(prefix="fewbits-") as scratch:
        sessions = {"file": judge.open(path, length)}
        if floor and (target := _target_of(judge)):
            sessions["floor"] = judge.open(float_file(source, target, Path(scratch), progress), length)
        try:
            measured = verification.measure(torch_runtime.of_module(source.module()), sessions, windows, progress)
        finally:
            for session in sessions.values():
                session.close()
    kl_floor = float(sum(measured["floor"].kl) / len(measured["floor"].kl)) if "floor" in measured else None
    return verification.judge(
        measured["file"],
        thresholds,
        nbytes=path.stat().st_size if path.is_file() else sum(p.stat().st_size for p in path.iterdir()),
        bits_per_weight=8 * tensor_bytes(path) / parameters(source),
        runtime=judge.name,
        runtime_version=judge.version(),
        kl_floor=kl_floor,
    )


def held_out_windows(source: Model, data: Sequence[str | Path], length: int | None, tokens: int) -> list[texts.Window]:
    text = texts.read(data) if data else embedded.verification_text()
    return texts.windows(text, source.tokenizer, texts.window_length(source.config, length), tokens)


def float_file(source: Model, target: Target, folder: Path, progress: Progress[Any]) -> Path:
    """The unquantized model in the same container: what the runtime itself adds to the error is measured on it."""
    floor = artifacts.quantize(source, planning.kept(source.weights, target), folder / "float", progress)
    return export(floor, folder / target.file_name, to=target.name, progress=progress)


def parameters(source: Model) -> int:
    return sum(rows * cols for rows, cols in (w.shape for w in source.weights)) + sum(source.tensor(name).numel() for name in source.rest)


def output_path(out: Path, target: Target) -> Path:
    """A file name is taken as it is; anything else is a folder that receives the target's usual file."""
    return out if out.suffix.lower() == Path(target.file_name).suffix else out / target.file_name


def _target_of(runtime: Runtime) -> Target | None:
    return next((target for target in targets.all().values() if target.runtime == runtime.name), None)
