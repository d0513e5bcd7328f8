"""What may be planned for a model of which nothing is known but its weights: no calibration text, no importance matrix; and for a weight
that the importance matrix does not name.

Types of under three bits (`Format.needs_importance`) are refused where they are named, and left out of what is chosen from, unless
`--method rtn` asks for plain rounding by name.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

from fewbits import formats
from fewbits.errors import InputError
from fewbits.planning import recipes, rules
from fewbits.planning.budgets import Recipe, parse_size

if TYPE_CHECKING:
    from fewbits.formats import Format
    from fewbits.model.weights import Weight
    from fewbits.planning import Plan
    from fewbits.planning.constraints import Constraints

_HINT = "give `--imatrix FILE` of llama.cpp, or the model's folder `--like` this file; or `--method rtn`, to round without either"
_UNSEEN = "give it another format (`--override`), or a matrix that names it; or `--method rtn`, to round without"
_ANY = (256, 256)  # a shape that every format fits


def names_left(names: Iterable[str]) -> tuple[str, ...]:
    """Of a target's candidates those that stand rounding without importance."""
    return tuple(name for name in names if not formats.get(name).needs_importance)


def check_plan(plan: Plan, hint: str = _HINT) -> None:
    """Of a plan that is given: by a format for all, or weight by weight. A weight whose method is rtn was meant so."""
    for entry in plan.entries:
        if entry.method.lower() != "rtn":
            _check(formats.get(entry.format), f"`{entry.weight}` in {entry.format}", hint)


def check_unseen(plan: Plan, unseen: Collection[str]) -> None:
    """Of a plan that is given, beside an importance matrix that has no entry for some weights."""
    for entry in plan.entries:
        if entry.method.lower() != "rtn" and entry.weight in unseen:
            _check(formats.get(entry.format), f"`{entry.weight}` in {entry.format}", _UNSEEN, "the importance matrix has no entry for it")


def check_choice(size: str | None, constraints: Constraints, weights: Iterable[Weight], config: Any) -> None:
    """Of a budget: the formats that the user names, and those that make up the recipe whose size is asked for."""
    for name in constraints.formats:
        _check(formats.get(name), f"`--formats {name}`")
    for text in constraints.overrides:
        if fmt := rules.parse(text).format:
            _check(fmt, f"`--override {text}`")
    if size is not None and isinstance(parse_size(size), Recipe):
        for fmt in recipes.recipe(size, weights, config).values():
            _check(fmt, f"`--size {size}`, which needs {fmt.name}")


def _check(fmt: Format, what: str, hint: str = _HINT, known: str = "nothing is known of this model but its weights") -> None:
    if fmt.needs_importance:
        bits = f"{fmt.bits_per_weight(_ANY):.2f} bits, under {formats.LEAST_BITS}, need to know which columns matter"
        raise InputError(f"{what}: {bits}, and {known}", hint)
