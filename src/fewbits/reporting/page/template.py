"""The page as one file: style, scripts, figures and text in it, and a policy that lets nothing else in."""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Iterator
from functools import cache
from importlib import resources
from typing import Any

from fewbits.reporting.page import (
    answers,
    budget,
    comparison,
    coverage,
    domains,
    files,
    frontier,
    kernels,
    memory,
    next_commands,
    reproduction,
    values,
    verdict,
)  # fmt: skip
from fewbits.reporting.page.contents import Contents
from fewbits.reporting.page.markup import Html, Section, data_block, joined, tag

_SCRIPTS = ("d3.min.js", "plot.umd.min.js", "charts.js", "page.js")  # the two libraries, and what is ours


def render(shown: Contents) -> str:
    sections = [section for section in _sections(shown) if section]
    data: dict[str, Any] = {}
    for section in sections:
        data |= section.data
    contents = tag("nav", tag("ul", *(tag("li", tag("a", s.title, href=f"#{s.id}")) for s in sections)), aria_label="Contents")
    toggle = tag("button", "Dark", type="button", id="theme")
    body = tag(
        "body",
        tag("a", "To the contents", href="#main", class_="skip"),
        toggle,
        tag("main", _head(shown), contents, *(section.html() for section in sections), id="main"),
        tag("footer", tag("p", "Made by fewbits from one results.json. This file needs nothing else and asks nothing of the network.")),
        data_block(_finite(data)),
        *(Html(f"<script>{_asset(name)}</script>") for name in _SCRIPTS),
    )
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_policy()),
        tag("meta", name_="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name_="color-scheme", content="light dark"),
        tag("title", f"{_title(shown)}: fewbits report"),
        Html(f"<style>{_asset('style.css')}</style>"),
    )
    return joined([Html("<!doctype html>\n"), tag("html", head, body, lang="en"), Html("\n")])


def _head(shown: Contents) -> Html:
    return verdict.head(shown) if shown.comparison is None else comparison.head(shown.comparison)


def _title(shown: Contents) -> str:
    return verdict.title(shown) if shown.comparison is None else comparison.title(shown.comparison)


def _sections(shown: Contents) -> Iterator[Section | None]:
    if shown.comparison:
        yield from comparison.sections(shown.comparison)
    if shown.demo:
        yield files.section(shown.demo)
    if made := shown.made:
        yield next_commands.section(made)
        yield answers.section(made)
        yield domains.section(made)
        yield frontier.section(made, shown.peers)
        yield from (each.section(made) for each in (budget, values, coverage, memory))
        yield kernels.section(made, shown.bench)
        yield reproduction.section(made)


@cache
def _asset(name: str) -> str:
    text = (resources.files(__package__) / "assets" / name).read_text(encoding="utf-8")
    assert "</script" not in text and "</style" not in text, f"{name} would end its own element"
    return text


@cache
def _policy() -> str:
    """Only the very scripts of this page run, by their hashes: not one that text smuggled in, and no attribute like onerror."""
    digests = (base64.b64encode(hashlib.sha256(_asset(name).encode()).digest()).decode() for name in _SCRIPTS)
    scripts = " ".join(f"'sha256-{digest}'" for digest in digests)
    return f"default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def _finite(value: Any) -> Any:
    """JSON has no word for what is not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    return [_finite(entry) for entry in value] if isinstance(value, list | tuple) else value
