"""Kinds of text: which of the paths that a user gives are of one kind, how much each kind counts, and how long its samples are.

A kind has the name of its file or folder, or the one that is given with it, as in `code=src/main.py`. Weights are shares of the tokens: at
`prose=1,code=2` two of three tokens are code, however much text there is of either. They decide which samples are drawn, rather than how
a sum over samples is weighed, so that all that is made of samples (second moments, ranges, tuned scales, the forecast) knows of them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from fewbits.errors import InputError

Length = int | Literal["data"] | None
_WEIGHTS = "for example `--weights prose=1,code=2`"
_LENGTH = "a number of tokens from 2 up, or one for a kind of text: `--length books=4096`"


@dataclass(frozen=True)
class Given:
    """One path, as it was given."""

    domain: str
    path: str


@dataclass(frozen=True)
class Mix:
    """What was asked for of kinds of text. Without it, text is drawn in the proportion in which there is some."""

    weights: Mapping[str, float] = field(default_factory=dict)
    lengths: Mapping[str, int] = field(default_factory=dict)  # tokens in a sample, where it is not the length of all

    def __bool__(self) -> bool:
        return bool(self.weights or self.lengths)

    def check(self, names: Sequence[str]) -> None:
        """Refuses a name that no text has."""
        for option, named in (("--weights", self.weights), ("--length", self.lengths)):
            if unknown := next((name for name in named if name not in names), None):
                known = ", ".join(f"`{name}`" for name in names)
                raise InputError(f"`{option}` names `{unknown}`, and the kinds of text are {known}", f"name one: `--data {unknown}=FILE`")

    def of(self, names: Sequence[str]) -> Mix:
        """What of it is about these kinds."""
        weights = {name: weight for name, weight in self.weights.items() if name in names}
        return Mix(weights, {name: length for name, length in self.lengths.items() if name in names})

    def shares(self, names: Sequence[str]) -> dict[str, float]:
        """Of the tokens. A kind without a weight counts 1."""
        weights = {name: self.weights.get(name, 1.0) for name in names}
        total = sum(weights.values())
        return {name: weight / total for name, weight in weights.items()}


def mixed(weights: str | Mapping[str, float] | None = None, length: Length | str | Mapping[str, int] = None) -> tuple[Mix, Length]:
    """Weights and lengths as a user gives them, and the length of all kinds that have none of their own."""
    usual, lengths = _lengths(length)
    return Mix(_weights(weights), lengths), usual


def in_tokens(length: Length) -> int | None:
    """The length, where it cannot be that of each document."""
    if length == "data":
        raise InputError("`--length data` is for `fewbits calibrate`: windows to judge on have one length", _LENGTH)
    return length


def named(paths: Sequence[str | Path]) -> tuple[Given, ...]:
    """Every path with the name of its kind: the one before `=`, else the stem of the file; with its folder where two have the same."""
    split = [_split(str(path)) for path in paths]
    stems = {path: _stem(path) for name, path in split if not name}
    count = Counter(stems.values())
    longer = {path: stem if count[stem] == 1 else f"{Path(path).parent.name or '.'}/{Path(path).name}" for path, stem in stems.items()}
    return tuple(Given(name or longer[path], path) for name, path in split)


def names(paths: Sequence[str | Path]) -> list[str]:
    """The kinds of text, in the order in which they were given."""
    return list(dict.fromkeys(given.domain for given in named(paths)))


def _split(given: str) -> tuple[str, str]:
    """(name, path); a file whose own name has a `=` in it is a path."""
    name, equals, path = given.partition("=")
    return (name.strip(), path) if equals and path and name.strip() and not Path(given).exists() else ("", given)


def _stem(place: str) -> str:
    path = Path(place)
    if place == "-":
        return "stdin"
    if path.is_dir():
        return path.resolve().name or place
    return Path(path.stem).stem if path.suffix.lower() == ".gz" else path.stem


def _pairs(text: str, option: str, hint: str) -> list[tuple[str, str]]:
    """(name, value) of `a=1,b=2`; the name of a value that stands alone is empty."""
    pairs = [(pair.rpartition("=")[0].strip(), pair.rpartition("=")[2].strip()) for pair in text.split(",")]
    if twice := [name for name, times in Counter(name for name, _ in pairs).items() if times > 1]:
        raise InputError(f"`{option} {text}` says two things of " + (f"`{twice[0]}`" if twice[0] else "all kinds of text"), hint)
    return pairs


def _weights(given: str | Mapping[str, float] | None) -> dict[str, float]:
    if not given:
        return {}
    pairs = _pairs(given, "--weights", _WEIGHTS) if isinstance(given, str) else list(given.items())
    weights = {}
    for name, value in pairs:
        try:
            weights[name] = float(value)
        except ValueError:
            weights[name] = math.nan
        if not name or not 0 < weights[name] < math.inf:
            raise InputError(f"`--weights`: `{name}={value}` is no kind of text with a number above 0", _WEIGHTS)
    return weights


def _lengths(given: Length | str | Mapping[str, int]) -> tuple[Length, dict[str, int]]:
    if given is None or given == "data" or isinstance(given, int):
        return given, {}  # type: ignore[return-value]  # mypy: "data" is a str
    pairs = _pairs(given, "--length", _LENGTH) if isinstance(given, str) else [(name, str(value)) for name, value in given.items()]
    for name, value in pairs:
        if not value.isdecimal() or int(value) < 2:
            raise InputError(f"`--length {f'{name}={value}' if name else value}` is not a length", _LENGTH)
    lengths = {name: int(value) for name, value in pairs}
    return lengths.pop("", None), lengths
