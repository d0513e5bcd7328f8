"""A budget made into a file: measure, plan, quantize; for an accuracy in as many rounds as it takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from fewbits import formats, kv, planning, rounds, sensitivity
from fewbits.calibration.storing import Statistics
from fewbits.drafting import Draft
from fewbits.errors import InputError
from fewbits.files import Staged, remove
from fewbits.planning import deciding
from fewbits.planning.allocation import allocator
from fewbits.rounds import Round
from fewbits.sensitivity import Container, Sensitivity
from fewbits.sensitivity.table import Cell, Scores

if TYPE_CHECKING:
    from fewbits.formats import Format
    from fewbits.making import Made, Maker
    from fewbits.model import Model
    from fewbits.planning.deciding import Budget, Decision
    from fewbits.planning.wishes import Wishes
    from fewbits.targets import Target
    from fewbits.verification import Verdict

TABLE = "sensitivity.json"
_MARGIN = 4096  # bytes: what another plan's text may take beyond the one of the dry run
_TRIES = 8


@dataclass(frozen=True)
class Budgeted:
    made: Made
    verdict: Verdict | None
    decision: Decision
    rounds: tuple[Round, ...] = ()


def quantize(
    maker: Maker,
    path: Path,
    budget: Budget,
    wished: Wishes,
    judge: Callable[[Path], Verdict] | None,
    *,
    method: str = "auto",
    most_rounds: int = rounds.ROUNDS,
) -> Budgeted:
    table = measured(maker, wished, method, budget.counts_container)
    if not budget.by_accuracy:
        decision = within_file(table, maker.source, maker.target, budget, wished)
        made = maker.make(decision.plan, path)
        return Budgeted(made, judge(path) if judge else None, decision)
    assert judge is not None, "an accuracy is measured"
    return _until_accurate(maker, path, budget, wished, judge, table, most_rounds)


def measured(maker: Maker, wished: Wishes, method: str, container: bool) -> Sensitivity:
    """The table of this model and text, from the work folder if it is there."""
    wished.rules_for(maker.source.weights)  # what cannot be is refused before anything is calibrated
    candidates = candidates_for(maker.source, maker.target, wished.formats, wished.overrides)
    statistics = maker.statistics
    if not isinstance(statistics, Statistics):
        raise InputError("planning needs statistics with gradients", "give `--data`, or `--stats` with a folder of `fewbits calibrate`")
    table = sensitivity.measure(maker.source, statistics, candidates, method, kept=maker.kept, crew=maker.crew, progress=maker.progress)
    if container:  # a dry run takes seconds where a graph is traced
        table = with_container(table, maker.source, maker.target)
    table.save(maker.work / TABLE)
    return table


def check_reachable(source: Model, target: Target, budget: Budget, wished: Wishes) -> None:
    """Before hours of calibrating: shapes alone tell what the formats take at least."""
    if budget.by_accuracy:
        return
    nothing = Cell(0.0, 0.0, "rtn", Scores(0.0, 0.0, 0.0, 0.0))  # damage has no say in it
    candidates = candidates_for(source, target, wished.formats, wished.overrides)
    possible = {
        weight.name: [fmt for fmt in (*candidates, formats.get(weight.dtype)) if fmt.fits(weight.shape) is None]
        for weight in source.weights
    }
    rows = {name: {fmt.name: nothing for fmt in some} for name, some in possible.items()}
    table = Sensitivity(source.path.name, "", (), "rtn", source.weights, rows, source.config.to_dict())
    some = allocator(table, target, wished)
    limit = deciding.tensor_bytes(table, target, budget, some.elements, 0, kv.get(wished.kv).name if wished.kv else None)
    if some.least_bytes > limit:
        some.within_bytes(limit, str(budget))  # says so


def candidates_for(source: Model, target: Target, names: tuple[str, ...], overrides: tuple[str, ...] = ()) -> list[Format]:
    """What is worth measuring: the formats asked for, or the target's own; and whatever an override names."""
    from fewbits.planning import rules

    wanted = [formats.get(name) for name in names or target.candidates]
    wanted += [rule.format for rule in rules.parse_all(overrides, source.weights) if rule.format]
    usable = [fmt for fmt in dict.fromkeys(wanted) if any(planning.refuses(weight, target, fmt) is None for weight in source.weights)]
    if not usable:
        tried = ", ".join(fmt.name for fmt in wanted)
        raise InputError(f"none of {tried} fits a weight of this model in {target.name}", "`fewbits formats` lists what each holds")
    return usable


