"""How well the calibration text stands for what the model will be used on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fewbits.reporting.page.checked_json import number, text, whole
from fewbits.reporting.page.markup import Html, Section, behind, figure, figures, missing, prose, table, tag
from fewbits.reporting.page.words import share
from fewbits.reporting.schema import CALIBRATED, Results

_TITLE = "The text that it was fitted to"


def section(made: Results) -> Section:
    if (coverage := made.coverage) is None:
        before = any(each.what == CALIBRATED for each in made.reproduction.hashes)
        nothing = "Nothing was calibrated: weights were rounded without looking at any text."
        section = missing("coverage", _TITLE, "Statistics were given, and not the text that they are of." if before else nothing)
        return replace(section, body=section.body + _notes(made))
    body: list[Html] = []
    if warnings := (*coverage["warnings"], *coverage["notes"]):
        body.append(tag("ul", *(tag("li", prose(text(line))) for line in warnings), class_="warnings"))
    body.append(_shares(coverage))
    sources = [(text(row["name"]), whole(row["samples"]), whole(row["tokens"]), number(row["share"])) for row in coverage["sources"]]
    rows = [(name, f"{samples:,}", f"{size:,}", share(part)) for name, samples, size, part in sources]
    if len(rows) > 1:
        body.append(figure("sources", "Share of the calibration tokens by source", "Where the calibration tokens come from."))
    listed = table(("source", "samples", "tokens", "share"), rows, "Sources of the calibration text", (1, 2, 3))
    body.append(behind("Sources as a table", listed))
    if len(kinds := coverage.get("domains") or ()) > 1:
        rows = [
            (text(row["name"]), f"{whole(row['samples']):,}", f"{whole(row['tokens']):,}", share(number(row["share"]))) for row in kinds
        ]
        listed = table(("kind", "samples", "tokens", "share"), rows, "Kinds of the calibration text", (1, 2, 3))
        body.append(behind("Kinds of calibration text as a table", listed))
    if (unseen := coverage["missing_in_evaluation"]) and unseen["most_frequent"]:
        tokens = [(text(row["text"]), str(whole(row["id"])), str(whole(row["count"]))) for row in unseen["most_frequent"]]
        listed = table(("token", "id", "times in the evaluation"), tokens, "Tokens that calibration never saw", (1, 2))
        body.append(behind("The most frequent tokens that calibration never saw", listed))
    amount = f"{whole(coverage['tokens']):,} tokens in {whole(coverage['samples']):,} samples"
    about = f"Formats and codes were chosen by how the model behaves on {amount}. What is unlike them was not looked at."
    data = {"sources": [{"name": name, "share": part} for name, _, _, part in sources[:20]]}
    return Section("coverage", _TITLE, about, (*body, *_notes(made)), data)


def _notes(made: Results) -> tuple[Html, ...]:
    """What happened to single weights: an expert that no token of the text was given to."""
    said = {f"{len(weights)} of {len(made.plan.weights)} weights: {note}.": weights for note, weights in made.notes.items()}
    return tuple(behind(text, table(("weight",), [(name,) for name in weights], text)) for text, weights in said.items())


def _shares(coverage: Mapping[str, Any]) -> Html:
    samples = f"{whole(coverage['samples']):,} samples of {whole(coverage['lengths']['median']):,} (median)"
    rows = [
        ("Tokens", f"{whole(coverage['tokens']):,}", samples),
        ("Vocabulary seen", share(number(coverage["vocabulary_seen"])), f"of {whole(coverage['vocabulary']):,} tokens"),
    ]
    if unseen := coverage["missing_in_evaluation"]:
        rows.append(("Never seen", share(number(unseen["occurrences"]), 2), "of the tokens that it was judged on"))
    if leak := coverage["overlap"]:
        passages = f"of runs of {whole(leak['n'])} tokens; the longest has {whole(leak['longest'])}"
        rows.append(("Shared with the test", share(number(leak["share"]), 2), passages))
    return figures(rows)
