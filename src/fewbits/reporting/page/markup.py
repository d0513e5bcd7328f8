"""HTML that cannot be broken into: whatever is not `Html` already is text, and text is escaped."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

_VOID = {"input", "meta", "br", "hr"}


class Html(str):
    """Made by the functions here alone. An f-string with one in it is plain text again, and is escaped."""

    __slots__ = ()


def tag(name: str, *children: str | None, **attributes: str | int | bool | None) -> Html:
    """`class_` for class, `data_chart` for data-chart; True is an attribute without a value, None and False are none."""
    parts = [name]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        spelled = key.rstrip("_").replace("_", "-")
        parts.append(spelled if value is True else f'{spelled}="{escape(str(value))}"')
    opening = f"<{' '.join(parts)}>"
    return Html(opening if name in _VOID else f"{opening}{joined(children)}</{name}>")


def joined(children: Iterable[str | None]) -> Html:
    return Html("".join(child if isinstance(child, Html) else escape(child) for child in children if child is not None))


def code(text: str) -> Html:
    return tag("code", text)


def prose(text: str) -> Html:
    """Text with `names` in it, as messages have them."""
    pieces = text.split("`")
    if len(pieces) % 2 == 0:  # one stands alone: it is a character like any other
        return joined([text])
    return joined(code(piece) if number % 2 else piece for number, piece in enumerate(pieces))


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], caption: str, numbers: Sequence[int] = ()) -> Html:
    """`numbers`: columns that are set to the right. The first column names its row."""
    look = ["number" if index in numbers else None for index in range(len(columns))]
    head = tag("tr", *(tag("th", name, scope="col", class_=look[index]) for index, name in enumerate(columns)))
    body = []
    for row in rows:
        cells = [tag("th", row[0], scope="row", class_=look[0])]
        cells += [tag("td", cell, class_=look[index]) for index, cell in enumerate(row[1:], 1)]
        body.append(tag("tr", *cells))
    inner = tag("table", tag("caption", caption), tag("thead", head), tag("tbody", *body))
    return tag("div", inner, class_="scroll", tabindex=0, role="region", aria_label=caption)


def figures(rows: Iterable[tuple[str, str, str]]) -> Html:
    """(name, value, what it is of): large numbers side by side."""
    cells = (tag("div", tag("dt", name), tag("dd", tag("span", value, class_="value"), tag("small", note))) for name, value, note in rows)
    return tag("dl", *cells, class_="figures")


def behind(summary: str, *children: str | None) -> Html:
    """The figures that a picture shows, for those who want or need them as text."""
    return tag("details", tag("summary", summary), *children)


def figure(chart: str, label: str, caption: str, *more: str | None, said: str | None = None) -> Html:
    """A place for a picture: the script draws into it. `label` says what is to be seen to those who do not see it; `said` is the id of a
    caption that changes with the picture."""
    place = tag("div", tag("p", "This picture is drawn by a script. Its figures are in the table below.", class_="unseen"),
                class_="plot", data_chart=chart, role="img", aria_label=label)  # fmt: skip
    return tag("figure", place, tag("figcaption", caption, id=said, aria_live="polite" if said else None), *more)


def legend(keys: Iterable[tuple[str, str]]) -> Html:
    """(look, what it stands for)"""
    return tag("ul", *(tag("li", tag("i", class_=f"key {look}"), said) for look, said in keys), class_="legend")


def data_block(values: object) -> Html:
    """JSON inside of HTML: with `<`, `>` and `&` spelled as escapes, nothing in it can end the element or begin another."""
    text = json.dumps(values, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Html(f'<script type="application/json" id="data">{text}</script>')


@dataclass(frozen=True)
class Section:
    """A part of the page: its place in the list of contents, its text, and the figures that its pictures are drawn from."""

    id: str
    title: str
    about: Html | str  # one or two sentences: what is to be seen, and how to read it
    body: tuple[Html, ...]
    data: Mapping[str, Any] = field(default_factory=dict)  # by name of the chart

    def html(self) -> Html:
        heading = tag("h2", self.title, id=f"{self.id}-title")
        return tag("section", heading, tag("p", self.about, class_="about"), *self.body, id=self.id, aria_labelledby=f"{self.id}-title")


def missing(id: str, title: str, why: str) -> Section:
    return Section(id, title, "", (tag("p", why, class_="missing"),))
