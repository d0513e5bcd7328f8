"""Dataclasses from JSON that anybody may have written: every value is checked against the type of its field.

A field that has a default may be missing or null. Keys that the class does not know are ignored: the file may be of another version.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import MISSING, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from fewbits.errors import InputError
from fewbits.verification.metrics import Verdict

T = TypeVar("T")
Reader = Callable[[Any], Any]
HINT = "`fewbits quantize` writes one into the folder OUT.work, `fewbits demo` into its own"


def guarded(path: Path, parse: Callable[[], T]) -> T:
    try:
        return parse()
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError) as failure:
        why = f"it has no {failure}" if isinstance(failure, KeyError) else str(failure)
        raise InputError(f"`{path}` holds no results of a run: {why}", HINT) from failure


def read(kind: type[T], value: Any) -> T:
    reader: Callable[[Any], T] = _reader(kind)  # type: ignore[arg-type]  # mypy: a type is no Hashable
    return reader(value)


def number(value: Any) -> float:
    """JSON has no word for what is not finite: results.json says null."""
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"`{value}` is no number")
    return float(value)


def whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"`{value}` is no whole number")
    float(value)  # one that no float holds is refused here
    return value


def text(value: Any) -> str:
    return _checked(str, "text", value)


def _checked(kind: type[T], called: str, value: Any) -> T:
    if not isinstance(value, kind):
        raise TypeError(f"`{value}` is no {called}")
    return value


_PLAIN: dict[Any, Reader] = {
    float: number, int: whole, str: text, bool: lambda value: _checked(bool, "yes or no", value), Any: lambda value: value,
}  # fmt: skip


@cache
def _reader(kind: Hashable) -> Reader:
    if kind in _PLAIN:
        return _PLAIN[kind]
    if is_dataclass(kind):
        return _class_reader(kind)
    origin, inner = get_origin(kind), get_args(kind)
    if origin is tuple and inner[-1] is not Ellipsis:
        parts = [_reader(each) for each in inner]
        return lambda value: tuple(part(each) for part, each in zip(parts, _checked(list, "list", value), strict=True))
    of = _reader(inner[1] if origin is Mapping else inner[0])
    if origin is tuple:
        return lambda value: tuple(map(of, _checked(list, "list", value)))
    if origin is Mapping:
        return lambda value: {name: of(each) for name, each in _checked(dict, "object", value).items()}
    assert origin is UnionType and inner[1:] == (type(None),), f"no reader for {kind}"
    return lambda value: None if value is None else of(value)


def _class_reader(kind: Any) -> Reader:
    types = get_type_hints(kind)
    readers = {each.name: _reader(types[each.name]) for each in fields(kind)}
    optional = {each.name for each in fields(kind) if each.default is not MISSING or each.default_factory is not MISSING}

    def read_class(value: Any) -> Any:
        row = _checked(dict, "object", value)
        given = {name: of(row[name]) for name, of in readers.items() if name not in optional or row.get(name) is not None}
        made = kind(**given)
        return _believed(made, row) if isinstance(made, Verdict) else made

    return read_class


def _believed(verdict: Verdict, row: Mapping[str, Any]) -> Verdict:
    """A verdict with a figure that is not finite did not pass, whatever the file says of itself."""
    values = [each for value in vars(verdict).values() for each in (value if isinstance(value, tuple) else (value,))]
    if verdict.failures:
        return verdict
    if not all(math.isfinite(value) for value in values if isinstance(value, float)):
        return replace(verdict, failures=("a figure is not finite",))
    return verdict if row.get("passed", True) is True else replace(verdict, failures=("the file does not say that it passed",))
