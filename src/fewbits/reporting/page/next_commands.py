"""How the file is run: the next command, to copy."""

from __future__ import annotations

from fewbits.reporting.page.markup import Html, Section, tag
from fewbits.reporting.schema import Results


def section(made: Results) -> Section | None:
    """None: an older results.json, which does not say."""
    how = made.how_to_run
    if how is None or not how.commands:
        return None
    body: list[Html] = []
    for command in how.commands:
        body.append(tag("p", f"{command.what[:1].upper()}{command.what[1:]}:"))
        body.append(tag("pre", tag("code", command.text), tabindex=0))
    room = f" The machine that made the file has room for a context of {how.context:,} tokens." if how.context else ""
    return Section("run", "How to run it", f"Commands to copy.{room}", tuple(body))
