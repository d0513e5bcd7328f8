"""Rewrites: channels are rescaled so that weights round better, and the model computes the same function. They come before measuring.

A model and its statistics come in; a `Rewrite` (the factors) and a row for the report on each fold go out.

folding.py      where channels may be rescaled: by running a block and checking that its output stays
awq.py, smoothquant.py   how large the factors should be; descent.py refines SmoothQuant's, candidates.py has what both share
rescaling.py    a model and its statistics seen through a rewrite; statistics.py the same for a folder of statistics
bias.py         biases corrected for the mean of the rounding errors
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from fewbits.errors import InputError
from fewbits.model.blocks import Blocks
from fewbits.rewrites import awq, folding, smoothquant
from fewbits.rewrites.folding import Findings, Fold
from fewbits.rewrites.rescaling import Rewrite, RewrittenModel, rewritten

if TYPE_CHECKING:
    from fewbits.calibration.statistics import WeightStatistics
    from fewbits.formats import Format
    from fewbits.model import Model
    from fewbits.model.weights import Weight
    from fewbits.progress import Progress
    from fewbits.rewrites.candidates import FoldFactors
    from fewbits.rewrites.smoothquant import Activations

    Statistics = Mapping[str, WeightStatistics] | Callable[[str], WeightStatistics]

__all__ = ["Fold", "FoldRow", "Rewrite", "RewrittenModel", "find_all", "rewritten"]

Name = Literal["awq", "smoothquant"]


@dataclass(frozen=True)
class FoldRow:
    """One fold in the report. Errors are on the half of the samples that the factors were not fitted to."""

    producer: str
    consumers: tuple[str, ...] = ()
    parameter: float | None = None  # a of AWQ, alpha of SmoothQuant; None: left as it is
    before: float = 0.0
    after: float = 0.0
    reason: str = ""  # why it was left as it is


def find_all(
    model: Model,
    name: Name,
    statistics: Statistics,
    formats: Callable[[str], Format],
    progress: Progress[Findings],
    activations: Callable[[str], Activations | None] = lambda _: "token",
    earlier: tuple[Rewrite, Sequence[FoldRow]] | None = None,
) -> tuple[Rewrite, list[FoldRow]]:
    """Block by block: the folds that leave the output unchanged, and for each the factors that lower the error on held-out samples.

    `formats`: the format that each weight will be stored in. `activations`: how its input will be rounded, for SmoothQuant; None: not at
    all, and its channels are left as they are. `earlier`: found for the same model, and kept where inputs have one scale for all tokens.
    """
    if name not in ("awq", "smoothquant"):
        raise InputError(f"no rewrite is named `{name}`", "known rewrites: awq, smoothquant")
    blocks = Blocks(model)
    by_name = {weight.name: weight for weight in model.weights}
    whole, rows = Rewrite(), []
    for findings in progress(_walk(blocks), len(blocks) + 1, name):
        rows += [FoldRow(producer, reason=reason) for producer, reason in findings.refused]
        for fold in findings.folds:
            stats = {consumer: its for consumer in fold.consumers if (its := _of(statistics, consumer)) is not None}
            if len(stats) < len(fold.consumers):
                rows.append(FoldRow(fold.producer, fold.consumers, reason="no statistics for all of its readers"))
                continue
            if any(formats(consumer).is_cast for consumer in fold.consumers):
                rows.append(FoldRow(fold.producer, fold.consumers, reason="a reader is kept in float"))
                continue
            rounded = {activations(consumer) for consumer in fold.consumers}
            if name == "smoothquant" and None in rounded:
                rows.append(FoldRow(fold.producer, fold.consumers, reason="its input is not rounded"))
                continue
            if earlier and rounded == {"tensor"}:
                columns = earlier[0].columns.get(fold.consumers[0])
                rows.append(next(row for row in earlier[1] if row.consumers == fold.consumers))
                whole = whole if columns is None else whole.then(Rewrite.of(fold, columns))
                continue
            if name == "awq":
                producer = _of(statistics, fold.producer) if fold.producer in by_name else None  # a norm has no statistics
                best = _awq(model, fold, by_name, stats, producer, formats, whole)
            else:
                per: Activations = "tensor" if "tensor" in rounded else "token"
                matrices = {each: whole.matrix(by_name[each], model.load(by_name[each])) for each in fold.consumers}
                seen = {each: rewritten(stats[each], each, whole) for each in fold.consumers}
                best = smoothquant.search(fold, seen, matrices, {each: formats(each) for each in fold.consumers}, per)
            reason = "nothing was better on held-out samples" if best.parameter is None else ""
            rows.append(FoldRow(fold.producer, fold.consumers, best.parameter, best.before, best.after, reason))
            if best.parameter is not None:
                whole = whole.then(Rewrite.of(fold, best.columns))
    return whole, rows


def _awq(
    model: Model,
    fold: Fold,
    by_name: Mapping[str, Weight],
    stats: Mapping[str, WeightStatistics],
    producer_stats: WeightStatistics | None,
    formats: Callable[[str], Format],
    so_far: Rewrite,
) -> FoldFactors:
    def rounded(name: str, its: WeightStatistics) -> awq.Rounded:
        return awq.Rounded(by_name[name], model.load(by_name[name]), formats(name), its)

    producer = None
    if producer_stats is not None and not formats(fold.producer).is_cast:
        producer = rounded(fold.producer, producer_stats)
    return awq.search(fold, {name: rounded(name, its) for name, its in stats.items()}, producer, so_far)


def _walk(blocks: Blocks) -> Iterator[Findings]:
    for index in range(len(blocks)):
        yield folding.trace(blocks, index)
    yield folding.trace_outer(blocks)


def _of(statistics: Statistics, name: str) -> WeightStatistics | None:
    return statistics(name) if callable(statistics) else statistics.get(name)
