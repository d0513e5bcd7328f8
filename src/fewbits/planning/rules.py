"""Overrides: `REGEX=FORMAT`, `REGEX>=FORMAT` (no fewer bits), `REGEX<=FORMAT` (no more); `keep` is the type of the checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from fewbits import formats
from fewbits.errors import InputError

if TYPE_CHECKING:
    from fewbits.formats import Format
    from fewbits.model.weights import Weight

_EXAMPLE = "for example `--override 'self_attn=int4_g32'`"
_ANY = (256, 256)  # a shape that every format fits


@dataclass(frozen=True)
class Rule:
    text: str
    pattern: re.Pattern[str]
    how: Literal["=", ">=", "<="]
    format: Format | None  # None: the weight's own

    def names(self, weight: Weight) -> bool:
        return self.pattern.search(weight.name) is not None

    def of(self, weight: Weight) -> Format:
        return self.format or formats.get(weight.dtype)

    def allows(self, weight: Weight, fmt: Format) -> bool:
        if self.how == "=":
            return fmt == self.of(weight)
        bits, bound = fmt.bits_per_weight(_ANY), self.of(weight).bits_per_weight(_ANY)
        return bits >= bound if self.how == ">=" else bits <= bound


def parse(text: str) -> Rule:
    match = re.fullmatch(r"(.+?)(>=|<=|=)([^=<>]*)", text)
    if not match or not match[3].strip():
        raise InputError(f"the override `{text}` is not of the form REGEX=FORMAT", _EXAMPLE)
    pattern, how, name = match[1], match[2], match[3].strip()
    try:
        compiled = re.compile(pattern)
    except re.error as failure:
        raise InputError(f"`{pattern}` is not a regular expression: {failure}", _EXAMPLE) from failure
    return Rule(text, compiled, how, None if name.lower() == "keep" else formats.get(name))  # type: ignore[arg-type]


def parse_all(texts: Sequence[str], weights: Iterable[Weight]) -> list[Rule]:
    """An override that matches no weight is an error."""
    rules, weights = [parse(text) for text in texts], list(weights)
    for rule in rules:
        if not any(rule.names(weight) for weight in weights):
            raise InputError(f"the override `{rule.text}` matches no weight", example_of(weights))
    return rules


def example_of(weights: Sequence[Weight]) -> str:
    return f"names look like `{weights[len(weights) // 2].name}`"
