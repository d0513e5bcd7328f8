"""The top of the page: what was made, how big it is, how close to the original, where it ran, and whether it passed, in plain words."""

from __future__ import annotations

from pathlib import PurePath

from fewbits.reporting.closeness import closeness
from fewbits.reporting.page.contents import Contents
from fewbits.reporting.page.markup import Html, code, figures, joined, tag
from fewbits.reporting.page.words import count, kl, million, names, share, size
from fewbits.reporting.schema import Demonstration, Results
from fewbits.verification.metrics import Verdict


def head(shown: Contents) -> Html:
    if shown.demo is not None:
        return _of_demo(shown, shown.demo)
    assert shown.made is not None
    made = shown.made
    return tag(
        "header",
        tag("p", "fewbits report", class_="overline"),
        tag("h1", title(shown)),
        _state(made.verdict),
        tag("p", *_made_of(made), class_="lead"),
        *([tag("p", *_measured(made.verdict), class_="lead")] if made.verdict else ()),
        *(tag("p", f"{remark}.", class_="lead") for remark in made.remarks),
        _figures(made),
    )


def title(shown: Contents) -> str:
    if shown.demo is not None:
        return f"{count(len(shown.demo.rows), 'file')} of the {shown.demo.model} model"
    assert shown.made is not None
    made = shown.made
    name = made.source.name if made.source else PurePath(made.file).name
    nbytes = made.verdict.bytes if made.verdict else made.plan.bytes
    return f"{name} in {size(nbytes)}"


def _state(verdict: Verdict | None) -> Html:
    if verdict is None:
        return _chips(("open", "Not verified", "The file was written and not run: nothing is known of how it behaves."))
    how_close = closeness(verdict)
    close = [(how_close.look, how_close.word, f"{_capital(how_close.said)}.")] if how_close else []
    if not verdict.passed:
        return _chips(("failed", "Failed", f"{'; '.join(verdict.failures)}."), *close)
    limits = (
        (verdict.thresholds.max_kl, "KL divergence at most", kl(verdict.kl_mean)),
        (verdict.thresholds.min_agreement, "share of equal next tokens at least", f"{verdict.top1_agreement:.4f}"),
        (verdict.thresholds.max_ppl_ratio, "perplexity ratio at most", f"{verdict.ppl_ratio:.4f}"),
    )
    if asked := [f"{words} {limit:g} (measured {measured})" for limit, words, measured in limits if limit is not None]:
        return _chips(("passed", "Passed", f"Asked for: {names(asked)}."), *close)
    return _chips(*close)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _chips(*shown: tuple[str, str, str]) -> Html:
    """Each a coloured word and a sentence."""
    parts = [part for look, word, said in shown for part in (tag("strong", word, class_=f"chip {look}"), f" {said} ")]
    return tag("p", *parts, class_="state", id="verdict")


def _made_of(made: Results) -> list[str]:
    nbytes = made.verdict.bytes if made.verdict else made.plan.bytes
    bits = f"{made.plan.bits_per_weight:.2f} bits each"
    file = code(PurePath(made.file).name)
    if (of := made.source) is None:
        return [file, f" holds {million(made.plan.elements)} weights in {bits}, {size(nbytes)} in all."]
    part = f"{share(nbytes / of.float_bytes, 0)} of the {size(of.float_bytes)} that the weights take in {of.float_format}"
    instead = f"{bits} instead of {8 * of.float_bytes / of.elements:.3g}"
    takes = f" ({of.architecture}) in {instead}. It takes {size(nbytes)}: {part}."
    return [file, f" holds the {million(of.elements)} weights of ", code(of.name), takes]


def _measured(verdict: Verdict) -> list[str]:
    change = verdict.ppl_ratio - 1
    moved = f"{share(abs(change), 2)} {'higher' if change >= 0 else 'lower'}"
    low, high = verdict.ppl_ratio_ci95
    doubt = "" if low > 1 or high < 1 else "; too small a change to be told from chance"
    return [
        f"It ran in {verdict.runtime} beside {verdict.reference or 'the original'}, ",
        f"on {verdict.tokens:,} tokens of text that it was not fitted to. ",
        f"Both choose the same next token in {100 * verdict.top1_agreement:.1f} of 100 cases. ",
        f"Its perplexity is {moved} ({verdict.ppl:.2f} instead of {verdict.ppl_base:.2f}{doubt}).",
    ]


def _figures(made: Results) -> Html:
    verdict = made.verdict
    rows = [("Weights", size(made.plan.bytes), f"{made.plan.bits_per_weight:.3f} bits per weight")]
    if verdict:
        rows = [
            ("File", size(verdict.bytes), f"{verdict.bits_per_weight:.3f} bits per weight"),
            ("Same next token", share(verdict.top1_agreement, 2), f"of {verdict.tokens:,}"),
            ("Perplexity", f"\u00d7 {verdict.ppl_ratio:.4f}", "95 %: {:.4f} to {:.4f}".format(*verdict.ppl_ratio_ci95)),
            ("KL divergence", kl(verdict.kl_mean), "95 %: {} to {}".format(*map(kl, verdict.kl_ci95))),
        ]
    if (predicted := made.plan.predicted_for(verdict)) is not None:
        rows.append(("KL predicted", kl(predicted), "before the file was made"))
    return figures(rows)


def _of_demo(shown: Contents, demo: Demonstration) -> Html:
    runtimes = sorted({row.runtime for row in demo.rows})
    bad = [row for row in demo.rows if not (row.passed and row.crosscheck["agrees"])]
    said = f"Every file ran in {names(runtimes)}, and each computed what its bytes say."
    failed = f"{names([row.file for row in bad])} did not pass."
    state = _chips(("failed", "Failed", failed) if bad else ("passed", "Passed", said))
    lead = [
        f"The {demo.model} model was calibrated, measured and planned, and written as {count(len(demo.rows), 'file')}, from its float ",
        "weights down to the smallest. Each file was run in the runtime that it is meant for, beside the original in torch. ",
    ]
    looked_at = PurePath(shown.made.file).name if shown.made else ""
    for row in demo.rows:
        if row.file == looked_at:
            lead += [
                f"The parts below look at {looked_at}: in {size(row.bytes)} ",
                f"it chooses the same next token as the original in {100 * row.top1_agreement:.1f} of 100 cases.",
            ]
    skipped = [tag("p", f"Not run: {line}", class_="missing") for line in demo.skipped]
    return tag(
        "header", tag("p", "fewbits report", class_="overline"), tag("h1", title(shown)), state, tag("p", joined(lead), class_="lead"),
        *skipped, _figures(shown.made) if shown.made else None,
    )  # fmt: skip
