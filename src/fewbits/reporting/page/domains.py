"""How far the file is from its source on each kind of text that it was judged on."""

from __future__ import annotations

from collections.abc import Mapping

from fewbits.reporting.page.markup import Section, behind, figure, prose, table
from fewbits.reporting.page.words import kl, names, share
from fewbits.reporting.schema import Results

_TITLE = "On each kind of text"


def section(made: Results) -> Section | None:
    """None: the text was of one kind."""
    verdict, forecast = made.verdict, made.plan.predicted_kl_by_kind
    if verdict is None or not verdict.domains:
        return _predicted(forecast) if len(forecast) > 1 and verdict is None else None
    ranked = sorted(verdict.domains, key=lambda each: -each.kl_mean)
    worst, best = ranked[0], ranked[-1]
    said = f"The file is furthest from its source on `{worst.name}` (KL {kl(worst.kl_mean)}), "
    said += f"closest on `{best.name}` ({kl(best.kl_mean)})."
    if others := verdict.perhaps_worse:
        said += f" {names([f'`{name}`' for name in others])} may be as bad as the worst: the intervals overlap."
    if worst.name in forecast:
        said += f" Predicted there was {kl(forecast[worst.name])}."
    said += " `--weights` spends the bits for some kinds more than for others."
    picture = figure(
        "domains",
        f"Mean KL divergence by kind of text, from {kl(worst.kl_mean)} on {worst.name} to {kl(best.kl_mean)} on {best.name}.",
        "Mean KL divergence by kind of text, with its 95 % interval as a line; lower is closer.",
    )
    columns = ("kind of text", "tokens", "KL predicted", "KL", "95 %", "runtime's own", "perplexity ratio", "same next token")
    rows = [
        (
            each.name, f"{each.tokens:,}", kl(forecast.get(each.name)),
            kl(each.kl_mean), "{} to {}".format(*map(kl, each.kl_ci95)), kl(each.kl_floor),
            "{:.4f} ({:.4f} to {:.4f})".format(each.ppl_ratio, *each.ppl_ratio_ci95), share(each.top1_agreement, 2),
        )
        for each in ranked
    ]  # fmt: skip
    listed = behind("Kinds of text as a table", table(columns, rows, "Figures by kind of text", tuple(range(1, len(columns)))))
    data = [
        {"name": each.name, "kl": each.kl_mean, "low": each.kl_ci95[0], "high": each.kl_ci95[1], "value": kl(each.kl_mean)}
        for each in ranked
    ]
    return Section("domains", _TITLE, prose(said), (picture, listed), {"domains": data})


def _predicted(forecast: Mapping[str, float]) -> Section:
    """The file was not run: what its plan is expected to cost."""
    ranked = sorted(forecast.items(), key=lambda item: -item[1])
    said = f"The file was not run. Its plan is predicted to be furthest from the source on `{ranked[0][0]}`, closest on `{ranked[-1][0]}`."
    rows = [(name, kl(predicted)) for name, predicted in ranked]
    return Section("domains", _TITLE, prose(said), (table(("kind of text", "KL predicted"), rows, "Forecast by kind of text", (1,)),), {})
