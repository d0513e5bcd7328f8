"""A few answers of the file beside those of its source, to read."""

from __future__ import annotations

from fewbits.reporting.page.markup import Section, missing, table
from fewbits.reporting.page.words import count
from fewbits.reporting.schema import Results

_TITLE = "In its own words"


def section(made: Results) -> Section | None:
    """None: nobody asked for any."""
    if not made.answers:
        why = made.left_out.get("answers")
        return missing("answers", _TITLE, f"No answers were made: {why}.") if why else None
    rows = [(f"{each.prompt} \u2026", each.source, each.file, count(each.same_tokens, "token")) for each in made.answers]
    about = (
        "Both go on from the same beginning of a text that neither was fitted to, with the likeliest token each time. Where two tokens are "
    )
    about += "nearly as likely, a small difference changes the rest of a sentence: different words are not yet worse ones."
    columns = ("it begins", "the source goes on", "the file goes on", "the same up to")
    return Section("answers", _TITLE, about, (table(columns, rows, "Answers side by side"),))