def with_container(table: Sensitivity, source: Model, target: Target) -> Sensitivity:
    """The table with what the target's file holds beside the weights, by a dry run of some plan."""
    some = allocator(table, target)
    plan = some.within_bytes(some.least_bytes + (some.least_bytes >> 2), "--fits 1000GB --context 1000000")
    overhead = target.overhead(Draft(source, plan)) + _MARGIN
    return replace(table, containers=table.containers | {target.name: Container(overhead)})


def within_file(table: Sensitivity, source: Model, target: Target, budget: Budget, wished: Wishes) -> Decision:
    """A plan whose file, by its own dry run, is within the budget to the byte."""
    overhead: int | None = None
    for _ in range(_TRIES):
        decision = deciding.decide(table, target, budget, wished, overhead=overhead)
        if not decision.whole_file:
            return decision
        known = table.containers[target.name].overhead if overhead is None else overhead
        needed = target.overhead(Draft(source, decision.plan))
        if needed <= known:
            return decision
        overhead = needed + _MARGIN
    raise InputError(f"no plan of this size was found for {target.name}", "raise the size a little")


def _until_accurate(
    maker: Maker, path: Path, budget: Budget, wished: Wishes, judge: Callable[[Path], Verdict], table: Sensitivity, most_rounds: int
) -> Budgeted:
    """Rounds are not kept themselves. A run that goes on takes the same plans, whose weights and verdicts are there: each round then
    costs the writing of its file."""
    tried: list[tuple[Made, Decision]] = []
    _remove_rounds(maker.work)  # of a run that was killed

    def attempt(kl: float) -> Round | None:
        try:
            decision = deciding.decide(table, maker.target, budget, wished, kl=kl)
        except InputError:
            if not tried:
                raise
            return None  # nothing is left to try; what was found counts
        chosen = [entry.format for entry in decision.plan.entries]
        if any(chosen == [entry.format for entry in each.ready.plan.entries] for each, _ in tried):
            return None
        number = len(tried) + 1
        file = maker.work / f"round-{number}{maker.target.suffix}"
        made = maker.make(decision.plan, file, f"artifact-{number}")
        tried.append((made, decision))
        return Round(decision.plan.kl or 0.0, decision.plan.nbytes, judge(file))

    best_possible = allocator(table, maker.target, wished).least_kl
    found = rounds.search(deciding.predicted_kl(budget.limits), budget.limits, attempt, best_possible * 1.0001, most_rounds)
    best = found.best
    if best is None:  # honest about it: the nearest that was found, which fails
        best = min(range(len(found.rounds)), key=lambda i: found.rounds[i].verdict.kl_mean)
    made, decision = _kept(maker, path, tried, best)
    return Budgeted(made, found.rounds[best].verdict, decision, found.rounds)


def _kept(maker: Maker, path: Path, tried: list[tuple[Made, Decision]], best: int) -> tuple[Made, Decision]:
    """The best one where the user wants it; the others are removed."""
    from fewbits.artifact import Artifact

    made, decision = tried[best]
    with Staged(path, maker.target.marker) as staged:
        if made.path.with_name(f"{made.path.name}.data").exists():  # a graph that names the file beside it: written anew
            maker.target.write(made.artifact, staged, maker.progress)
        else:
            made.path.rename(staged)
    with Staged(maker.work / "artifact", "fewbits.json") as staged:
        made.artifact.path.rename(staged)
    _remove_rounds(maker.work)
    return replace(made, path=path, artifact=Artifact(maker.work / "artifact")), decision


def _remove_rounds(work: Path) -> None:
    for path in [*work.glob("round-*"), *work.glob("artifact-*")]:
        remove(path)
