"""An accuracy in, the smallest file that meets it out: plan, quantize and verify, in as many rounds as it takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fewbits.artifact import Artifact
from fewbits.errors import InputError
from fewbits.planning import decision, rounds
from fewbits.planning.allocation import allocator
from fewbits.planning.rounds import Round
from fewbits.store.files import Staged, remove

if TYPE_CHECKING:
    from fewbits.artifact.maker import Maker, OutputFile
    from fewbits.planning.constraints import Constraints
    from fewbits.planning.decision import Budget, Decision
    from fewbits.planning.rounds import Verdict
    from fewbits.sensitivity.table import Sensitivity


class Accurate(NamedTuple):
    """The smallest file that passed, or else the nearest to passing; and every plan that was tried."""

    made: OutputFile
    verdict: Any
    decision: Decision
    rounds: tuple[Round, ...]


def until_accurate(
    maker: Maker,
    path: Path,
    table: Sensitivity,
    budget: Budget,
    constraints: Constraints,
    most_rounds: int,
    judge: Callable[[Path], Verdict],
) -> Accurate:
    """Files of rounds are removed at the end. A run that resumes makes the same plans, whose weights and verdicts are cached: each round
    then costs only the writing of its file."""
    tried: list[tuple[OutputFile, Decision]] = []
    _remove_rounds(maker.work)  # left by a run that was killed

    def attempt(kl: float) -> Round | None:
        try:
            chosen = decision.decide(table, maker.target, budget, constraints, kl=kl)
        except InputError:
            if not tried:
                raise
            return None  # nothing is left to try
        formats = [entry.format for entry in chosen.plan.entries]
        if any(formats == [entry.format for entry in each.prepared.plan.entries] for each, _ in tried):
            return None
        number = len(tried) + 1
        file = maker.work / f"round-{number}{maker.target.suffix}"
        made = maker.make(chosen.plan, file, f"artifact-{number}")
        tried.append((made, chosen))
        return Round(chosen.plan.kl or 0.0, chosen.plan.nbytes, judge(file))

    best_possible = allocator(table, maker.target, constraints).least_kl
    first = decision.predicted_kl(budget.limits) / _factor(table, maker.text.domains)
    outcome = rounds.search(first, budget.limits, attempt, best_possible * 1.0001, most_rounds)
    best = outcome.best
    if best is None:  # none passed: the nearest
        best = min(range(len(outcome.rounds)), key=lambda i: outcome.rounds[i].verdict.kl_mean)
    made, chosen = _moved(maker, path, tried, best)
    return Accurate(made, outcome.rounds[best].verdict, chosen, outcome.rounds)


def _factor(table: Sensitivity, judged: Sequence[str]) -> float:
    """How much more is expected on the text that is judged, each kind by its windows, than on that of calibration."""
    return sum(table.kinds.get(name, 1.0) for name in judged) / len(judged) if judged else 1.0


def _moved(maker: Maker, path: Path, tried: list[tuple[OutputFile, Decision]], best: int) -> tuple[OutputFile, Decision]:
    """Moves the best file to where the user wants it, and removes the others."""
    made, chosen = tried[best]
    with Staged(path, maker.target.marker) as staged:
        if made.path.with_name(f"{made.path.name}.data").exists():  # the graph names its data file, so it cannot be renamed
            maker.target.write(made.artifact, staged, maker.progress)
        else:
            made.path.rename(staged)
    with Staged(maker.work / "artifact", "fewbits.json") as staged:
        made.artifact.path.rename(staged)
    _remove_rounds(maker.work)
    return replace(made, path=path, artifact=Artifact(maker.work / "artifact")), chosen


def _remove_rounds(work: Path) -> None:
    for path in [*work.glob("round-*"), *work.glob("artifact-*")]:
        remove(path)
