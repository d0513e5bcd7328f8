"""How well the calibration text stands for what the model will be used on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fewbits.reporting.page.contents import CALIBRATED, Made, Results
from fewbits.reporting.page.markup import Html, behind, figure, prose, table, tag
from fewbits.reporting.page.reading import maybe, number, text, whole
from fewbits.reporting.page.sections import Section, missing
from fewbits.reporting.page.words import share

_TITLE = "The text that it was fitted to"


def section(found: Results) -> Section | None:
    if found.made is None:
        return None
    if found.made.coverage is None:
        before = any(each.what == CALIBRATED for each in found.made.hashes)
        nothing = "Nothing was calibrated: weights were rounded without looking at any text."
        section = missing("coverage", _TITLE, "Statistics were given, and not the text that they are of." if before else nothing)
        return replace(section, body=section.body + _notes(found.made))
    seen = found.made.coverage
    samples, tokens = whole(seen["samples"]), whole(seen["tokens"])
    sources = [(text(row["name"]), whole(row["samples"]), whole(row["tokens"]), number(row["share"])) for row in seen["sources"]]
    body: list[Html] = []
    warnings = [text(line) for line in (*seen["warnings"], *seen["notes"])]
    if warnings:
        body.append(tag("ul", *(tag("li", prose(line)) for line in warnings), class_="warnings"))
    body.append(_shares(seen, tokens, samples))
    rows = [(name, f"{count:,}", f"{size:,}", share(part)) for name, count, size, part in sources]
    if len(sources) > 1:
        body.append(figure("sources", "Share of the calibration tokens by source", "Where the calibration tokens come from."))
    body.append(
        behind("Sources as a table", table(("source", "samples", "tokens", "share"), rows, "Sources of the calibration text", (1, 2, 3)))
    )
    if (gone := maybe(seen["missing_in_evaluation"], dict)) and gone["most_frequent"]:
        tokens_of = [(text(row["text"]), str(whole(row["id"])), str(whole(row["count"]))) for row in gone["most_frequent"]]
        shown = table(("token", "id", "times in the evaluation"), tokens_of, "Tokens that calibration never saw", (1, 2))
        body.append(behind("The most frequent tokens that calibration never saw", shown))
    body += _notes(found.made)
    data: dict[str, Any] = {"sources": [{"name": name, "share": part} for name, _, _, part in sources[:20]]}
    return Section("coverage", _TITLE, _about(tokens, samples), tuple(body), data)


def _notes(made: Made) -> tuple[Html, ...]:
    """What happened to single weights: an expert that no token of the text was given to."""
    said = {f"{len(weights)} of {len(made.weights)} weights: {note}.": weights for note, weights in made.notes.items()}
    return tuple(behind(text, table(("weight",), [(name,) for name in weights], text)) for text, weights in said.items())


def _about(tokens: int, samples: int) -> str:
    seen = f"{tokens:,} tokens in {samples:,} samples"
    return f"Formats and codes were chosen by how the model behaves on {seen}. What is unlike them was not looked at."


def _shares(seen: Any, tokens: int, samples: int) -> Html:
    lengths = seen["lengths"]
    rows = [
        ("Tokens", f"{tokens:,}", f"{samples:,} samples of {whole(lengths['median']):,} (median)"),
        ("Vocabulary seen", share(number(seen["vocabulary_seen"])), f"of {whole(seen['vocabulary']):,} tokens"),
    ]
    if gone := maybe(seen["missing_in_evaluation"], dict):
        rows.append(("Never seen", share(number(gone["occurrences"]), 2), "of the tokens that it was judged on"))
    if leak := maybe(seen["overlap"], dict):
        longest = whole(leak["longest"])
        rows.append(
            ("Shared with the test", share(number(leak["share"]), 2), f"of runs of {whole(leak['n'])} tokens; the longest has {longest}")
        )
    cells = (tag("div", tag("dt", name), tag("dd", tag("span", value, class_="value"), tag("small", note))) for name, value, note in rows)
    return tag("dl", *cells, class_="figures")
