"""What a person wants of a plan beside its budget: one value, checked when it is made and passed along."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fewbits import formats, kv
from fewbits.errors import InputError
from fewbits.planning import rules, speeds

if TYPE_CHECKING:
    from fewbits.model import Weight
    from fewbits.planning.rules import Rule

STRATEGIES = ("solve", "threshold")
AUTO = "auto"  # the KV cache with which cache and weights together are predicted to cost least


@dataclass(frozen=True)
class Wishes:
    formats: tuple[str, ...] = ()  # to choose from; none: all that were measured. A weight may always stay as the checkpoint has it
    overrides: tuple[str, ...] = ()  # REGEX=FORMAT, REGEX>=FORMAT, REGEX<=FORMAT
    together: tuple[str, ...] = ()  # patterns; weights that one of them matches with the same text in its groups share a format
    strategy: str = "solve"
    kv: str | None = None  # format of the KV cache; None: as the runtime keeps it
    min_speed: float | None = None  # tokens per second that the plan must be predicted to reach
    bandwidth: float = speeds.BANDWIDTH  # of the memory, bytes per second: for the forecast of speed

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
        """The overrides, read. One that matches no weight is a mistake of its writer, and so is a pattern of `together`."""
        weights = list(weights)
        for pattern in self.together:
            if not any(re.search(pattern, weight.name) for weight in weights):
                raise InputError(f"`--together {pattern}` matches no weight", rules.example_of(weights))
        return tuple(rules.parse_all(self.overrides, weights))


NONE = Wishes()


def listed(given: str | Sequence[str]) -> tuple[str, ...]:
    """One text is a list of one, not of its letters."""
    return (given,) if isinstance(given, str) else tuple(given)
