"""The table of a model without gradients: the error of every weight in every format, each column weighted by its importance.

An error counts relative to the weight's own output, and each output by a share that its kind usually has in the damage: the output matrix
and the embedding by 1, what lies in blocks by much less, as it is added to what all other blocks add. That is much weaker than a prediction
of KL: it does not know which outputs of this model matter. A plan made by it says so, and predicts nothing.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from fewbits.progress import silent
from fewbits.sensitivity.table import Cell, Scores, Sensitivity, rounded

if TYPE_CHECKING:
    from fewbits.calibration.statistics import WeightStatistics
    from fewbits.formats import Format
    from fewbits.model import Model
    from fewbits.model.weights import Weight
    from fewbits.progress import Progress


# KL over relative error on the embedded model, times its blocks: .008 for attention, .03 for MLPs, 1.2 for the embedding that is the output
_SHARES = {"embedding": 1.0, "output": 1.0, "attention": 0.04, "mlp": 0.12}
_OTHER = 0.08


class Importance(Protocol):
    def of(self, weight: str) -> WeightStatistics | None: ...

    def unseen(self) -> set[str]: ...


def measure_errors(model: Model, known: Importance | None, formats: Sequence[Format], progress: Progress[Any] = silent) -> Sensitivity:
    """`known`: llama.cpp's importance matrix; None: all columns count alike."""
    from fewbits.store.heap import return_free_memory

    rows: dict[str, dict[str, Cell]] = {}
    share_of, unseen = _shares(model.weights), known.unseen() if known else set()
    for weight in progress(model.weights, len(model.weights), "measuring"):
        some = [fmt for fmt in formats if not (fmt.needs_importance and weight.name in unseen)]
        rows[weight.name] = row_of(model, known, weight, some, share_of[weight.name])
        return_free_memory()
    return Sensitivity(
        model=model.name, model_sha256=model.fingerprint, runs=(), method="auto" if known else "rtn", weights=model.weights, rows=rows,
        config=model.config.to_dict(), predicts=False,
    )  # fmt: skip


def _shares(weights: Sequence[Weight]) -> dict[str, float]:
    """Of a weight in the damage; an expert has its part of its layer's."""
    blocks = {found[0] for weight in weights if (found := re.match(r".*?\.\d+(?=\.)", weight.name))}
    experts = Counter(weight.together for weight in weights if weight.expert is not None)
    shares = {}
    for weight in weights:
        whole = _SHARES.get(weight.kind, _OTHER)
        inside = weight.kind not in ("embedding", "output")
        shares[weight.name] = whole / (max(1, len(blocks)) if inside else 1) / (experts[weight.together] or 1)
    return shares


def row_of(model: Model, known: Importance | None, weight: Weight, wanted: Sequence[Format], share: float) -> dict[str, Cell]:
    import torch

    from fewbits import formats
    from fewbits.sensitivity.prediction import ENOUGH

    present, statistics = formats.get(weight.dtype), known.of(weight.name) if known else None
    w = model.load(weight)
    step = max(1, w.shape[0] * w.shape[1] // ENOUGH)
    w = w[::step]
    importance = statistics.importance() if statistics and statistics.has_importance else None
    by_column = torch.ones(w.shape[1]) if importance is None else importance
    whole = float((w.square() @ by_column).sum().clamp(min=1e-30))
    cells: dict[str, Cell] = {}
    for fmt in dict.fromkeys((*wanted, present)):
        if fmt.fits(weight.shape) is not None:
            continue
        if fmt.is_cast:
            error = w - fmt.pack(w, {})["values"].float()
        else:
            grid = fmt.fit(w, importance)
            error = w - fmt.decode(fmt.encode(w, grid, importance), grid)
        score = share * float((error.square() @ by_column).sum()) / whole
        cells[fmt.name] = rounded(Cell(score, 0.0, "rtn", Scores(float(error.square().mean()), score, score, score)))
    return cells
