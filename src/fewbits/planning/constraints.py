"""What a user asks of a plan beside its budget: one value, checked when it is made."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fewbits import formats
from fewbits.errors import InputError
from fewbits.formats.runtime import kv
from fewbits.planning import rules, speed

if TYPE_CHECKING:
    from fewbits.model.weights import Weight
    from fewbits.planning.rules import Rule

STRATEGIES = ("solve", "threshold")
AUTO = "auto"  # choose the KV cache for which the predicted KL of cache and weights together is least


@dataclass(frozen=True)
class Constraints:
    formats: tuple[str, ...] = ()  # to choose from; empty: all that were measured. A weight may always stay unquantized
    overrides: tuple[str, ...] = ()  # REGEX=FORMAT, REGEX>=FORMAT, REGEX<=FORMAT
    together: tuple[str, ...] = ()  # regular expressions: weights whose match groups are equal share a format
    strategy: str = "solve"
    kv: str | None = None  # format of the KV cache; None: as the runtime keeps it
    min_speed: float | None = None  # tokens per second that the plan must be predicted to reach
    bandwidth: float = speed.BANDWIDTH  # of the memory, bytes per second: for the forecast of speed

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise InputError(f"no strategy is named `{self.strategy}`", f"known strategies: {', '.join(STRATEGIES)}")
        if self.kv not in (None, AUTO):
            kv.get(str(self.kv))
        if self.min_speed is not None and not 0 <= self.min_speed < math.inf:
            raise InputError(f"`--min-speed {self.min_speed:g}` is no speed", "a number of tokens per second")
        for name in self.formats:
            formats.get(name)
        for text in self.overrides:
            rules.parse(text)
        for pattern in self.together:
            try:
                re.compile(pattern)
            except re.error as failure:
                example = "for example 'layers.([0-9]+).*(q|k|v)_proj'"
                raise InputError(f"`{pattern}` is not a regular expression: {failure}", example) from None

    def rules_for(self, weights: Iterable[Weight]) -> tuple[Rule, ...]:
        """The overrides, parsed. An override or a pattern of `together` that matches no weight is an error."""
        weights = list(weights)
        for pattern in self.together:
            if not any(re.search(pattern, weight.name) for weight in weights):
                raise InputError(f"`--together {pattern}` matches no weight", rules.example_of(weights))
        return tuple(rules.parse_all(self.overrides, weights))


UNCONSTRAINED = Constraints()


def listed(given: str | Sequence[str]) -> tuple[str, ...]:
    """A single string counts as a list of one."""
    return (given,) if isinstance(given, str) else tuple(given)
