"""Where the error comes from: predicted beside measured, how it grows from layer to layer, and the weights that cost most."""

from __future__ import annotations

import math

from fewbits.reporting.page.contents import Made, Results
from fewbits.reporting.page.markup import Html, behind, figure, legend, table, tag
from fewbits.reporting.page.sections import Section
from fewbits.reporting.page.words import kl, share

_COSTLY = 16


def section(found: Results) -> Section | None:
    made = found.made
    if made is None:
        return None
    ranked = sorted((weight for weight in made.weights if weight.kl), key=lambda weight: -(weight.kl or 0.0))
    total = math.fsum(weight.kl or 0.0 for weight in ranked)
    body: list[Html] = [tag("p", _compared(made))] if _compared(made) else []
    body += _growth(made)
    if ranked:
        costly = ranked[:_COSTLY]
        worst = f"{costly[0].name} costs most, {share((costly[0].kl or 0.0) / total)} of the predicted error"
        rows = [(w.name, w.format, kl(w.kl), share((w.kl or 0.0) / total)) for w in costly]
        body.append(figure("costly", worst, f"The {len(costly)} weights of the largest predicted KL, and their formats."))
        body.append(
            behind("These weights as a table", table(("weight", "format", "predicted KL", "share"), rows, "What costs most", (2, 3)))
        )
    if not body:
        return None
    return Section(
        "error",
        "Where the error comes from",
        "KL divergence says how far the probabilities of the next token have moved, in nats; 0 is no change. What weights cost adds up.",
        tuple(body),
        {
            "growth": [
                {"block": row.name, "predicted": row.predicted, "measured": row.measured, "hidden": row.hidden_error} for row in made.blocks
            ],
            "costly": [{"name": w.name, "format": w.format, "kl": w.kl} for w in ranked[:_COSTLY]],
        },
    )


def _compared(made: Made) -> str:
    if made.verdict is None or made.kl is None or not made.kl:
        return ""
    v = made.verdict
    said = f"Predicted before anything was run: {kl(made.kl)}. Measured in {v.runtime}: {kl(v.kl)}, {v.kl / made.kl:.2f} times that"
    floor = "" if v.kl_floor is None else f" (of it {kl(v.kl_floor)} is the runtime's own, seen with the unquantized file)"
    return f"{said}{floor}. For 1 token in 100 it is above {kl(v.kl_p99)}, at worst {kl(v.kl_max)}."


def _growth(made: Made) -> list[Html]:
    if not made.blocks:
        why = made.left_out.get("accumulation")
        return [tag("p", f"How errors add up from layer to layer was not measured: {why}.", class_="missing")] if why else []
    caption = (
        f"KL divergence with everything up to a layer quantized and the rest in float, on {made.block_tokens:,} tokens, in torch. "
        "A step up is what that layer adds."
    )
    label = f"The measured KL grows from {kl(made.blocks[0].measured)} to {kl(made.blocks[-1].measured)} over the layers"
    rows = [(row.name, kl(row.predicted), kl(row.measured), f"{row.hidden_error:.1e}") for row in made.blocks]
    columns = ("up to layer", "predicted KL", "measured KL", "error of its output, relative")
    return [
        figure("growth", label, caption, legend((("measured", "measured"), ("predicted", "predicted")))),
        behind("This growth as a table", table(columns, rows, "How errors add up", (1, 2, 3))),
    ]
