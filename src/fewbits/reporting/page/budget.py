"""Where the error comes from: predicted beside measured, how it grows from layer to layer, and the weights that cost most."""

from __future__ import annotations

import math

from fewbits.reporting.page.markup import Html, Section, behind, figure, legend, table, tag
from fewbits.reporting.page.words import kl, share
from fewbits.reporting.schema import Results
from fewbits.verification.forecast.block_errors import BlockError

_COSTLY = 16


def section(made: Results) -> Section | None:
    ranked = sorted(((weight.kl, name, weight.format) for name, weight in made.plan.weights.items() if weight.kl), key=lambda row: -row[0])
    total, costly = math.fsum(cost for cost, _, _ in ranked), ranked[:_COSTLY]
    blocks = made.accumulation.rows if made.accumulation else ()
    body = [*_compared(made), *_growth(made)]
    if costly:
        worst = f"{costly[0][1]} costs most, {share(costly[0][0] / total)} of the predicted error"
        rows = [(name, fmt, kl(cost), share(cost / total)) for cost, name, fmt in costly]
        body.append(figure("costly", worst, f"The {len(costly)} weights of the largest predicted KL, and their formats."))
        listed = table(("weight", "format", "predicted KL", "share"), rows, "What costs most", (2, 3))
        body.append(behind("These weights as a table", listed))
    if not body:
        return None
    return Section(
        "error",
        "Where the error comes from",
        "KL divergence says how far the probabilities of the next token have moved, in nats; 0 is no change. What weights cost adds up.",
        tuple(body),
        {
            "growth": [
                {"block": _name(row), "predicted": row.predicted_so_far, "measured": row.measured_so_far, "hidden": row.hidden_error}
                for row in blocks
            ],
            "costly": [{"name": name, "format": fmt, "kl": cost} for cost, name, fmt in costly],
        },
    )


def _compared(made: Results) -> list[Html]:
    v, predicted = made.verdict, made.plan.predicted_for(made.verdict)
    if v is None or not predicted:
        return []
    measured = f"{kl(v.kl_mean)}, {v.kl_mean / predicted:.2f} times that"
    said = f"Predicted before anything was run: {kl(predicted)}. Measured in {v.runtime}: {measured}"
    floor = "" if v.kl_floor is None else f" (of it {kl(v.kl_floor)} is the runtime's own, seen with the unquantized file)"
    return [tag("p", f"{said}{floor}. For 1 token in 100 it is above {kl(v.kl_p99)}, at worst {kl(v.kl_max)}.")]


def _growth(made: Results) -> list[Html]:
    if made.accumulation is None or not made.accumulation.rows:
        why = made.left_out.get("accumulation")
        return [tag("p", f"How errors add up from layer to layer was not measured: {why}.", class_="missing")] if why else []
    tokens, blocks = made.accumulation.tokens, made.accumulation.rows
    caption = (
        f"KL divergence with everything up to a layer quantized and the rest in float, on {tokens:,} tokens, in torch. "
        "A step up is what that layer adds."
    )
    label = f"The measured KL grows from {kl(blocks[0].measured_so_far)} to {kl(blocks[-1].measured_so_far)} over the layers"
    rows = [(_name(row), kl(row.predicted_so_far), kl(row.measured_so_far), f"{row.hidden_error:.1e}") for row in blocks]
    columns = ("up to layer", "predicted KL", "measured KL", "error of its output, relative")
    return [
        figure("growth", label, caption, legend((("measured", "measured"), ("predicted", "predicted")))),
        behind("This growth as a table", table(columns, rows, "How errors add up", (1, 2, 3))),
    ]


def _name(row: BlockError) -> str:
    return "embedding, output" if row.block < 0 else str(row.block)
