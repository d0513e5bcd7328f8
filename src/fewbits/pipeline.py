"""The whole way: open -> plan -> quantize -> export -> verify. Each step hands one plain value to the next."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from fewbits import activations as activation_rules
from fewbits import artifact as artifacts
from fewbits import (
    budgeted,
    calibration,
    embeddings,
    executors,
    formats,
    manifest,
    methods,
    planning,
    preparation,
    provenance,
    results,
    runtimes,
    texts,
)
from fewbits import model as models
from fewbits import rounds as loop
from fewbits.calibration import Paths, sharding
from fewbits.calibration.coverage import Coverage
from fewbits.checkpoints.folder import read_text
from fewbits.embeddings import EmbeddingVerdict
from fewbits.errors import InputError
from fewbits.exporting import check_target, export, output_path, target_for
from fewbits.kept import opened
from fewbits.making import Maker
from fewbits.planning import deciding, speeds
from fewbits.planning.deciding import Budget
from fewbits.planning.wishes import Wishes, listed
from fewbits.preflight import Work, preflight
from fewbits.progress import say, silent
from fewbits.verification import Thresholds, Verdict
from fewbits.verifying import REFERENCE, TOKENS, bits_per_weight, float_file, size_of, verified, verify

if TYPE_CHECKING:
    from fewbits.making import Made
    from fewbits.model import Model
    from fewbits.planning import Plan
    from fewbits.planning.deciding import Decision
    from fewbits.progress import Progress
    from fewbits.results import Gathered
    from fewbits.rounds import Round
    from fewbits.targets import Target

__all__ = [
    "TOKENS", "Quantized", "bits_per_weight", "export", "float_file", "make_plan", "output_path", "quantize", "size_of", "target_for",
    "verify",
]  # fmt: skip


@dataclass(frozen=True)
class Quantized:
    """What `quantize` made, and all that is known of it."""

    path: Path
    artifact: Path
    plan: Plan
    verdict: Verdict | EmbeddingVerdict | None
    coverage: Coverage | None = None  # how well the calibration text represents use; None: nothing was calibrated
    outcomes: Mapping[str, Any] = field(default_factory=dict)  # by weight: the method used, and the damage on held-out samples
    rewrites: Sequence[Mapping[str, Any]] = ()  # by place: how channels were rescaled, and what it did on held-out samples
    decision: Decision | None = None  # how the plan came about, where a budget was given
    rounds: Sequence[Round] = ()  # every plan that was made and measured on the way to an accuracy
    gathered: Gathered | None = None  # what only a reader of the result asks for

    @classmethod
    def of(
        cls, made: Made, verdict: Verdict | EmbeddingVerdict | None, decision: Decision | None = None, rounds: Sequence[Round] = ()
    ) -> Quantized:
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
        } | (self.gathered.to_dict() if self.gathered else {})


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
    min_cosine: float | None = None,
    length: int | None = None,
    tokens: int = TOKENS,
    no_verify: bool = False,
    shards: int = 1,
    executor: str = executors.LOCAL,
    store: str | None = None,
    fresh: bool = False,
    offline: bool = False,
    progress: Progress[Any] = silent,
) -> Quantized:
    """A checkpoint to a file, verified in its runtime. The budget is a size, a device, an accuracy, one format for all, or a plan.json.

    What can be refused is refused before any work. `to` follows from the name of `out` where it is not given. `data` is text to
    calibrate with; what is judged on is `held_out`, or a part of `data` that calibration does not see, or the embedded text.
    What is finished is kept beside `out`: a run that was killed is gone on with by the same call, unless it is to be `fresh`.
    `executor`: who measures and quantizes the weights, with the same bytes; `shards`: parts of the text that its workers calibrate.
    """
    asked = dict(locals())  # for the command line that says the same
    workers = executors.parse(executor, store, {"--sequential": sequential, "--tune": tune})
    target, limits = target_for(Path(out), to, split), Thresholds(max_kl, min_agreement, max_ppl_ratio, min_cosine)
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
    embeddings.check_thresholds(limits, source.config)
    if path.exists() and path.samefile(source.path):
        raise InputError(f"`{path}` is the model itself", "choose another `-o`")
    made = None if planned else make_plan(source, target, format, plan, wished.overrides, method, activations, kv)
    if made is None:
        _check_plannable(source, target, rewrite, activations, method, no_verify and budget.by_accuracy)
        if kv == "auto":
            raise InputError("`--kv auto` needs measured caches", "use `fewbits measure --kv int8,int4`, then `fewbits plan --kv auto`")
        deciding.says_cache(target, budget, kv)
        budgeted.check_reachable(source, target, budget, wished)
        if budget.by_accuracy:
            deciding.predicted_kl(limits)
    needs = made is None or preparation.needs_calibration(made, rewrite)
    text = preparation.split(
        source, data, held_out, samples if sequential or tune > 0 or (stats is None and needs) else 0, length, seed, tokens
    )
    sharding.check(text.samples if stats is None and needs else None, shards)
    if not no_verify:
        runtimes.needed(runtimes.get(target.runtime))
    ahead = preflight(
        source,
        target,
        path,
        Work(
            samples=len(text.samples.ids) if text.samples and stats is None else 0,
            length=max(map(len, text.samples.ids)) if text.samples else texts.window_length(source.config, length),
            buffer=memory,
            formats=0 if made else len(budgeted.candidates_for(source, target, wished.formats, wished.overrides)),
            feedback=method != "rtn",
            makes=rounds if made is None and budget.by_accuracy else 1,
            verified=0 if no_verify else tokens,
            size=size,
        ),
        made,
    )
    ahead.check()
    say(progress, ahead.line())
    work = path.with_name(f"{path.name}.work")
    with opened(work, fresh, progress) as kept, executors.opened(workers, source, model, offline) as crew:
        maker = Maker(source, target, text, work, kept, progress, stats, rewrite, sequential, tune, memory, crew, shards)

        def judged(file: Path) -> Verdict | EmbeddingVerdict:
            return verified(file, source, text.windows, runtimes.get(target.runtime), limits, True, progress, kept, memory)

        if made is not None:
            done = maker.make(made, path)
            result = Quantized.of(done, None if no_verify else judged(path))
        else:
            by_logits = cast("Callable[[Path], Verdict]", judged)  # an encoder has no budget: see _check_plannable
            found = budgeted.quantize(maker, path, budget, wished, None if no_verify else by_logits, method=method, most_rounds=rounds)
            done, result = found.made, Quantized.of(found.made, found.verdict, found.decision, found.rounds)
        if result.verdict:
            for folder in {result.artifact, result.path} if target.marker == manifest.NAME else {result.artifact}:
                artifacts.add_verdict(folder, result.verdict.to_dict())
        gathered = results.gather(
            done.ready.model, done.artifact, path, decision=result.decision, statistics=done.ready.statistics,
            windows=() if no_verify or embeddings.given_by(source.config) else text.windows,
            commands=results.commands(quantize, asked), memory=memory, progress=progress,
        )  # fmt: skip
        result = replace(result, gathered=gathered)
        provenance.record(path)
        results.write(work, result.to_dict())
        kept.drop_step(REFERENCE)  # large, and soon made again
        kept.forget_unused()
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
    check_target(target, source.path, source.config, source.tokenizer)
    methods.get(method)
    if rewrite != "none":
        raise InputError("`--rewrite` goes with `--format`", "a budget chooses formats for the weights as they are")
    if activations != "none":
        raise InputError("`--activations` goes with `--format`", "or make a plan first and edit it")
    if embeddings.given_by(source.config):
        raise InputError("a budget is spent by what weights do to logits, and an encoder gives none", "use `--format` or `--plan`")
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
    check_target(target, source.path, source.config, source.tokenizer)
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
