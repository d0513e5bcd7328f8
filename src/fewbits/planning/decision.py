"""A budget made into a plan: a size or a device becomes a limit in bytes, an accuracy a limit of the predicted KL."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from fewbits import planning
from fewbits.devices import groups
from fewbits.devices.units import size
from fewbits.errors import InputError
from fewbits.formats.runtime import kv
from fewbits.planning import budgets, by_thresholds, footprint, recipes, speed
from fewbits.planning.accuracy import Thresholds
from fewbits.planning.allocation import Allocator, Point, allocator
from fewbits.planning.constraints import AUTO, UNCONSTRAINED, Constraints
from fewbits.store.files import Staged

if TYPE_CHECKING:
    from fewbits.planning import Plan
    from fewbits.planning.target import Target
    from fewbits.sensitivity.table import Sensitivity

CONTEXT = 4096
_BUDGETS = "`--size 4.5bpw`, `--size 3.2GB`, `--size q4_k_m`, `--fits 8GB`, `--max-kl 0.01` or `--min-agreement 0.99`"

# How an accuracy translates to KL before anything was measured; the first measurement corrects it. Disagreement of the top token is near
# 0.55 sqrt(KL) (SmolLM2: .53 to .56 over KL .018 to .18, `fewbits bench quality`), the logarithm of the perplexity ratio near 0.7 KL.
_DISAGREEMENT, _PERPLEXITY = 0.55, 0.7


@dataclass(frozen=True)
class Budget:
    """A size, a device with a context, or an accuracy. An accuracy given beside one of the others is only a threshold to judge by."""

    size: str | None = None
    fits: str | None = None
    context: int | None = None
    limits: Thresholds = field(default_factory=Thresholds)

    def __post_init__(self) -> None:
        if self.size is not None and self.fits is not None:
            raise InputError("`--size` and `--fits` are two budgets", "give one of them")
        if self.context is not None and self.fits is None:
            raise InputError("`--context` goes with `--fits`", "for example `--fits 8GB --context 8192`")
        if self.size is not None:
            budgets.parse_size(self.size)
        if self.fits is not None:
            groups.place(self.fits)

    @property
    def by_accuracy(self) -> bool:
        return self.size is None and self.fits is None

    @property
    def counts_container(self) -> bool:
        """Whether the limit is for the whole file, not only for the weights."""
        return self.fits is not None or (self.size is not None and isinstance(budgets.parse_size(self.size), budgets.FileBytes))

    @property
    def given(self) -> bool:
        return not self.by_accuracy or any(limit is not None for limit in vars(self.limits).values())

    def __str__(self) -> str:
        if self.size is not None:
            return f"--size {self.size}"
        if self.fits is not None:
            return f"--fits {self.fits} --context {self.context or CONTEXT}"
        named = ((name.replace("_", "-"), value) for name, value in vars(self.limits).items() if value is not None)
        return " ".join(f"--{name} {value:g}" for name, value in named)


@dataclass(frozen=True)
class Decision:
    plan: Plan
    allocator: Allocator
    limit: int | None  # tensor bytes that the budget allows; None: it is one of accuracy
    simple: Plan | None = None  # the plan of the textbook strategy for the same budget; None: it finds none
    whole_file: bool = False  # the budget counts the container too
    kv: str | None = None  # format of the KV cache that the budget was counted with
    edited: bool = False  # a plan.json edited by hand, measured again: no budget was given

    def __str__(self) -> str:
        first, formats, predicted = str(self.plan).splitlines()
        allowed = "" if self.limit is None else f" of {size(self.limit)} that tensors may take"
        rest = "" if self.simple is None or self.simple.kl is None else f"; {self.simple.kl:.4g} with 4, 8 or 16 bits by thresholds"
        return f"{first}{allowed}\n{formats}\n{predicted}{rest}"

    def frontier(self) -> list[Point]:
        return self.allocator.frontier()

    def save(self, path: Path) -> None:
        """The plan, and its frontier beside it."""
        import json

        with Staged(path) as staged:
            staged.write_text(self.plan.to_json())
        with Staged(path.with_suffix(".frontier.json")) as staged:
            staged.write_text(json.dumps([asdict(point) for point in self.frontier()], indent=1) + "\n")

    def to_dict(self) -> dict[str, object]:
        import json

        return {
            "plan": json.loads(self.plan.to_json()),
            "limit_bytes": self.limit,
            "kv": self.kv,
            "tokens_per_second": self.allocator.tokens_per_second(self.plan),
            "threshold_plan": {"bytes": self.simple.nbytes, "kl": self.simple.kl} if self.simple else None,
            "frontier": [asdict(point) for point in self.frontier()],
        }


def decide(
    table: Sensitivity,
    target: Target,
    budget: Budget,
    constraints: Constraints = UNCONSTRAINED,
    *,
    overhead: int | None = None,
    kl: float | None = None,
) -> Decision:
    """`overhead`: bytes of the container, if known better than from the table's dry run. `kl`: the predicted KL to stay below, in place of
    the first estimate from the budget's accuracy."""
    if constraints.kv == AUTO:
        return _best_cache(table, lambda name: decide(table, target, budget, replace(constraints, kv=name), overhead=overhead, kl=kl))
    if not budget.given:
        raise InputError("give a budget", _BUDGETS)
    whole = allocator(table, target, constraints)
    cache = kv.get(constraints.kv).name if constraints.kv else None
    why = str(budget)
    if budget.by_accuracy:
        limit, allowed = None, predicted_kl(budget.limits) if kl is None else kl
        simple = by_thresholds.within_kl(whole, allowed, why)
        best = whole.within_kl(allowed, why)
    else:
        limit = tensor_bytes(table, target, budget, whole.elements, overhead, cache)
        simple = by_thresholds.within_bytes(whole, limit, why)
        best = whole.within_bytes(limit, why)
    if constraints.strategy == "threshold":
        if simple is None:
            raise InputError(f"no thresholds meet `{why}`", "leave `--strategy` out: the solver has more choices")
        best = simple
    if says_cache(target, budget, cache):
        best = replace(best, kv=cache)
    return Decision(best, whole, limit, simple, budget.counts_container, cache)


