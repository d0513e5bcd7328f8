"""Sizes as people write them: `8GB`, `512MiB` of memory, `8k` tokens, `2h`."""

from __future__ import annotations

import math
import re
from decimal import Decimal
from fractions import Fraction

from fewbits.errors import InputError

_UNITS: dict[str, int] = {"": 1, "B": 1} | {
    f"{letter}{binary}B": (1024 if binary else 1000) ** power for power, letter in enumerate("KMGT", start=1) for binary in ("", "I")
}
_EXAMPLES = "for example `8GB`, `900MiB` or `8000000000`"


def size(nbytes: float) -> str:
    """Three digits at least: 950 B, 7.42 MB, 271 MB."""
    for unit in ("B", "kB", "MB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "B" or nbytes >= 100 else f"{nbytes:.2f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.2f} GB"


def parse_tokens(text: str | int, option: str = "--context") -> int:
    """Tokens from `8192`, `8k` (8192, as contexts are named) or `1M` (2^20)."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) *([KM]?)", str(text).strip().replace(",", ""), re.IGNORECASE | re.ASCII)
    tokens = Fraction(Decimal(match[1])) * {"": 1, "K": 1 << 10, "M": 1 << 20}[match[2].upper()] if match else Fraction(0)
    if tokens < 1 or tokens.denominator != 1:
        raise InputError(f"`{option} {text}` is not a number of tokens", "for example `8192`, `8k` or `128k`")
    return int(tokens)


def parse_duration(text: str | float, option: str = "--within") -> float:
    """Seconds from `90s`, `20min`, `2h`, `1h30min`, `1.5h`, or a number of them."""
    if isinstance(text, int | float):
        seconds = float(text)
    else:
        number = r"([0-9]+(?:\.[0-9]+)?) *"
        units = {"h": rf"(?:{number}h(?:ours?)?)?", "m": rf" *(?:{number}m(?:in(?:utes?)?)?)?", "s": rf" *(?:{number}s(?:ec(?:onds?)?)?)?"}
        match = re.fullmatch("".join(units.values()), text.strip(), re.IGNORECASE | re.ASCII)
        parts = match.groups() if match else ()
        seconds = sum(float(part) * unit for part, unit in zip(parts, (3600, 60, 1), strict=False) if part)
    if not 1 <= seconds < 1e8:
        raise InputError(f"`{option} {text}` is not a time", "for example `20min`, `2h` or `1h30min`")
    return seconds


def bytes_of(given: str | int, option: str) -> int:
    """A number of bytes, or a text that says one."""
    return given if isinstance(given, int) else parse_memory(given, option)


def parse_memory(text: str, option: str = "--fits", hint: str = _EXAMPLES) -> int:
    """Bytes from `8GB` (10^9), `512MiB` (2^20) or `8000000000`. Fractions of a byte round down, so that a budget is never exceeded."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+) *([KMGT]?i?B|)", text.strip(), re.IGNORECASE | re.ASCII)
    if not match:
        raise InputError(f"`{option} {text}` is not a number of bytes", hint)
    number = Fraction(Decimal(match[1]))
    if number == 0:
        raise InputError(f"`{option} {text}` is nothing", hint)
    if not match[2] and (number < 1000 or number.denominator != 1):
        raise InputError(f"`{option} {text}` has no unit", f"did you mean `{match[1]}GB`?")
    nbytes = math.floor(number * _UNITS[match[2].upper()])
    if nbytes == 0:
        raise InputError(f"`{option} {text}` is less than a byte", hint)
    return nbytes
