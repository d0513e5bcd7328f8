"""The top of the page: what was made, how big it is, how close to the original, where it ran, and whether it passed, in plain words."""

from __future__ import annotations

from pathlib import PurePath

from fewbits.reporting.page.contents import Made, Results, Verdict
from fewbits.reporting.page.markup import Html, code, joined, tag
from fewbits.reporting.page.words import count, kl, million, names, share, size

_LIMITS = {
    "max_kl": "KL divergence at most",
    "min_agreement": "share of equal next tokens at least",
    "max_ppl_ratio": "perplexity ratio at most",
}


def head(found: Results) -> Html:
    if found.demo is not None:
        return _of_demo(found)
    assert found.made is not None
    made = found.made
    return tag(
        "header",
        tag("p", "fewbits report", class_="overline"),
        tag("h1", title(found)),
        _state(made.verdict),
        tag("p", *_made_of(made), class_="lead"),
        *([tag("p", *_measured(made.verdict), class_="lead")] if made.verdict else ()),
        _figures(made),
    )


def title(found: Results) -> str:
    if found.demo is not None:
        return f"{count(len(found.files), 'file')} of the {found.demo} model"
    assert found.made is not None
    made = found.made
    name = made.source.name if made.source else PurePath(made.file).name
    nbytes = made.verdict.bytes if made.verdict else made.bytes
    return f"{name} in {size(nbytes)}"


def _state(verdict: Verdict | None) -> Html:
    if verdict is None:
        return _chip("open", "Not verified", "The file was written and not run: nothing is known of how it behaves.")
    if not verdict.passed:
        return _chip("failed", "Failed", f"{'; '.join(verdict.failures)}.")
    if not verdict.limits:
        return _chip("passed", "Ran", f"The file ran in {verdict.runtime}. No limit was set for it to pass or fail.")
    measured = {"max_kl": kl(verdict.kl), "min_agreement": f"{verdict.agreement:.4f}", "max_ppl_ratio": f"{verdict.ppl_ratio:.4f}"}
    asked = [
        f"{words} {value:g} (measured {measured[name]})"
        for name, words in _LIMITS.items()
        if (value := verdict.limits.get(name)) is not None
    ]
    return _chip("passed", "Passed", f"Asked for: {names(asked)}.")


def _chip(look: str, word: str, said: str) -> Html:
    return tag("p", tag("strong", word, class_=f"chip {look}"), " ", said, class_="state", id="verdict")


def _made_of(made: Made) -> list[str]:
    nbytes = made.verdict.bytes if made.verdict else made.bytes
    bits = f"{made.bits_per_weight:.2f} bits each"
    file = code(PurePath(made.file).name)
    if (of := made.source) is None:
        matrices = sum(weight.elements for weight in made.weights)
        return [file, f" holds {million(matrices)} weights in {bits}, {size(nbytes)} in all."]
    part = f"{share(nbytes / of.float_bytes, 0)} of the {size(of.float_bytes)} that the weights take in {of.float_format}"
    instead = f"{bits} instead of {8 * of.float_bytes / of.elements:.0f}"
    model = code(of.name)
    return [
        file,
        f" holds the {million(of.elements)} weights of ",
        model,
        f" ({of.architecture}) in {instead}. It takes {size(nbytes)}: {part}.",
    ]


def _measured(verdict: Verdict) -> list[str]:
    change = verdict.ppl_ratio - 1
    moved = f"{share(abs(change), 2)} {'higher' if change >= 0 else 'lower'}"
    certain = verdict.ppl_ratio_low > 1 or verdict.ppl_ratio_high < 1
    doubt = "" if certain else "; too small a change to be told from chance"
    return [
        f"It ran in {verdict.runtime} beside the original, on {verdict.tokens:,} tokens of text that it was not fitted to. ",
        f"Both choose the same next token in {100 * verdict.agreement:.1f} of 100 cases. ",
        f"Its perplexity is {moved} ({verdict.ppl:.2f} instead of {verdict.ppl_base:.2f}{doubt}).",
    ]


def _figures(made: Made) -> Html:
    verdict = made.verdict
    rows = [("Weights", size(made.bytes), f"{made.bits_per_weight:.3f} bits per weight")]
    if verdict:
        rows = [
            ("File", size(verdict.bytes), f"{verdict.bits_per_weight:.3f} bits per weight"),
            ("Same next token", share(verdict.agreement, 2), f"of {verdict.tokens:,}"),
            (
                "Perplexity",
                f"\u00d7 {verdict.ppl_ratio:.4f}",
                f"95 %: {verdict.ppl_ratio_low:.4f} to {verdict.ppl_ratio_high:.4f}",
            ),
            ("KL divergence", kl(verdict.kl), f"95 %: {kl(verdict.kl_low)} to {kl(verdict.kl_high)}"),
        ]
    if made.kl is not None:
        rows.append(("KL predicted", kl(made.kl), "before anything was run"))
    return _list(rows)


def _list(rows: list[tuple[str, str, str]]) -> Html:
    return tag(
        "dl",
        *(tag("div", tag("dt", name), tag("dd", tag("span", value, class_="value"), tag("small", note))) for name, value, note in rows),
        class_="figures",
    )


def _of_demo(found: Results) -> Html:
    runtimes = sorted({row.verdict.runtime for row in found.files})
    bad = [row for row in found.files if not (row.verdict.passed and row.agrees)]
    said = f"Every file ran in {names(runtimes)}, and each computed what its bytes say."
    failed = f"{names([row.file for row in bad])} did not pass."
    state = _chip("failed", "Failed", failed) if bad else _chip("passed", "Passed", said)
    lead = [
        f"The {found.demo} model was calibrated, measured and planned, and written as {count(len(found.files), 'file')}, from its float ",
        "weights down to the smallest. Each file was run in the runtime that it is meant for, beside the original in torch. ",
    ]
    looked_at = PurePath(found.made.file).name if found.made else ""
    for row in found.files:
        if row.file == looked_at:
            lead += [
                f"The parts below look at {looked_at}: in {size(row.verdict.bytes)} ",
                f"it chooses the same next token as the original in {100 * row.verdict.agreement:.1f} of 100 cases.",
            ]
    skipped = [tag("p", f"Not run: {line}", class_="missing") for line in found.skipped]
    figures = [_figures(found.made)] if found.made else []
    return tag(
        "header", tag("p", "fewbits report", class_="overline"), tag("h1", title(found)), state, tag("p", joined(lead), class_="lead"),
        *skipped, *figures,
    )  # fmt: skip
