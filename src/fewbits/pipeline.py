"""open -> calibrate -> measure -> plan -> quantize -> export -> verify -> report. Each step hands one plain value to the next."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits import artifact as artifacts
from fewbits import formats, sensitivity
from fewbits.artifact import manifest, written
from fewbits.artifact.accuracy_loop import until_accurate
from fewbits.artifact.maker import Maker, OutputFile
from fewbits.calibration import by_domain, listed, reuse, split
from fewbits.calibration.folder import Statistics
from fewbits.calibration.importance_matrix import ImportanceMatrix
from fewbits.calibration.shards import check_shards
from fewbits.calibration.split import Text
from fewbits.calibration.text import windows
from fewbits.errors import FewbitsError, InputError
from fewbits.model import placement
from fewbits.model.checkpoints import cards
from fewbits.model.gguf.model import GgufModel
from fewbits.model.weights import TOWER
from fewbits.planning import uninformed
from fewbits.planning.allocation import allocator
from fewbits.planning.decision import predicted_kl
from fewbits.preflight import Work, preflight, probe, processes, within
from fewbits.preflight.schedule import Schedule
from fewbits.preflight.sizes import Sizes
from fewbits.preflight.steps import rate_of
from fewbits.preflight.within import Deadline, Settings
from fewbits.preflight.work import USUAL
from fewbits.progress import doing, expect, say, silent
from fewbits.reporting import results
from fewbits.reporting.meanwhile.steps import done_before, parts_of
from fewbits.reporting.meanwhile.whole import duration
from fewbits.reporting.results.quantized import Quantized
from fewbits.request import Request
from fewbits.sensitivity.errors import measure_errors
from fewbits.store import executors
from fewbits.store.cache import open_cache
from fewbits.targets import card, pricing
from fewbits.targets.gguf.source import open_source
from fewbits.verification import embeddings, runtimes, sandbox
from fewbits.verification.answers import answers
from fewbits.verification.files import Trial, compared_with, verdict_on
from fewbits.verification.floor import check_floor
from fewbits.verification.forecast.correction import Correction, tokens_run
from fewbits.verification.runtimes import llamacpp
from fewbits.verification.streamed import REFERENCE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fewbits.formats import Format
    from fewbits.model import Model
    from fewbits.planning import Plan
    from fewbits.planning.decision import Decision
    from fewbits.planning.rounds import Round
    from fewbits.progress import Progress
    from fewbits.reporting.schema import Gathered
    from fewbits.sensitivity.table import Sensitivity
    from fewbits.store.cache import Cache
    from fewbits.store.executors.crew import Crew
    from fewbits.verification.metrics import Verdict

TABLE = "sensitivity.json"
_MADE = ("calibrating", "measuring", "forecasting", "quantizing", "tuning")  # steps that are over when there is a file


def quantize(model: str | Path, out: str | Path, *, progress: Progress[Any] = silent, **options: Any) -> Quantized:
    """A checkpoint to a file, verified in its runtime. `options` are the fields of `fewbits.request.Request`.

    The budget is a size, a device, an accuracy, one format for all, or a plan.json. What can be refused is refused before any work. What
    is finished is cached beside `out`: after a run that was killed the same call resumes from there, unless it is to be `fresh`.
    """
    request = Request(model=model, out=out, **options)
    with _opened(request, progress) as run:
        statistics = run.calibrate()
        run = run.on_time("calibrating")
        if run.plan is not None:
            made = run.maker(statistics).make(run.plan, request.path)
            return run.report(made, run.on_time(*_MADE).verify(made.path))
        table = run.measure(statistics)
        run = run.on_time("calibrating", "measuring")
        made, verdict, decision, rounds = run.spend(run.maker(statistics), table)
        return run.report(made, verdict, decision, rounds)


@contextmanager
def _opened(request: Request, progress: Progress[Any]) -> Iterator[Run]:
    """The model, the text and the work folder, after everything that can be refused was."""
    request = replace(request, began=time.monotonic() if request.began is None else request.began)
    placement.find(request.passes_on)
    with doing(progress, f"opening {request.model}"):
        source = open_source(request.model, request.offline)
        request.check(source)
    if not request.no_verify:
        runtimes.needed(runtimes.get(request.target.runtime))
    subject = request.laid_out(source, progress)
    if isinstance(source, GgufModel):
        request = _without_checkpoint(request, source)
    plan = request.fixed_plan(subject)
    request = request.with_tuning(subject, plan)
    text = _text(request, source, plan)
    remarks = _remarks(request, source, subject, text)
    for remark in remarks:
        say(progress, remark)
    rate = rate_of(subject.weights, time.perf_counter)
    work = _work(request, subject, text, plan)
    work = replace(work, processes=_processes(request, source, subject, work, plan, rate))
    schedule = None
    if request.within is not None:
        schedule = _scheduled(request, source, subject, text, plan, work, rate, progress)
        request = request.spending(schedule.chosen)
        text = _text(request, source, plan)
        work = replace(_work(request, subject, text, plan), processes=work.processes)
    ahead = preflight(subject, request.target, request.path, work, plan, schedule.pace if schedule else USUAL, rate=rate)
    ahead.check()
    with (
        open_cache(request.work, request.fresh, progress) as cache,
        executors.open_crew(request.workers.hiring(work.processes), source, request.model, request.offline) as crew,
    ):
        say(progress, ahead.line(done_before(cache.results(), len(subject.weights), ahead.blocks)))
        expect(progress, ahead.parts)
        try:
            yield Run(request, source, subject, plan, text, remarks, cache, crew, progress, schedule, ahead.blocks)
        finally:
            expect(progress, ())


def _processes(request: Request, source: Model, subject: Model, work: Work, plan: Plan | None, rate: float) -> int:
    """That measure and quantize, where `--executor` leaves it open. Layouts are not sent to workers."""
    possible = request.workers.by_itself and subject is source and not request.sequential and request.imatrix is None
    return processes.wanted(Sizes(subject, request.target, work, plan), work, rate) if possible and request.calibrates(plan) else 1


def _scheduled(
    request: Request, source: Model, subject: Model, text: Text, plan: Plan | None, work: Work, rate: float, progress: Progress[Any]
) -> Schedule:
    """What there is time for, by the clock of one block of this model; or what an earlier run found, which this one goes on from."""
    assert request.within is not None and request.began is not None
    deadline = Deadline(float(request.within), request.began)
    ids = text.samples.ids if text.samples and request.statistics is None else ()
    candidates = () if plan else tuple(pricing.worth_measuring(subject, request.target, request.budget, request.constraints))
    full = Settings(len(ids), candidates, request.tune or 0, 0 if request.no_verify else request.tokens)
    schedule = Schedule(deadline, full, full, subject, request.target, plan, work, rate, USUAL)
    if not request.fresh and (kept := schedule.kept(request.work)):
        say(progress, "resuming: with the settings that an earlier run found time for")
        return kept
    if ids:
        sizes, some = Sizes(subject, request.target, work, plan), candidates or _formats_of(plan)
        with doing(progress, "timing one block of the model"), placement.passes_on(request.passes_on):
            schedule = replace(schedule, pace=probe.pace(source, ids, some, request.method.lower(), sizes, rate, deadline.seconds))
    schedule = replace(schedule.settled(), began=deadline.seconds - deadline.left)
    if less := within.left_out(full, schedule.chosen):
        say(progress, f"in {duration(deadline.seconds)} there is time for: {', '.join(less)}")
    return schedule


def _formats_of(plan: Plan | None) -> list[Format]:
    return [] if plan is None else [formats.get(name) for name in dict.fromkeys(entry.format for entry in plan.entries)]


def _without_checkpoint(request: Request, source: GgufModel) -> Request:
    """What a GGUF of an unknown architecture leaves possible."""
    request = request.without_importance(source)
    if not request.no_verify:
        sandbox.check(runtimes.get(request.target.runtime), source.path)
        request = replace(request, no_verify=llamacpp.is_unknown(source.path))
    return request


def _remarks(request: Request, source: Model, subject: Model, text: Text) -> tuple[str, ...]:
    """What a reader of the result should know; the float file of a layout is run for it, and refused if it computes something else."""
    said = _not_judged(request, text)
    if source.lossy:
        said.append(compared_with(source))
    elif quantized := getattr(source.checkpoint, "source_quantization", None):
        said.append(f"The source was itself quantized ({quantized}): the file is compared with what it decodes to")
    if isinstance(subject, GgufModel) and subject.origin is None:
        said.append(f"`{subject.config.model_type}` is not in fewbits' table: its matrices were quantized as the file lays them out")
        if request.imatrix is None:
            said.append("Without its checkpoint or an importance matrix (`--imatrix`) all columns of a weight count alike")
        if request.no_verify:
            said.append("The file was not run: this llama.cpp knows no such architecture, or `--no-verify` was given")
    elif isinstance(subject, GgufModel):
        said += [subject.remark] if subject.remark else []
        if any(weight.kind == TOWER for weight in source.weights):
            said.append(
                "The file holds the language model alone: llama.cpp's converter makes one of the vision or audio tower (`--mmproj`)"
            )
        if not request.no_verify:
            said.append(check_floor(subject, text.windows, request.max_floor))
    return tuple(said)


def _not_judged(request: Request, text: Text) -> list[str]:
    """Kinds of text that there was too little of to set some aside."""
    if request.no_verify or request.held_out or not text.samples:
        return []
    missing = [name for name in dict.fromkeys(text.samples.domains) if text.domains and name not in text.domains]
    return [f"No text of `{name}` was set aside to judge on: name some with `--held-out {name}=FILE`" for name in missing]


@dataclass(frozen=True)
class Run:
    """A request on its way through the pipeline: a method for each step."""

    request: Request
    source: Model
    subject: Model  # what is planned and written: the source, or the source as llama.cpp lays it out
    plan: Plan | None  # None: there is a budget to spend
    text: Text
    remarks: tuple[str, ...]  # what a reader of the result should know of the source
    cache: Cache
    crew: Crew | None
    progress: Progress[Any]
    schedule: Schedule | None = None  # with `--within`
    blocks: int = 0  # of the model

    def on_time(self, *done: str) -> Run:
        """The same run with what there is time for, now that these steps are over."""
        if self.schedule is None:
            return self
        before, schedule = self.schedule.chosen, self.schedule.settled(done).keep(self.request.work)
        if changed := within.left_out(before, schedule.chosen):
            say(self.progress, f"less time is left than was forecast: {', '.join(changed)}")
        elif gained := within.gained(before, schedule.chosen):
            say(self.progress, f"more time is left than was forecast: {', '.join(gained)} after all")
        steps = [(step.name, step.seconds) for step in schedule.steps(schedule.chosen) if step.name not in done]
        makes = self.request.rounds if self.plan is None and self.request.budget.by_accuracy else 1
        expect(self.progress, parts_of(steps, len(list(self.subject.weights)), self.blocks, makes))
        text = self.text.fewer(schedule.chosen.tokens / max(1, before.tokens))
        return replace(self, request=self.request.spending(schedule.chosen), text=text, schedule=schedule)

    def calibrate(self) -> Statistics | ImportanceMatrix | None:
        asked = self.request
        if asked.statistics is not None:
            known = reuse.given(asked.statistics, self.source, self.subject)
            if isinstance(known, ImportanceMatrix):
                say(self.progress, str(known))
                if self.plan is not None:
                    uninformed.check_unseen(self.plan, known.unseen())
            return known
        if self.text.samples is None:
            return None
        assert not isinstance(self.source, GgufModel), "no text was drawn for it"
        with placement.passes_on(asked.passes_on, self.progress):
            statistics = reuse.collected(
                self.source, self.text.samples, asked.work / "statistics", self.cache.of(**placement.part_of_key()),
                memory=asked.memory, shards=asked.shards, crew=None if asked.workers.by_itself else self.crew, progress=self.progress,
            )  # fmt: skip
        return reuse.matched(statistics, self.subject)

    def measure(self, statistics: Statistics | ImportanceMatrix | None) -> Sensitivity:
        """The table of this model and text, from the work folder if it is there."""
        asked = self.request
        candidates = pricing.worth_measuring(self.subject, asked.target, asked.budget, asked.constraints)
        if isinstance(statistics, Statistics):
            table = sensitivity.measure(
                self.subject, statistics, candidates, asked.method, cache=self.cache, crew=self.crew, progress=self.progress
            )
        elif asked.budget.by_accuracy:
            raise InputError("an accuracy needs gradients", "give `--data`, or `--stats` with a folder of `fewbits calibrate`")
        else:
            say(
                self.progress,
                "there are no gradients: bits go where weighted errors are largest, a weaker forecast than one of KL",
            )
            table = measure_errors(self.subject, statistics, candidates, self.progress)
        if asked.budget.counts_container:  # a dry run takes seconds where a graph is traced
            table = pricing.with_container(table, self.subject, asked.target)
        table.save(asked.work / TABLE)
        return table

    def maker(self, statistics: Statistics | ImportanceMatrix | None) -> Maker:
        asked = self.request
        return Maker(
            source=self.subject, text=self.text, statistics=statistics, work=asked.work, cache=self.cache, progress=self.progress,
            rewrite=asked.rewrite, activations_kl=asked.activations_limit, memory=asked.memory, target=asked.target,
            sequential=asked.sequential, tune=asked.tune or 0, crew=self.crew,
        )  # fmt: skip

    def spend(self, maker: Maker, table: Sensitivity) -> tuple[OutputFile, Verdict | None, Decision, Sequence[Round]]:
        """The budget: planned, quantized, exported and verified; for an accuracy in as many rounds as it takes."""
        asked, table = self.request, self.corrected(maker, table)
        if asked.budget.by_accuracy:
            return until_accurate(maker, asked.path, table, asked.budget, asked.constraints, asked.rounds, self.verify)
        decision = pricing.within_file(table, self.subject, asked.target, asked.budget, asked.constraints)
        made = maker.make(decision.plan, asked.path)
        return made, self.on_time(*_MADE).verify(made.path), decision, ()

    def corrected(self, maker: Maker, table: Sensitivity) -> Sensitivity:
        """The table with what a damaged copy of this model says of it, for plans of this budget and the text that they are judged on."""
        asked = self.request
        if not isinstance(maker.statistics, Statistics) or self.subject is not self.source or embeddings.given_by(self.source.config):
            return table
        if asked.budget.by_accuracy:
            some = allocator(table, asked.target, asked.constraints)
            plan = some.within_kl(max(predicted_kl(asked.budget.limits), some.least_kl * 1.0001), "")
        else:
            plan = pricing.within_file(table, self.subject, asked.target, asked.budget, asked.constraints).plan
        with placement.passes_on(asked.passes_on):
            corrected = Correction(
                source=self.source, statistics=maker.statistics, text=self.text, calibrated=asked.statistics is None,
                held_out=bool(asked.held_out), shards=asked.shards, tuned=bool(asked.tune), memory=asked.memory,
                cache=self.cache.of(**placement.part_of_key()), progress=self.progress,
            ).of(table, plan)  # fmt: skip
        if corrected is not table:
            corrected.save(asked.work / TABLE)
        return corrected

    def verify(self, file: Path) -> Any:
        """A verdict; None: nobody asked for one."""
        asked = self.request
        if asked.no_verify:
            return None
        trial = Trial(runtimes.get(asked.target.runtime), asked.limits, domains=self.text.domains)
        with placement.passes_on(asked.passes_on):
            cache = self.cache.of(**placement.part_of_key())
            return verdict_on(file, self.subject, self.text.windows, trial, self.progress, cache, asked.memory)

    def report(self, made: OutputFile, verdict: Any, decision: Decision | None = None, rounds: Sequence[Round] = ()) -> Quantized:
        """results.json and the page made of it, in the work folder."""
        asked, late = self.request, self.schedule is not None and self.schedule.is_late
        if verdict:
            for folder in {made.artifact.path, made.path} if asked.target.marker == manifest.NAME else {made.artifact.path}:
                artifacts.add_verdict(folder, verdict.to_dict())
        gathered = results.gather(
            results.Subject(made.prepared.model, made.artifact, made.path), decision=decision, statistics=made.prepared.statistics,
            windows=() if asked.no_verify or self.subject.layout or embeddings.given_by(self.source.config) or late else self.text.windows,
            commands=results.commands(asked), memory=asked.memory, remarks=(*self.remarks, *made.prepared.remarks), progress=self.progress,
        )  # fmt: skip
        gathered = self.with_answers(made, None if late else verdict, replace(gathered, for_size=results.for_size(asked)))
        plan, coverage, rewrites = made.prepared.plan, made.prepared.coverage, made.prepared.rewrites
        about = coverage, made.artifact.outcomes, rewrites, decision, rounds, gathered
        result = Quantized(made.path, made.artifact.path, plan, verdict, *about)
        origin, command = cards.origin_of(self.source.path), results.commands(asked)[0]
        card.write_all(made.artifact, made.path, asked.target, command, origin, verdict.to_dict() if verdict else None)
        written.record(made.path)
        results.write(asked.work, result.to_dict())
        self.cache.drop_step(REFERENCE)  # large, and soon made again
        self.cache.forget_unused()
        return result

    def with_answers(self, made: OutputFile, verdict: Any, gathered: Gathered) -> Gathered:
        """A few answers of both models, for a person to read; what stands in the way is said in their place."""
        asked = self.request
        if not (verdict and asked.answers) or embeddings.given_by(self.source.config):
            return gathered
        try:
            runtime = runtimes.get(asked.target.runtime)
            return replace(gathered, answers=answers(made.path, self.subject, self.text.windows, runtime, asked.answers, self.progress))
        except FewbitsError as failure:
            return replace(gathered, left_out={**gathered.left_out, "answers": failure.args[0]})


def _text(request: Request, source: Model, plan: Plan | None) -> Text:
    """Samples where something is calibrated, and windows to judge on."""
    if isinstance(source, GgufModel):
        if request.no_verify:
            return Text(None, [])
        llamacpp.lend_tokenizer(source)
        request.mix.check(by_domain.names_of(listed(request.held_out)))
        return split.held_out_text(source, request.held_out, request.usual_length, request.tokens, request.mix)
    collects = request.statistics is None and request.calibrates(plan)
    samples = request.samples if collects or request.sequential or request.tune else 0
    text = split.split(source, request.data, request.held_out, samples, request.usual_length, request.seed, request.tokens, request.mix)
    check_shards(text.samples if collects else None, request.shards)
    return text


def _work(request: Request, source: Model, text: Text, plan: Plan | None) -> Work:
    measured = () if plan else pricing.worth_measuring(source, request.target, request.budget, request.constraints)
    return Work(
        samples=len(text.samples.ids) if text.samples and request.statistics is None else 0,
        length=max(map(len, text.samples.ids)) if text.samples else windows.window_length(source.config, request.usual_length),
        buffer=request.memory,
        formats=len(measured),
        divisors=tuple(fmt.block or 1 for fmt in measured),
        feedback=request.method != "rtn",
        tune=request.tune or 0,
        makes=request.rounds if plan is None and request.budget.by_accuracy else 1,
        verified=0 if request.no_verify else request.tokens,
        forecast=tokens_run(text, bool(request.held_out), request.shards) if plan is None and request.statistics is None else 0,
        size=request.size,
        text=text.samples.tokens if text.samples and request.statistics is None else None,
    )
