"""open -> calibrate -> measure -> plan -> quantize -> export -> verify -> report. Each step hands one plain value to the next."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits import artifact as artifacts
from fewbits import model as models
from fewbits import sensitivity
from fewbits.artifact import manifest, written
from fewbits.artifact.accuracy_loop import until_accurate
from fewbits.artifact.maker import Maker, OutputFile
from fewbits.calibration import reuse, split
from fewbits.calibration.folder import Statistics
from fewbits.calibration.shards import check_shards
from fewbits.calibration.text import windows
from fewbits.errors import InputError
from fewbits.preflight import Work, preflight
from fewbits.progress import say, silent
from fewbits.reporting import results
from fewbits.reporting.results.quantized import Quantized
from fewbits.request import Request
from fewbits.store import executors
from fewbits.store.cache import open_cache
from fewbits.targets import pricing
from fewbits.verification import embeddings, runtimes
from fewbits.verification.files import Trial, verdict_on
from fewbits.verification.streamed import REFERENCE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fewbits.calibration.importance_matrix import ImportanceMatrix
    from fewbits.calibration.split import Text
    from fewbits.model import Model
    from fewbits.planning import Plan
    from fewbits.planning.decision import Decision
    from fewbits.planning.rounds import Round
    from fewbits.progress import Progress
    from fewbits.sensitivity.table import Sensitivity
    from fewbits.store.cache import Cache
    from fewbits.store.executors.crew import Crew
    from fewbits.verification.metrics import Verdict

TABLE = "sensitivity.json"


def quantize(model: str | Path, out: str | Path, *, progress: Progress[Any] = silent, **options: Any) -> Quantized:
    """A checkpoint to a file, verified in its runtime. `options` are the fields of `fewbits.request.Request`.

    The budget is a size, a device, an accuracy, one format for all, or a plan.json. What can be refused is refused before any work. What
    is finished is cached beside `out`: after a run that was killed the same call resumes from there, unless it is to be `fresh`.
    """
    request = Request(model=model, out=out, **options)
    with _opened(request, progress) as run:
        statistics = run.calibrate()
        maker = run.maker(statistics)
        if run.plan is not None:
            made = maker.make(run.plan, request.path)
            return run.report(made, run.verify(made.path))
        made, verdict, decision, rounds = run.spend(maker, run.measure(statistics))
        return run.report(made, verdict, decision, rounds)


@contextmanager
def _opened(request: Request, progress: Progress[Any]) -> Iterator[Run]:
    """The model, the text and the work folder, after everything that can be refused was."""
    source = models.open(request.model, request.offline)
    request.check(source)
    plan = request.fixed_plan(source)
    text = _text(request, source, plan)
    if not request.no_verify:
        runtimes.needed(runtimes.get(request.target.runtime))
    ahead = preflight(source, request.target, request.path, _work(request, source, text, plan), plan)
    ahead.check()
    say(progress, ahead.line())
    with (
        open_cache(request.work, request.fresh, progress) as cache,
        executors.open_crew(request.workers, source, request.model, request.offline) as crew,
    ):
        yield Run(request, source, plan, text, cache, crew, progress)


@dataclass(frozen=True)
class Run:
    """A request on its way through the pipeline: a method for each step."""

    request: Request
    source: Model
    plan: Plan | None  # None: there is a budget to spend
    text: Text
    cache: Cache
    crew: Crew | None
    progress: Progress[Any]

    def calibrate(self) -> Statistics | ImportanceMatrix | None:
        asked = self.request
        if asked.stats is not None:
            return reuse.given(asked.stats, self.source)
        if self.text.samples is None:
            return None
        return reuse.collected(
            self.source, self.text.samples, asked.work / "statistics", self.cache,
            memory=asked.memory, shards=asked.shards, crew=self.crew, progress=self.progress,
        )  # fmt: skip

    def measure(self, statistics: Statistics | ImportanceMatrix | None) -> Sensitivity:
        """The table of this model and text, from the work folder if it is there."""
        asked = self.request
        candidates = pricing.candidates_for(self.source, asked.target, asked.constraints.formats, asked.constraints.overrides)
        if not isinstance(statistics, Statistics):
            raise InputError("planning needs statistics with gradients", "give `--data`, or `--stats` with a folder of `fewbits calibrate`")
        table = sensitivity.measure(
            self.source, statistics, candidates, asked.method, cache=self.cache, crew=self.crew, progress=self.progress
        )
        if asked.budget.counts_container:  # a dry run takes seconds where a graph is traced
            table = pricing.with_container(table, self.source, asked.target)
        table.save(asked.work / TABLE)
        return table

    def maker(self, statistics: Statistics | ImportanceMatrix | None) -> Maker:
        asked = self.request
        return Maker(
            source=self.source, text=self.text, statistics=statistics, work=asked.work, cache=self.cache, progress=self.progress,
            rewrite=asked.rewrite, memory=asked.memory, target=asked.target, sequential=asked.sequential, tune=asked.tune, crew=self.crew,
        )  # fmt: skip

    def spend(self, maker: Maker, table: Sensitivity) -> tuple[OutputFile, Verdict | None, Decision, Sequence[Round]]:
        """The budget: planned, quantized, exported and verified; for an accuracy in as many rounds as it takes."""
        asked = self.request
        if asked.budget.by_accuracy:
            return until_accurate(maker, asked.path, table, asked.budget, asked.constraints, asked.rounds, self.verify)
        decision = pricing.within_file(table, self.source, asked.target, asked.budget, asked.constraints)
        made = maker.make(decision.plan, asked.path)
        return made, self.verify(made.path), decision, ()

    def verify(self, file: Path) -> Any:
        """A verdict; None: nobody asked for one."""
        asked = self.request
        if asked.no_verify:
            return None
        trial = Trial(runtimes.get(asked.target.runtime), asked.limits)
        return verdict_on(file, self.source, self.text.windows, trial, self.progress, self.cache, asked.memory)

    def report(self, made: OutputFile, verdict: Any, decision: Decision | None = None, rounds: Sequence[Round] = ()) -> Quantized:
        """results.json and the page made of it, in the work folder."""
        asked = self.request
        if verdict:
            for folder in {made.artifact.path, made.path} if asked.target.marker == manifest.NAME else {made.artifact.path}:
                artifacts.add_verdict(folder, verdict.to_dict())
        gathered = results.gather(
            results.Subject(made.prepared.model, made.artifact, made.path), decision=decision, statistics=made.prepared.statistics,
            windows=() if asked.no_verify or embeddings.given_by(self.source.config) else self.text.windows,
            commands=results.commands(asked), memory=asked.memory, progress=self.progress,
        )  # fmt: skip
        plan, coverage, rewrites = made.prepared.plan, made.prepared.coverage, made.prepared.rewrites
        about = coverage, made.artifact.outcomes, rewrites, decision, rounds, gathered
        result = Quantized(made.path, made.artifact.path, plan, verdict, *about)
        written.record(made.path)
        results.write(asked.work, result.to_dict())
        self.cache.drop_step(REFERENCE)  # large, and soon made again
        self.cache.forget_unused()
        return result


def _text(request: Request, source: Model, plan: Plan | None) -> Text:
    """Samples where something is calibrated, and windows to judge on."""
    collects = request.stats is None and request.calibrates(plan)
    samples = request.samples if collects or request.sequential or request.tune else 0
    text = split.split(source, request.data, request.held_out, samples, request.length, request.seed, request.tokens)
    check_shards(text.samples if collects else None, request.shards)
    return text


def _work(request: Request, source: Model, text: Text, plan: Plan | None) -> Work:
    constraints = request.constraints
    return Work(
        samples=len(text.samples.ids) if text.samples and request.stats is None else 0,
        length=max(map(len, text.samples.ids)) if text.samples else windows.window_length(source.config, request.length),
        buffer=request.memory,
        formats=0 if plan else len(pricing.candidates_for(source, request.target, constraints.formats, constraints.overrides)),
        feedback=request.method != "rtn",
        makes=request.rounds if plan is None and request.budget.by_accuracy else 1,
        verified=0 if request.no_verify else request.tokens,
        size=request.size,
    )
