"""From what a person asks for to a plan: a size or a device becomes bytes, an accuracy becomes a predicted KL, and either is spent."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from fewbits import hardware, kv, planning
from fewbits.capacity import devices
from fewbits.checkpoints.folder import read_text
from fewbits.errors import InputError
from fewbits.files import Staged
from fewbits.planning import budgets, recipes, speeds, thresholds, wishes
from fewbits.planning.allocation import Allocator, Point, allocator
from fewbits.planning.wishes import Wishes, listed
from fewbits.verification import Thresholds

if TYPE_CHECKING:
    from fewbits.planning import Plan
    from fewbits.sensitivity.table import Sensitivity
    from fewbits.targets import Target

CONTEXT = 4096

# What an accuracy means in KL before anything was measured; the first measurement corrects it. Disagreement of the top token is near
# 0.55 sqrt(KL) (SmolLM2: .53 to .56 over KL .018 to .18, `fewbits bench quality`), the logarithm of the perplexity ratio near 0.7 KL.
_DISAGREEMENT, _PERPLEXITY = 0.55, 0.7


@dataclass(frozen=True)
class Budget:
    """One of a size, a device with a context, or an accuracy; an accuracy beside the others is only a threshold to judge by."""

    size: str | None = None
    fits: str | None = None
    context: int | None = None
    limits: Thresholds = field(default_factory=Thresholds)

    def __post_init__(self) -> None:
        if self.size is not None and self.fits is not None:
            raise InputError("`--size` and `--fits` are two budgets", "give one of them")
        if self.context is not None and self.fits is None:
            raise InputError("`--context` goes with `--fits`", "for example --fits 8GB --context 8192")
        if self.size is not None:
            budgets.parse_size(self.size)
        if self.fits is not None:
            devices.place(self.fits)

    @property
    def by_accuracy(self) -> bool:
        return self.size is None and self.fits is None

    @property
    def counts_container(self) -> bool:
        """What lies beside the weights counts too."""
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
    simple: Plan | None = None  # what thresholds would give for the same budget; None: nothing within it
    whole_file: bool = False  # the budget counts the container too
    kv: str | None = None  # format of the KV cache that the budget was counted with
    edited: bool = False  # a person's plan, priced anew: no budget was given

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
    wished: Wishes = wishes.NONE,
    *,
    overhead: int | None = None,
    kl: float | None = None,
) -> Decision:
    """overhead: of the container, if it is known better than from the table's dry run. kl: the predicted KL to stay below, in place of
    what the budget's accuracies mean at first sight."""
    if wished.kv == wishes.AUTO:
        return _best_cache(table, lambda name: decide(table, target, budget, replace(wished, kv=name), overhead=overhead, kl=kl))
    if not budget.given:
        raise InputError("give a budget", "--size 4.5bpw, --size 3.2GB, --size q4_k_m, --fits 8GB, --max-kl 0.01 or --min-agreement 0.99")
    whole = allocator(table, target, wished)
    cache = kv.get(wished.kv).name if wished.kv else None
    why = str(budget)
    if budget.by_accuracy:
        limit, allowed = None, predicted_kl(budget.limits) if kl is None else kl
        simple = thresholds.within_kl(whole, allowed, why)
        best = whole.within_kl(allowed, why)
    else:
        limit = tensor_bytes(table, target, budget, whole.elements, overhead, cache)
        simple = thresholds.within_bytes(whole, limit, why)
        best = whole.within_bytes(limit, why)
    if wished.strategy == "threshold":
        if simple is None:
            raise InputError(f"no thresholds meet {why}", "leave `--strategy` out: the solver has more choices")
        best = simple
    if says_cache(target, budget, cache):
        best = replace(best, kv=cache)
    return Decision(best, whole, limit, simple, budget.counts_container, cache)


def says_cache(target: Target, budget: Budget, name: str | None) -> bool:
    """Whether the plan says how the KV cache is kept. Where the target cannot, a budget may count a cache whose type is chosen when it
    runs; without one to count it, it is refused."""
    if name is None or (found := kv.get(name).name) == "float":
        return False
    if why_not := target.accepts_kv(found):
        if budget.fits is None:
            raise InputError(f"{target.name} cannot say that the KV cache is {found}: {why_not}", "leave it out, or use `--to fewbits`")
        return False
    return True


