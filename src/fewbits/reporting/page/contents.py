"""What a page is made of: one results.json, and the benchmarks given with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from fewbits.reporting.page import checked_json
from fewbits.reporting.schema import Demonstration, Results
from fewbits.store import untrusted
from fewbits.verification.comparison.figures import Comparison


class Mark(NamedTuple):
    """A plan that is not of the frontier, beside it in the picture."""

    name: str
    bits_per_weight: float
    kl: float


@dataclass(frozen=True)
class Contents:
    made: Results | None  # None: a comparison of files, or a demonstration that looks at none of its files
    demo: Demonstration | None = None
    peers: tuple[Mark, ...] = ()  # measured on the same model, by `fewbits bench plans`
    bench: Mapping[str, Any] | None = None  # of kernels
    comparison: Comparison | None = None  # of files that anybody made


def read(path: Path) -> Contents:
    return checked_json.guarded(path, lambda: _parsed(untrusted.read_json(path, checked_json.HINT, untrusted.TABLES)))


def _parsed(content: Any) -> Contents:
    if "compared" in content:
        return Contents(None, comparison=checked_json.read(Comparison, content))
    if "rows" in content:
        demo = checked_json.read(Demonstration, content)
        return Contents(demo.detail, demo)
    if "cosine_mean" in (content.get("verdict") or {}):  # of an encoder, which gives no logits: the page has no part for it
        content = content | {"verdict": None}
    return Contents(checked_json.read(Results, content))
