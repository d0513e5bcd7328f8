"""The page of a comparison: anybody's files of one model, by size against measured error, and which of them nothing beats."""

from __future__ import annotations

import math
from collections.abc import Iterator

from fewbits.reporting.closeness import closeness
from fewbits.reporting.page.markup import Html, Section, code, figure, figures, legend, prose, table, tag
from fewbits.reporting.page.words import count, kl, names, share, size
from fewbits.verification.comparison.figures import ComparedFile, Comparison, Difference


def title(shown: Comparison) -> str:
    return f"{count(len(shown.compared), 'file')} of {shown.model}"


def head(shown: Comparison) -> Html:
    frontier = [file.name for file in shown.compared if file.on_frontier]
    best = next((file for file in shown.compared if file.on_frontier and file.to_best is None), None)
    lead = [
        f"Each file ran in the runtime that it is meant for, beside {shown.reference or 'the original'} in torch, on the same ",
        f"{shown.tokens:,} tokens. On the frontier, where no other file is both smaller and closer: {names(frontier) or 'none'}.",
    ]
    cells = [("Files", str(len(shown.compared)), f"{len(frontier)} on the frontier")]
    if best:
        cells.append(("Closest", kl(best.verdict.kl_mean), f"KL of {best.name}, {size(best.verdict.bytes)}"))
        least = min(shown.compared, key=lambda file: file.verdict.bytes)
        cells.append(("Smallest", size(least.verdict.bytes), least.name))
    return tag(
        "header", tag("p", "fewbits comparison", class_="overline"), tag("h1", title(shown)), tag("p", *lead, class_="lead"),
        *(tag("p", "Not run: ", code(each.file), ": ", prose(each.reason), class_="missing") for each in shown.refused), figures(cells),
    )  # fmt: skip


def sections(shown: Comparison) -> Iterator[Section | None]:
    yield _frontier(shown)
    yield _differences(shown)
    yield _kinds(shown)


def _frontier(shown: Comparison) -> Section:
    points = [
        {
            "name": file.name, "runtime": file.verdict.runtime, "bytes": file.verdict.bytes, "bits": file.verdict.bits_per_weight,
            "kl": file.verdict.kl_mean, "same": file.verdict.top1_agreement, "planned": file.on_frontier,
        }
        for file in shown.compared if math.isfinite(file.verdict.kl_mean) and file.verdict.kl_mean > 0
    ]  # fmt: skip
    runtimes = dict.fromkeys(str(point["runtime"]) for point in points)
    keys = [(f"series-{number}", name) for number, name in enumerate(runtimes, 1)]
    keys += [("diamond", "on the frontier"), ("ring", "beaten by a file that is no larger")]
    columns = (
        "file", "frontier", "size", "bits/weight", "KL", "95 %", "same token", "perplexity ratio", "tokens/s here", "how close", "runtime",
    )  # fmt: skip
    body: list[Html] = []
    if points:
        caption = "Each mark is a file that was run: bytes of the file against its KL divergence, on a logarithmic scale."
        body.append(figure("files", "Size of each file against its measured KL divergence", caption, legend(keys)))
    body.append(table(columns, [_row(file) for file in shown.compared], "Every file, as measured in its runtime", (2, 3, 4, 5, 6, 7, 8)))
    about = f"The further down and to the left, the better. Speeds are of generating on one machine ({shown.machine}), as busy as it was."
    return Section("files", "All files", about, tuple(body), {"files": points})


def _row(file: ComparedFile) -> tuple[str, ...]:
    verdict, how_close = file.verdict, closeness(file.verdict)
    speed = "" if file.tokens_per_second is None else f"{file.tokens_per_second:.1f}"
    return (
        file.name, "yes" if file.on_frontier else "no", size(verdict.bytes), f"{verdict.bits_per_weight:.2f}", kl(verdict.kl_mean),
        "{} to {}".format(*map(kl, verdict.kl_ci95)), share(verdict.top1_agreement, 2), f"{verdict.ppl_ratio:.4f}", speed,
        "; ".join(verdict.failures) or (how_close.word.lower() if how_close else ""), verdict.runtime,
    )  # fmt: skip


def _differences(shown: Comparison) -> Section | None:
    rows = []
    for file in shown.compared:
        for what, apart in (("the closest of all", file.to_best), ("no larger, and closer", file.beaten_by)):
            if apart:
                rows.append((file.name, apart.to, what, kl(apart.kl), _interval(apart), "yes" if apart.sure else "no"))
    if not rows:
        return None
    columns = ("file", "beside", "which is", "KL above it", "95 %, paired", "more than chance")
    about = (
        "All files read the same tokens, so that a difference is known better than either figure: each interval is of the difference at "
    )
    about += "every token, resampled in pairs."
    return Section("differences", "Which is closer", about, (table(columns, rows, "Differences of KL, in pairs", (3, 4)),))


def _interval(apart: Difference) -> str:
    return "{:.5f} to {:.5f}".format(*apart.ci95)


def _kinds(shown: Comparison) -> Section | None:
    """None: the text was of one kind."""
    kinds = [each.name for each in shown.compared[0].verdict.domains] if shown.compared else []
    if not kinds:
        return None
    rows = []
    for file in shown.compared:
        known = {each.name: each for each in file.verdict.domains}
        cells = (f"{kl(known[kind].kl_mean)} ({kl(known[kind].kl_ci95[0])} to {kl(known[kind].kl_ci95[1])})" for kind in kinds)
        rows.append((file.name, *cells))
    about = prose(f"KL divergence with its 95 % interval on {names([f'`{kind}`' for kind in kinds])}.")
    return Section("kinds", "On each kind of text", about, (table(("file", *kinds), rows, "KL by kind of text", range(1, len(kinds) + 1)),))