def says_cache(target: Target, budget: Budget, name: str | None) -> bool:
    """Whether the plan stores the format of the KV cache. A target that cannot store it is an error, unless the budget is a device:
    then the format counts in the memory, and the user chooses it again when the model runs."""
    if name is None or (cache := kv.get(name).name) == "float":
        return False
    if why_not := target.accepts_kv(cache):
        if budget.fits is None:
            raise InputError(f"{target.name} cannot say that the KV cache is {cache}: {why_not}", "leave it out, or use `--to fewbits`")
        return False
    return True


def _best_cache(table: Sensitivity, decided: Callable[[str], Decision]) -> Decision:
    """The KV cache for which the predicted KL of cache and weights together is least: a smaller cache leaves more for the weights."""
    if not table.kv:
        raise InputError("`--kv auto` needs KV caches in the table", "measure with `--kv int8,int4`")
    candidates: list[tuple[float, Decision]] = []
    refused: InputError | None = None
    for name, kl in {"float": 0.0, **table.kv}.items():
        try:
            decision = decided(name)
        except InputError as failure:  # a large cache may leave too little
            refused = failure
        else:
            candidates.append((kl + (decision.plan.kl or 0.0), decision))
    if not candidates:
        assert refused
        raise refused
    return min(candidates, key=lambda entry: entry[0])[1]


def repriced(table: Sensitivity, target: Target, text: str, bandwidth: float = speed.BANDWIDTH) -> Decision:
    whole = allocator(table, target, Constraints(bandwidth=bandwidth))
    return Decision(whole.repriced(planning.read(text, table.weights, target)), whole, None, edited=True)


def predicted_kl(limits: Thresholds) -> float:
    """The strictest of the accuracies, as a KL."""
    bounds = [limits.max_kl] if limits.max_kl is not None else []
    if limits.min_agreement is not None:
        bounds.append(((1 - limits.min_agreement) / _DISAGREEMENT) ** 2)
    if (ratio := limits.max_ppl_ratio) is not None:
        if ratio < 1:
            raise InputError(f"`--max-ppl-ratio {ratio:g}` asks for less perplexity than the float model's", "a ratio of 1 is no loss")
        bounds.append(math.log(ratio) / _PERPLEXITY)
    return min(bounds)


def tensor_bytes(table: Sensitivity, target: Target, budget: Budget, elements: int, overhead: int | None, kv_cache: str | None) -> int:
    """What the planned weights may take."""
    config = attributes(table.config)
    if budget.fits is not None:
        place = groups.place(budget.fits)
        use = footprint.Use(context=budget.context or CONTEXT, kv=kv.get(kv_cache or "float"), reserved=place.reserves)
        use = replace(use, devices=len(place.everywhere))
        left = footprint.weight_bytes_left(footprint.shape(config), sum(part.usable for part in place.everywhere), use)
        size: budgets.Size = budgets.FileBytes(max(1, left))
    else:
        assert budget.size is not None
        size = budgets.parse_size(budget.size)
    if overhead is None:
        known = table.containers.get(target.name)
        if known is None and isinstance(size, budgets.FileBytes):
            raise InputError(f"the table does not say what {target.name} files hold beside weights", f"measure with `--to {target.name}`")
        overhead = known.overhead if known else 0
    return budgets.tensor_bytes(size, elements, overhead, lambda name: recipes.nbytes(name, table.weights, config))


def attributes(config: dict[str, Any]) -> Any:
    """A config from JSON with attributes, like those of transformers; that of its language model too, if it has one."""
    text = config.get("text_config")
    return SimpleNamespace(**config | ({"text_config": attributes(text)} if isinstance(text, dict) else {}))
