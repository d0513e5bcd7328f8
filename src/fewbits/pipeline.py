"""The whole way: open -> plan -> quantize -> export -> verify. Each step hands one plain value to the next."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits import activations as activation_rules
from fewbits import artifact as artifacts
from fewbits import budgeted, calibration, formats, manifest, methods, planning, preparation, runtimes, targets, texts, verification
from fewbits import model as models
from fewbits import rounds as loop
from fewbits.artifact import Artifact
from fewbits.calibration import Paths
from fewbits.calibration.coverage import Coverage
from fewbits.checkpoints.folder import read_text
from fewbits.errors import InputError
from fewbits.files import Staged, to_json
from fewbits.inspection import tensor_bytes
from fewbits.making import Maker
from fewbits.planning import deciding, speeds
from fewbits.planning.deciding import Budget
from fewbits.planning.wishes import Wishes, listed
from fewbits.progress import silent
from fewbits.verification import Thresholds, Verdict

if TYPE_CHECKING:
    from fewbits.making import Made
    from fewbits.model import Model
    from fewbits.planning import Plan
    from fewbits.planning.deciding import Decision
    from fewbits.progress import Progress
    from fewbits.rounds import Round
    from fewbits.runtimes import Runtime
    from fewbits.targets import Target

TOKENS = 16384  # predicted in a verification by default: the interval of the mean KL is then about 3 % wide


@dataclass(frozen=True)
class Quantized:
    path: Path
    artifact: Path
    plan: Plan
    verdict: Verdict | None
    coverage: Coverage | None = None  # how well the calibration text represents use; None: nothing was calibrated
    outcomes: Mapping[str, Any] = field(default_factory=dict)  # by weight: the method used, and the damage on held-out samples
    rewrites: Sequence[Mapping[str, Any]] = ()  # by place: how channels were rescaled, and what it did on held-out samples
    decision: Decision | None = None  # how the plan came about, where a budget was given
    rounds: Sequence[Round] = ()  # every plan that was made and measured on the way to an accuracy

    @classmethod
    def of(cls, made: Made, verdict: Verdict | None, decision: Decision | None = None, rounds: Sequence[Round] = ()) -> Quantized:
        ready, artifact = made.ready, made.artifact
        return cls(made.path, artifact.path, ready.plan, verdict, ready.coverage, artifact.outcomes, ready.rewrites, decision, rounds)

    def to_dict(self) -> dict[str, object]:
        return {
            "file": str(self.path),
            "artifact": str(self.artifact),
            "plan": json.loads(self.plan.to_json()),
            "verdict": self.verdict.to_dict() if self.verdict else None,
            "coverage": self.coverage.to_dict() if self.coverage else None,
            "outcomes": dict(self.outcomes),
            "rewrites": list(self.rewrites),
            "decision": self.decision.to_dict() if self.decision else None,
            "rounds": [asdict(each) for each in self.rounds],
        }


def quantize(
    model: str | Path,
    out: str | Path,
    *,
    to: str | None = None,
    split: int | None = None,
    format: str | None = None,
    plan: str | Path | None = None,
    size: str | None = None,
    fits: str | None = None,
    context: int | None = None,
    override: str | Sequence[str] = (),
    formats: str | Sequence[str] = (),
    together: str | Sequence[str] = (),
    min_speed: float | None = None,
    bandwidth: float = speeds.BANDWIDTH,
    strategy: str = "solve",
    rounds: int = loop.ROUNDS,
    method: str = "auto",
    data: Paths = (),
    held_out: Paths = (),
    stats: str | Path | None = None,
    samples: int = calibration.SAMPLES,
    seed: int = 0,
    rewrite: str = "none",
    sequential: bool = False,
    tune: int = 0,
    activations: str = "none",
    kv: str | None = None,
    memory: int = calibration.MEMORY,
    max_kl: float | None = None,
    min_agreement: float | None = None,
    max_ppl_ratio: float | None = None,
    length: int | None = None,
    tokens: int = TOKENS,
    no_verify: bool = False,
    offline: bool = False,
    progress: Progress[Any] = silent,
) -> Quantized:
    """A checkpoint to a file, verified in its runtime. The budget is a size, a device, an accuracy, one format for all, or a plan.json.

    What can be refused is refused before any work. `to` follows from the name of `out` where it is not given. `data` is text to
    calibrate with; what is judged on is `held_out`, or a part of `data` that calibration does not see, or the embedded text.
    """
    target, limits = target_for(Path(out), to, split), Thresholds(max_kl, min_agreement, max_ppl_ratio)
    path, budget = output_path(Path(out), target), Budget(size, fits, context, limits)
    wished = Wishes(listed(formats), listed(override), listed(together), strategy, kv, min_speed, bandwidth)
    fixed = [given for given in (format, plan, size, fits) if given is not None]
    if len(fixed) > 1 or not (fixed or budget.given):
        raise InputError(
            "give one budget", "--size 4.5bpw, --fits 8GB, --max-kl 0.01, --format NAME for one format for all, or --plan FILE"
        )
    planned = format is None and plan is None
    if not planned:
        _check_nothing_ignored(wished, plan is not None, activations)
    source = models.open(model, offline)
    if path.exists() and path.samefile(source.path):
        raise InputError(f"`{path}` is the model itself", "choose another `-o`")
    made = None if planned else make_plan(source, target, format, plan, wished.overrides, method, activations, kv)
    if made is None:
        _check_plannable(source, target, rewrite, activations, method, no_verify and budget.by_accuracy)
        if kv == "auto":
            raise InputError("`--kv auto` needs measured caches", "use `fewbits measure --kv int8,int4`, then `fewbits plan --kv auto`")
        deciding.says_cache(target, budget, kv)
        if budget.by_accuracy:
            deciding.predicted_kl(limits)
    needs = made is None or preparation.needs_calibration(made, rewrite)
    text = preparation.split(
        source, data, held_out, samples if sequential or tune > 0 or (stats is None and needs) else 0, length, seed, tokens
    )
    if not no_verify:
        runtimes.needed(runtimes.get(target.runtime))
    work = path.with_name(f"{path.name}.work")
    maker = Maker(source, target, text, work, progress, stats, rewrite, sequential, tune, memory)

    def judged(file: Path) -> Verdict:
        return _verify(file, source, text.windows, runtimes.get(target.runtime), limits, True, progress)

    if made is not None:
        result = Quantized.of(maker.make(made, path), None if no_verify else judged(path))
    else:
        found = budgeted.quantize(maker, path, budget, wished, None if no_verify else judged, method=method, most_rounds=rounds)
        result = Quantized.of(found.made, found.verdict, found.decision, found.rounds)
    if result.verdict:
        for folder in {result.artifact, result.path} if target.marker == manifest.NAME else {result.artifact}:
            artifacts.add_verdict(folder, result.verdict.to_dict())
    with Staged(work / "results.json") as staged:
        staged.write_text(to_json(result.to_dict()))
    return result


def _check_nothing_ignored(wished: Wishes, by_plan: bool, activations: str) -> None:
    """What only a budget leaves to choose, and what a plan.json says itself, is refused rather than left out in silence."""
    chosen = {"--formats": wished.formats, "--together": wished.together, "--min-speed": wished.min_speed is not None}
    chosen["--strategy"] = wished.strategy != "solve"
    if name := next((name for name, given in chosen.items() if given), None):
        raise InputError(f"`{name}` goes with a budget", "give `--size`, `--fits` or an accuracy instead of a format or a plan")
    said = {"--kv": wished.kv is not None, "--activations": activations != "none"}
    if by_plan and (name := next((name for name, given in said.items() if given), None)):
        raise InputError(f"`{name}` does not go with `--plan`", "the plan says it itself: edit plan.json instead")


def _check_plannable(source: Model, target: Target, rewrite: str, activations: str, method: str, blind: bool) -> None:
    _check_target(target, source.path, source.config, source.tokenizer)
    methods.get(method)
    if rewrite != "none":
        raise InputError("`--rewrite` goes with `--format`", "a budget chooses formats for the weights as they are")
    if activations != "none":
        raise InputError("`--activations` goes with `--format`", "or make a plan first and edit it")
    if blind:
        raise InputError("an accuracy cannot be met without measuring it", "leave `--no-verify` out, or give a size")


def make_plan(
    source: Model,
    target: Target,
    format: str | None,
    plan: str | Path | None,
    override: Sequence[str],
    method: str,
    activations: str = "none",
    kv: str | None = None,
) -> Plan:
    _check_target(target, source.path, source.config, source.tokenizer)
    if format is not None:
        activation = activation_rules.parse(activations)
        made = planning.uniform(source.weights, target, formats.get(format), override, method.lower(), activation, kv)
    elif override:
        raise InputError("`--override` goes with `--format`", "edit plan.json instead")
    else:
        text = read_text(Path(str(plan)), "`fewbits quantize` writes a plan.json into its artifact")
        made = planning.read(text, source.weights, target)
    for name in {entry.method for entry in made.entries}:
        methods.get(name)
    return made


def export(
    artifact: Artifact | str | Path, out: str | Path, *, to: str | None = None, split: int | None = None, progress: Progress[Any] = silent
) -> Path:
    """One artifact to any target that accepts its formats. `split`: bytes of tensors in each of several GGUF files."""
    target = target_for(Path(out), to, split)
    if not isinstance(artifact, Artifact):
        artifact = Artifact(Path(artifact))
    path = output_path(Path(out), target)
    _check_target(target, artifact.path, artifact.config, artifact.tokenizer)
    planning.checked(artifact.plan, artifact.weights, target)
    for weight in artifact.weights:
        fmt = formats.get(artifact.plan[weight.name].format)
        if why_not := planning.refuses(weight, target, fmt):
            raise InputError(f"{target.name} cannot hold `{weight.name}` in {fmt.name}: {why_not}", f"quantize with `--to {target.name}`")
    artifact.check(progress)
    with Staged(path, target.marker) as staged:
        target.write(artifact, staged, progress)
        target.check(artifact.plan, artifact.weights, staged)
    return path


def verify(
    path: str | Path,
    against: str | Path | Model,
    *,
    data: Paths = (),
    runtime: str = "auto",
    max_kl: float | None = None,
    min_agreement: float | None = None,
    max_ppl_ratio: float | None = None,
    length: int | None = None,
    tokens: int = TOKENS,
    floor: bool = True,
    offline: bool = False,
    progress: Progress[Any] = silent,
) -> Verdict:
    """Runs the file itself in the runtime it is meant for, beside the float model in torch."""
    path, thresholds = Path(path), Thresholds(max_kl, min_agreement, max_ppl_ratio)
    if not path.exists():
        raise InputError(f"there is nothing at `{path}`", "give a .gguf, an .onnx, or a folder that fewbits wrote")
    judge = runtimes.needed(runtimes.for_file(path) if runtime == "auto" else runtimes.get(runtime))
    if not judge.takes(path):
        raise InputError(
            f"{judge.name} does not run files like `{path.name}`", f"leave `--runtime` out: {runtimes.for_file(path).name} does"
        )
    source = against if isinstance(against, models.Model) else models.open(against, offline)
    return _verify(path, source, preparation.held_out_windows(source, data, length, tokens), judge, thresholds, floor, progress)


def _verify(
    path: Path, source: Model, windows: list[texts.Window], judge: Runtime, thresholds: Thresholds, floor: bool, progress: Progress[Any]
) -> Verdict:
    from fewbits.runtimes import torch as torch_runtime

    length = max(map(len, windows))
    with tempfile.TemporaryDirectory(prefix="fewbits-") as scratch, ExitStack() as opened:
        sessions = {"file": opened.enter_context(closing(judge.open(path, length)))}
        if floor and (target := _target_of(judge)):
            file = float_file(source, target, Path(scratch), progress)
            sessions["floor"] = opened.enter_context(closing(judge.open(file, length)))
        measured = verification.measure(torch_runtime.of_module(source.module()), sessions, windows, progress)
    kl_floor = float(sum(measured["floor"].kl) / len(measured["floor"].kl)) if "floor" in measured else None
    return verification.judge(
        measured["file"],
        thresholds,
        nbytes=size_of(path),
        bits_per_weight=bits_per_weight(path, source),
        runtime=judge.name,
        runtime_version=judge.version(),
        kl_floor=kl_floor,
    )


def float_file(source: Model, target: Target, folder: Path, progress: Progress[Any]) -> Path:
    """The unquantized model in the same container: what the runtime itself adds to the error is measured on it."""
    floor = artifacts.quantize(source, planning.kept(source.weights, target), folder / "float", progress)
    return export(floor, folder / target.file_name, to=target.name, progress=progress)


def bits_per_weight(path: Path, source: Model) -> float:
    """Of the matrices, as a plan counts them: what lies beside them (norms, biases: float32 in every target) is left out."""
    elements = sum(rows * cols for rows, cols in (w.shape for w in source.weights))
    if (path / "genai_config.json").is_file():  # which has rotary tables beside them
        from fewbits.targets.onnx_genai import reading

        return 8 * reading.weight_bytes(path) / elements
    rest = sum((4 if path.is_file() else tensor.element_size()) * tensor.numel() for tensor in map(source.tensor, source.rest))
    return 8 * (tensor_bytes(path) - rest) / elements


def size_of(path: Path) -> int:
    return path.stat().st_size if path.is_file() else sum(p.stat().st_size for p in path.iterdir())


def target_for(out: Path, to: str | None, split: int | None = None) -> Target:
    """The one asked for, or the one whose files are called so; a name that contradicts the target is refused."""
    if split is not None:
        from fewbits.targets.gguf import Gguf

        if to not in (None, "gguf") or out.suffix:
            raise InputError("`--split-size` writes a folder of GGUF files", "give `-o` a folder's name and `--to gguf`, or leave it out")
        return Gguf(split)
    by_name = next((t for t in targets.all().values() if out.suffix.lower() == Path(t.file_name).suffix), None)
    target = targets.get(to) if to else by_name or targets.get("gguf")
    if by_name and by_name != target:
        raise InputError(f"`{out.name}` is named like a file of {by_name.name}, not of {target.name}", "choose another `-o` or `--to`")
    return target


def output_path(out: Path, target: Target) -> Path:
    """A file name is taken as it is; anything else is a folder that receives the target's usual file."""
    if not target.suffix:  # a folder of files that has the name given to it
        return out
    return out if out.suffix.lower() == Path(target.file_name).suffix else out / target.file_name


def _check_target(target: Target, path: Path, config: Any, tokenizer: Any) -> None:
    if why_not := target.supports(config, tokenizer):
        raise InputError(f"{target.name} cannot hold `{path.name}`: {why_not}", f"all targets: {', '.join(targets.all())}")


def _target_of(runtime: Runtime) -> Target | None:
    return next((target for target in targets.all().values() if target.runtime == runtime.name), None)
