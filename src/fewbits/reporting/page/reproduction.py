"""Every command and hash that is needed to make the same file again."""

from __future__ import annotations

from collections import Counter

from fewbits.reporting.page.checked_json import text
from fewbits.reporting.page.markup import Html, Section, prose, table, tag
from fewbits.reporting.page.words import names
from fewbits.reporting.schema import Results


def section(made: Results) -> Section | None:
    again = made.reproduction
    if not (again.commands or again.hashes):
        return None
    body: list[Html] = [tag("pre", tag("code", "\n".join(again.commands)), tabindex=0)] if again.commands else []
    hashes = [(prose(each.what), each.sha256, "" if each.bytes is None else f"{each.bytes:,}") for each in again.hashes]
    body.append(table(("what", "sha256", "bytes"), hashes, "Hashes", (2,)))
    body.append(table(("what", "version"), list(again.versions.items()), "Versions"))
    if again.machine:
        body.append(table(("what", ""), [(name, str(value)) for name, value in again.machine.items()], "The machine that it was made on"))
    if methods := Counter(text(row.get("method", "cast")) for row in made.outcomes.values()):
        body.append(tag("p", prose(f"Codes of the weights were chosen: {names([f'{n} by {name}' for name, n in methods.most_common()])}.")))
    about = f"The same input gives the same bytes. The hashes say whether it is the same input. {again.caveat}".strip()
    return Section("again", "How to make it again", about, tuple(body))
