"""A part of the page: its place in the list of contents, its text, and the figures that its pictures are drawn from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fewbits.reporting.page.markup import Html, tag


@dataclass(frozen=True)
class Section:
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
