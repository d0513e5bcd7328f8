"""Every command and hash that is needed to make the same file again."""

from __future__ import annotations

from fewbits.reporting.page.contents import Results
from fewbits.reporting.page.markup import Html, prose, table, tag
from fewbits.reporting.page.sections import Section
from fewbits.reporting.page.words import names


def section(found: Results) -> Section | None:
    made = found.made
    if made is None or not (made.commands or made.hashes):
        return None
    body: list[Html] = [tag("pre", tag("code", "\n".join(made.commands)), tabindex=0)] if made.commands else []
    hashes = [(prose(each.what), each.sha256, "" if each.bytes is None else f"{each.bytes:,}") for each in made.hashes]
    body.append(table(("what", "sha256", "bytes"), hashes, "Hashes", (2,)))
    body.append(table(("what", "version"), list(made.versions.items()), "Versions"))
    if made.machine:
        body.append(table(("what", ""), list(made.machine.items()), "The machine that it was made on"))
    if made.methods:
        chosen = [f"{count} by {name}" for name, count in sorted(made.methods.items(), key=lambda item: -item[1])]
        body.append(tag("p", prose(f"Codes of the weights were chosen: {names(chosen)}.")))
    about = f"The same input gives the same bytes. The hashes say whether it is the same input. {made.caveat}".strip()
    return Section("again", "How to make it again", about, tuple(body))
