"""Tables of sensitivities made up for tests, of the embedded model's shape, and what can be said of them by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

import numpy as np

from fewbits import embedded, formats, planning, targets
from fewbits.model.weights import Weight
from fewbits.planning.allocation import Allocator
from fewbits.sensitivity.table import Cell, Container, Scores, Sensitivity

GGUF = targets.get("gguf")
MEASURED = ("q2_k", "q3_k", "iq4_xs", "q4_k", "q4_0", "iq4_nl", "q5_k", "q6_k", "q8_0", "fp16")
CONFIG = json.loads((embedded.MODEL / "config.json").read_text())
LAYER = (
    ("self_attn.q_proj", (256, 256), "attention"),
    ("self_attn.k_proj", (128, 256), "attention"),
    ("self_attn.v_proj", (128, 256), "attention"),
    ("self_attn.o_proj", (256, 256), "attention"),
    ("mlp.gate_proj", (768, 256), "mlp"),
    ("mlp.up_proj", (768, 256), "mlp"),
    ("mlp.down_proj", (256, 768), "mlp"),
)
WEIGHTS = (
    Weight("model.embed_tokens", (2048, 256), "embedding", "fp16", tied_to="lm_head"),
    *(Weight(f"model.layers.{i}.{name}", shape, kind, "fp16") for i in range(4) for name, shape, kind in LAYER),
)
ELEMENTS = sum(rows * cols for rows, cols in (weight.shape for weight in WEIGHTS))
FEW = tuple(WEIGHTS[i] for i in (1, 3, 7))
DOWN = "model.layers.2.mlp.down_proj"
SIMPLE = Scores(1.0, 1.0, 1.0, 1.0)


def table_of(seed: int = 0, weights: Sequence[Weight] = WEIGHTS, names: Sequence[str] = MEASURED) -> Sensitivity:
    """As measuring finds it: damage falls fourfold with each bit, weights differ by a factor of a hundred, formats by a fifth."""
    rng = np.random.default_rng(seed)
    rows: dict[str, dict[str, Cell]] = {}
    for weight in weights:
        sensitivity = weight.shape[0] * weight.shape[1] * float(np.exp(rng.normal(-10, 1.5)))
        rows[weight.name] = {}
        for name in names:
            fmt = formats.get(name)
            if fmt.fits(weight.shape) is None:
                noise = float(np.exp(rng.normal(0, 0.2)))
                kl = 0.0 if fmt.is_cast else sensitivity * noise * 4.0 ** -fmt.bits_per_weight((256, 256))
                rows[weight.name][name] = Cell(kl, 0.01, "rtn", SIMPLE)
    return Sensitivity(
        model="model", model_sha256="00", runs=(), method="rtn", weights=tuple(weights), rows=rows, config=CONFIG,
        containers={"gguf": Container(100_000)},
    )  # fmt: skip


def share_of(whole: Allocator, share: float) -> int:
    """A size between the smallest plan and all in 8 bits."""
    most = sum(GGUF.nbytes(weight, formats.get("q8_0")) for weight in whole.table.weights)
    return whole.least_bytes + int(share * (most - whole.least_bytes))


def kl_by_hand(table: Sensitivity, plan: planning.Plan) -> float:
    return math.fsum(table.rows[entry.weight][entry.format].kl for entry in plan.entries)


def bits(name: str) -> float:
    return formats.get(name).bits_per_weight((256, 256))
