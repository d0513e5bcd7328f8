"""Figures as a person reads them."""

from __future__ import annotations

import math

from fewbits.reporting.terminal import size

__all__ = ["count", "kl", "million", "names", "share", "short", "size"]


def kl(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return "not finite" if value is not None else ""
    return f"{value:.4f}" if value >= 0.01 else f"{value:.2g}" if value < 1e-4 else f"{value:.5f}"


def share(value: float, digits: int = 1) -> str:
    return f"{100 * value:.{digits}f} %"


def short(value: float) -> str:
    return f"{value:.3g}"


def count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def million(number: int) -> str:
    for unit, name in ((10**9, "billion"), (10**6, "million")):
        if number >= unit:
            return f"{number / unit:.3g} {name}"
    return f"{number:,}"


def names(items: list[str]) -> str:
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}" if items else ""
