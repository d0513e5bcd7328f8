"""Rescaled channels: one layer's output is multiplied by factors, the next layer's columns are divided by them.

A `Rewrite` holds only the factors. `RewrittenModel` applies them as tensors are loaded; `rewritten` gives the statistics that calibration
would have measured in the rescaled model, without running it again.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fewbits.calibration import output_moments
from fewbits.formats.storage.codes import to_float16
from fewbits.model import Model
from fewbits.model.weights import Weight

if TYPE_CHECKING:
    from fewbits.calibration.statistics import InputStatistics, WeightStatistics
    from fewbits.rewrites.folding import Fold


@dataclass(frozen=True, eq=False)
class Rewrite:
    rows: dict[str, Tensor] = field(default_factory=dict)  # module -> factor per output channel, of its weight and of its bias
    columns: dict[str, Tensor] = field(default_factory=dict)  # weight -> factor per input column
    offsets: dict[str, float] = field(default_factory=dict)  # norm -> what it adds to its weight to get its gain (Gemma's 1 + w)

    @classmethod
    def of(cls, fold: Fold, columns: Tensor) -> Rewrite:
        """The consumers' columns times `columns` (cols,), the producer's rows divided by them."""
        rows = torch.ones(fold.channels).index_put((fold.source,), 1 / columns.float())
        if not torch.equal(1 / rows[fold.source], 1 / (1 / columns.float())):
            raise ValueError(f"columns of {fold.consumers[0]} that one channel of {fold.producer} feeds need one factor")
        # 1 / rows, not `columns`: the two factors of a channel then differ from inverses by one rounding only
        scaled = 1 / rows[fold.source]
        offsets = {fold.producer: fold.offset} if fold.offset else {}
        return cls({fold.producer: rows}, dict.fromkeys(fold.consumers, scaled), offsets)

    def then(self, other: Rewrite) -> Rewrite:
        """Both rewrites. They only multiply, so that the order does not matter."""
        return Rewrite(_product(self.rows, other.rows), _product(self.columns, other.columns), self.offsets | other.offsets)

    def matrix(self, weight: Weight, w: Tensor) -> Tensor:  # (rows, cols) -> (rows, cols)
        if (factors := self.rows.get(weight.name)) is not None:
            w = w * factors[:, None]
        if (factors := self.columns.get(weight.name)) is not None:
            w = w * factors
        return w

    def tensor(self, name: str, value: Tensor) -> Tensor:
        """A norm's weight or any module's bias, by the name of the parameter; float32 if it is rescaled."""
        module, _, kind = name.rpartition(".")
        if (factors := self.rows.get(module)) is None or kind not in ("weight", "bias"):
            return value
        offset = self.offsets.get(module, 0.0) if kind == "weight" else 0.0
        return (value.float() + offset) * factors - offset

    def to_tensors(self) -> dict[str, Tensor]:
        """For a safetensors file, by names that say what each tensor is."""
        offsets = {f"offset:{name}": torch.tensor([offset]) for name, offset in self.offsets.items()}
        rows = {f"rows:{name}": factors.contiguous() for name, factors in self.rows.items()}
        # clones: the consumers of one fold share their factors, and safetensors refuses tensors that share memory
        columns = {f"columns:{name}": factors.clone().contiguous() for name, factors in self.columns.items()}
        return rows | columns | offsets

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> Rewrite:
        rewrite = cls()
        for key, value in tensors.items():
            what, _, name = key.partition(":")
            match what:
                case "rows":
                    rewrite.rows[name] = value
                case "columns":
                    rewrite.columns[name] = value
                case "offset":
                    rewrite.offsets[name] = float(value)
                case _:
                    raise ValueError(f"`{key}` is no part of a rewrite")
        return rewrite


class RewrittenModel(Model):
    """The same checkpoint with factors applied to the loaded values; everything else is the original's.

    A weight's `dtype` stays that of the file, so that a rescaled weight which a plan keeps in float is rounded to it again.
    """

    def __init__(self, original: Model, rewrite: Rewrite) -> None:
        self.__dict__.update(original.__dict__)
        self.original = original
        self.rewrite = rewrite

    def load(self, weight: Weight) -> Tensor:
        return self.rewrite.matrix(weight, self.original.load(weight))

    def tensor(self, name: str) -> Tensor:
        return self.rewrite.tensor(name, self.original.tensor(name))


def rewritten(stats: WeightStatistics, weight: str, rewrite: Rewrite) -> WeightStatistics:
    """The statistics that calibration would have measured at the rescaled weight.

    Columns times c: its inputs are divided by c. Exact, except that the histogram and the extremes of batches are left out: they are of
    the whole tensor, so that a factor per column cannot be applied.
    Rows times r: the gradient of its output is divided by r. Exact for `gradient_square`. The tokens' loss weights are means over the rows
    of g^2, of which only the sums are known: they are assumed to shrink equally for all tokens (exact where r is the same for all rows, or
    where all tokens have the same profile of gradients over the rows).
    """
    columns, rows = rewrite.columns.get(weight), rewrite.rows.get(weight)
    if columns is not None:
        assert stats.input is not None, "an embedding has no input to rescale"
        square = columns.double().square()
        outer = columns[:, None] * columns
        fisher_square = None if stats.fisher_square is None else stats.fisher_square / square
        fisher = None if stats.fisher is None else stats.fisher / outer
        stats = replace(stats, input=_divided(stats.input, columns), fisher_square=fisher_square, fisher=fisher)
    if rows is not None and stats.gradient_square is not None:
        gradient_square = stats.gradient_square / rows.double().square()
        before = stats.gradient_square.sum(1).clamp(min=1e-300)
        shrunk = gradient_square.sum(1) / before  # (2,): of each half
        stats = replace(
            stats,
            gradient_square=gradient_square,
            sensitivity=None if stats.sensitivity is None else stats.sensitivity * shrunk[:, None],
            fisher_square=None if stats.fisher_square is None else stats.fisher_square * shrunk[:, None],
            fisher=None if stats.fisher is None else stats.fisher * shrunk[:, None, None].float(),
            outputs=None if stats.outputs is None else output_moments.rescaled(stats.outputs, rows),
        )
    return stats


def _divided(seen: InputStatistics, factors: Tensor) -> InputStatistics:
    return replace(
        seen,
        total=seen.total / factors.double(),
        square=seen.square / factors.double().square(),
        low=seen.low / factors,
        high=seen.high / factors,
        first=seen.first / factors,
        some=to_float16(seen.some.float() / factors),
        extremes=seen.extremes[:0],
        histogram=None,
        moment=None if seen.moment is None else seen.moment / (factors[:, None] * factors),
    )


def _product(a: dict[str, Tensor], b: dict[str, Tensor]) -> dict[str, Tensor]:
    return a | {name: a[name] * factors if name in a else factors for name, factors in b.items()}