def _best_cache(table: Sensitivity, decided: Callable[[str], Decision]) -> Decision:
    """A smaller cache leaves more for the weights: the one with which both together are predicted to cost least."""
    if not table.kv:
        raise InputError("`--kv auto` needs KV caches in the table", "measure with `--kv int8,int4`")
    found: list[tuple[float, Decision]] = []
    refused: InputError | None = None
    for name, kl in {"float": 0.0, **table.kv}.items():
        try:
            decision = decided(name)
        except InputError as failure:  # a large cache may leave too little
            refused = failure
        else:
            found.append((kl + (decision.plan.kl or 0.0), decision))
    if not found:
        assert refused
        raise refused
    return min(found, key=lambda entry: entry[0])[1]


def plan(
    model: str | Path,
    sensitivity: str | Path,
    out: str | Path | None = None,
    *,
    to: str = "gguf",
    size: str | None = None,
    fits: str | None = None,
    context: int | None = None,
    max_kl: float | None = None,
    min_agreement: float | None = None,
    max_ppl_ratio: float | None = None,
    formats: str | Sequence[str] = (),
    override: str | Sequence[str] = (),
    together: str | Sequence[str] = (),
    bandwidth: float = speeds.BANDWIDTH,
    min_speed: float | None = None,
    strategy: str = "solve",
    kv: str | None = None,
    edited: str | Path | None = None,
) -> Decision:
    """`fewbits plan`: the table that `fewbits measure` wrote and a budget in, the best plan out. Instead of a budget, `edited`: a
    plan.json that a person changed, to be priced anew."""
    from fewbits import targets
    from fewbits.sensitivity.table import read

    table = read(Path(sensitivity))
    # of a hub id only its snapshot has a name; a link may be called otherwise than what it leads to
    if Path(model).exists() and table.model not in (Path(model).name, Path(model).resolve().name):
        raise InputError(f"`{sensitivity}` was measured on `{table.model}`, not on `{Path(model).name}`", "measure this model first")
    budget = Budget(size, fits, context, Thresholds(max_kl, min_agreement, max_ppl_ratio))
    wished = Wishes(listed(formats), listed(override), listed(together), strategy, kv, min_speed, bandwidth)
    target = targets.get(to)
    if edited is not None:
        if budget.given or replace(wished, bandwidth=speeds.BANDWIDTH) != wishes.NONE:
            raise InputError("`--plan` prices a plan as it is", "leave the budget and all that chooses (`--override`, `--formats`...) out")
        found = repriced(table, target, read_text(Path(edited), "`fewbits plan -o` writes one"), bandwidth)
    else:
        found = decide(table, target, budget, wished)
    if out is not None:
        found.save(Path(out))
    return found


def repriced(table: Sensitivity, target: Target, text: str, bandwidth: float = speeds.BANDWIDTH) -> Decision:
    whole = allocator(table, target, Wishes(bandwidth=bandwidth))
    return Decision(whole.repriced(planning.read(text, table.weights, target)), whole, None, edited=True)


def predicted_kl(limits: Thresholds) -> float:
    """The strictest of the accuracies, as a KL."""
    found = [limits.max_kl] if limits.max_kl is not None else []
    if limits.min_agreement is not None:
        found.append(((1 - limits.min_agreement) / _DISAGREEMENT) ** 2)
    if (ratio := limits.max_ppl_ratio) is not None:
        if ratio < 1:
            raise InputError(f"`--max-ppl-ratio {ratio:g}` asks for less perplexity than the float model's", "a ratio of 1 is no loss")
        found.append(math.log(ratio) / _PERPLEXITY)
    return min(found)


def tensor_bytes(table: Sensitivity, target: Target, budget: Budget, elements: int, overhead: int | None, kv_cache: str | None) -> int:
    """What the planned weights may take."""
    config = attributes(table.config)
    if budget.fits is not None:
        place = devices.place(budget.fits)
        use = hardware.Use(context=budget.context or CONTEXT, kv=kv.get(kv_cache or "float"), reserved=place.reserves)
        left = hardware.weight_bytes_left(hardware.shape(config), place.usable, use)
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
    """A config from JSON, read as transformers' own is."""
    return SimpleNamespace(**config)
