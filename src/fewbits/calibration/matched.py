"""Statistics of a checkpoint's weights, for the matrices that llama.cpp makes of them: rows that travelled bring their statistics along.

rows of one weight          its inputs; the gradients of these rows
rows of several weights     they read one input; their loss-weighted moments are averaged by their numbers of rows, which is what
                            one fused matrix would have been given
columns in another order    every moment in that order
transposed                  llama.cpp multiplies from the other side, so what was an output is now an input: columns count by the
                            squared gradients of the rows that they were, rows by the second moments of the columns that they were
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fewbits.calibration import output_moments
from fewbits.calibration.folder import Statistics
from fewbits.calibration.statistics import InputStatistics, Lookup, WeightStatistics
from fewbits.calibration.triangles import Triangles
from fewbits.store.cache import hash_of

if TYPE_CHECKING:
    from fewbits.calibration.statistics import Moment
    from fewbits.model.gguf.model import GgufModel
    from fewbits.model.matching import Match


class MatchedStatistics(Statistics):
    """Asked by the names of the file's weights; answered from the statistics of the checkpoint."""

    def __init__(self, original: Statistics, model: GgufModel) -> None:
        super().__init__(original.folder)
        assert model.origin is not None, "statistics are of a checkpoint"
        self._original, self._model = original.expect(model.origin.weights), model
        self._kinds = {weight.name: weight.kind for weight in model.weights}
        self._tied = {weight.name for weight in model.origin.weights if weight.tied_to}
        self._apart = any(weight.kind == "output" for weight in model.weights)  # the file has an output matrix of its own

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._model.matches)

    @property
    def model_sha256(self) -> str:
        return self._model.fingerprint

    @cached_property
    def digest(self) -> str:
        return hash_of([self._original.digest, self._model.fingerprint])

    def of(self, weight: str, alone: bool = False) -> WeightStatistics:
        match = self._model.matches.get(weight)
        if match is None:
            return WeightStatistics(None)
        parts = [self._original.of(name, alone) for name in match.sources]
        if match.transposed:
            return _turned(parts, match)
        known = _in_columns(_joined(parts, match), match)
        return self._in_role(known, weight) if self._apart and match.sources[0] in self._tied else known

    def input(self, weight: str) -> InputStatistics:
        match = self._model.matches[weight]
        return _input_in_columns(self._original.input(match.sources[0]), match)

    def site(self, weight: str) -> str | None:
        match = self._model.matches[weight]
        return None if match.transposed else self._original.site(match.sources[0])

    def _in_role(self, known: WeightStatistics, weight: str) -> WeightStatistics:
        """A checkpoint's matrix that is both embedding and output is two in the file: each has one of its roles."""
        if self._kinds[weight] == "embedding":
            return WeightStatistics(None, lookup=known.lookup)
        return replace(known, lookup=None)


def _joined(parts: list[WeightStatistics], match: Match) -> WeightStatistics:
    source, rows = torch.from_numpy(match.source), torch.from_numpy(match.rows)
    counts = [int((source == number).sum()) for number in range(len(parts))]
    if len(parts) == 1:
        (part,) = parts
        lookup = part.lookup and Lookup(part.lookup.usage[rows], part.lookup.square, part.lookup.fisher)
        gradient = None if part.gradient_square is None else part.gradient_square[:, rows]
        outputs = output_moments.rearranged([part.outputs], source, rows)
        return replace(part, gradient_square=gradient, outputs=outputs, lookup=lookup)
    if any(part.input is None or part.gradient_square is None for part in parts):
        return next((part for part in parts if part.input is not None and part.gradient_square is None), WeightStatistics(None))
    gradient = torch.empty(2, len(rows), dtype=torch.float64)
    for number, part in enumerate(parts):
        here = source == number
        assert part.gradient_square is not None
        gradient[:, here] = part.gradient_square[:, rows[here]]
    return WeightStatistics(
        input=parts[0].input,
        sensitivity=_average([part.sensitivity for part in parts], counts),
        gradient_square=gradient,
        fisher_square=_average([part.fisher_square for part in parts], counts),
        fisher=_average([part.fisher for part in parts], counts),
        outputs=output_moments.rearranged([part.outputs for part in parts], source, rows),
        share=parts[0].share,
        borrowed=parts[0].borrowed,
    )


def _average(sums: list[Any], counts: list[int]) -> Any:
    """Weighted by `counts`; None if one is missing."""
    if any(one is None for one in sums):
        return None
    plain = [one.stored if isinstance(one, Triangles) else one for one in sums]
    mean = torch.stack([one * (count / sum(counts)) for one, count in zip(plain, counts, strict=True)]).sum(0)
    return Triangles(mean) if isinstance(sums[0], Triangles) else mean


def _in_columns(known: WeightStatistics, match: Match) -> WeightStatistics:
    if match.columns is None:
        return known
    order = torch.from_numpy(match.columns)
    return replace(
        known,
        input=None if known.input is None else _input_in_columns(known.input, match),
        fisher_square=None if known.fisher_square is None else known.fisher_square[:, order],
        fisher=_square_in(known.fisher, order),
    )


def _input_in_columns(seen: InputStatistics, match: Match) -> InputStatistics:
    if match.columns is None:
        return seen
    order = torch.from_numpy(match.columns)
    moved = {name: getattr(seen, name)[..., order] for name in ("total", "square", "low", "high", "first", "some")}
    return replace(seen, **moved, moment=_square_in(seen.moment, order))


def _square_in(moment: Moment | None, order: Tensor) -> Tensor | None:
    if moment is None:
        return None
    full = moment.full() if isinstance(moment, Triangles) else moment
    return full[:, order][:, :, order]


def _turned(parts: list[WeightStatistics], match: Match) -> WeightStatistics:
    """For one weight, whose damage is half the sum of g2_i H_jj e_ij^2 as far as the diagonal of H goes: rows and columns change places."""
    (part,) = parts[:1]
    if len(parts) > 1 or part.input is None or part.gradient_square is None or part.fisher is None or part.sensitivity is None:
        return WeightStatistics(None)
    tokens = torch.stack([torch.tensor(float(max(1, part.input.tokens(half)))) for half in (0, 1)]).double()
    by_column = part.gradient_square[:, torch.from_numpy(match.rows)]  # (2, cols): now of inputs
    diagonal = part.fisher.diagonal() if isinstance(part.fisher, Triangles) else part.fisher.diagonal(dim1=1, dim2=2)
    by_row = diagonal.double() / part.sensitivity.sum().clamp(min=1e-30) * tokens.sum()
    cols = by_column.shape[1]
    moment = torch.diag_embed(by_column.float())
    nothing = torch.zeros(2, cols)
    seen = InputStatistics(
        count=tokens.long(),
        total=torch.zeros_like(by_column),
        square=by_column,
        low=nothing,
        high=nothing,
        first=torch.empty(0, cols),
        first_half=torch.empty(0, dtype=torch.uint8),
        extremes=torch.empty(0, 2),
        some=torch.empty(0, cols, dtype=torch.float16),
        some_half=torch.empty(0, dtype=torch.uint8),
        moment=moment,
    )
    weights = torch.stack([torch.zeros(2).double(), tokens], 1)  # so that `fisher` over their sum is the mean over tokens
    return WeightStatistics(seen, weights, by_row, by_column, moment, share=part.share)
