"""`fewbits plan`: a table of sensitivities and a budget in, the best plan for a target out. Loads no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fewbits import targets
from fewbits.devices.units import parse_tokens
from fewbits.errors import InputError
from fewbits.formats import names_of
from fewbits.planning import speed
from fewbits.planning.accuracy import Thresholds
from fewbits.planning.constraints import UNCONSTRAINED, Constraints, listed
from fewbits.planning.decision import Budget, Decision, decide, repriced
from fewbits.sensitivity.table import read
from fewbits.store.untrusted import read_text


def plan(
    model: str | Path,
    sensitivity: str | Path,
    out: str | Path | None = None,
    *,
    to: str = "gguf",
    size: str | None = None,
    fits: str | None = None,
    context: str | int | None = None,
    max_kl: float | None = None,
    min_agreement: float | None = None,
    max_ppl_ratio: float | None = None,
    formats: str | Sequence[str] = (),
    override: str | Sequence[str] = (),
    together: str | Sequence[str] = (),
    bandwidth: str | float = speed.BANDWIDTH,
    min_speed: float | None = None,
    strategy: str = "solve",
    kv: str | None = None,
    plan: str | Path | None = None,
) -> Decision:
    """`fewbits plan`: the table that `fewbits measure` wrote and a budget in, the best plan out. Instead of a budget, `plan`: a
    plan.json changed by hand, whose sizes and predictions are computed again."""
    table = read(Path(sensitivity))
    # a hub id is not checked: its folder has another name. A link may have another name than the folder it leads to
    if Path(model).exists() and table.model not in (Path(model).name, Path(model).resolve().name):
        raise InputError(f"`{sensitivity}` was measured on `{table.model}`, not on `{Path(model).name}`", "measure this model first")
    bandwidth = speed.parse_bandwidth(bandwidth) if isinstance(bandwidth, str) else bandwidth
    budget = Budget(size, fits, None if context is None else parse_tokens(context), Thresholds(max_kl, min_agreement, max_ppl_ratio))
    constraints = Constraints(names_of(formats), listed(override), listed(together), strategy, kv, min_speed, bandwidth)
    target = targets.get(to)
    if plan is not None:
        if budget.given or replace(constraints, bandwidth=speed.BANDWIDTH) != UNCONSTRAINED:
            raise InputError("`--plan` prices a plan as it is", "leave the budget and all that chooses (`--override`, `--formats`...) out")
        decision = repriced(table, target, read_text(Path(plan), "`fewbits plan -o` writes one"), bandwidth)
    else:
        decision = decide(table, target, budget, constraints)
    if out is not None:
        decision.save(Path(out))
    return decision
