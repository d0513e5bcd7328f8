"""What a code stands for: one level (dimension 1), or a vector of 4 or 8 weights, a point of a codebook.

A weight is `scale * codebook.values(code) + offset`. `nearest` finds the code of unit values, that is of weights from which the offset
was taken and which were divided by their scale.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from fewbits.devices import processor
from fewbits.formats.storage import codes
from fewbits.formats.storage.grids import grid

Signs = Literal["in the points", "free", "even"]
FULL_COST, MOST_COST, LEAST_ENERGY = 32767, 65535, 1e-30
FAINTEST = 2.0**-13  # below this energy vectors are all alike to trials, so that no cost of a large value passes 2^31
FARTHEST = 1024.0  # beyond it, where float16 scales end, all that counts is the sign: costs stay finite, and those of neighbours differ
_CHUNK = 1 << 21  # costs of points at a time


class Codebook(ABC):
    dimension: int

    @abstractmethod
    def nearest(self, x: Tensor, importance: Tensor | None = None) -> Tensor:
        """x (rows, cols) in units of the scale, importance (cols,) -> codes (rows, cols / dimension)."""

    @abstractmethod
    def values(self, codes: Tensor) -> Tensor:
        """codes (rows, n) -> (rows, n * dimension) float32."""


@dataclass(frozen=True)
class Levels(Codebook):
    """One weight per code. Which level is nearest does not depend on its importance."""

    levels: codes.Levels
    dimension = 1

    def nearest(self, x: Tensor, importance: Tensor | None = None) -> Tensor:
        return codes.nearest(x, self.levels)

    def values(self, codes: Tensor) -> Tensor:
        from fewbits.formats.storage.codes import level_of

        return level_of(codes, self.levels)


@dataclass(frozen=True)
class Points(Codebook):
    """Vectors out of one of ggml's grids: `points` of them side by side, with signs, times `unit`.

    A code holds, from its lowest bit, the indices of the points, a sign for each weight (1: negative), and which of two shifts was added.
    """

    name: str  # of the grid
    dimension: int
    unit: float  # the grid's numbers are multiplied by it
    signs: Signs  # "even": the number of negative weights in a vector is even, so that the last sign needs no bit
    shifts: tuple[float, ...] = ()  # one of two, in units of the scale

    @property
    def points(self) -> int:
        return self.dimension // self.table.grid.shape[1]

    @property
    def table(self) -> PointTable:
        return _table(self.name, self.unit)

    @property
    def faintest(self) -> float:
        """The energy of a vector of the smallest values, over its weights'."""
        return max(FAINTEST, min((level + shift) ** 2 for level in self.table.levels for shift in self.shifts or (0.0,)))

    @property
    def index_bits(self) -> int:
        return (len(self.table.grid) - 1).bit_length()

    def values(self, codes: Tensor) -> Tensor:
        mask = (1 << self.index_bits) - 1
        found = [self.table.grid[(codes >> (i * self.index_bits)) & mask] for i in range(self.points)]
        vectors = torch.cat(found, -1)  # (rows, n, dimension)
        above = codes >> (self.points * self.index_bits)
        if self.signs != "in the points":
            vectors = torch.where(bits_of(above, self.dimension).bool(), -vectors, vectors)
        if self.shifts:
            vectors = vectors + torch.where(above == 1, self.shifts[1], self.shifts[0]).unsqueeze(-1)
        return vectors.flatten(-2)

    def nearest(self, x: Tensor, importance: Tensor | None = None) -> Tensor:
        return self.encoded(x, None, None, importance)

    def encoded(self, w: Tensor, scale: Tensor | None, offset: Tensor | None, importance: Tensor | None) -> Tensor:
        """w (rows, cols), the scale and offset of groups of columns (rows, groups) -> codes."""
        w = w.float()
        weight = torch.ones(w.shape[1]) if importance is None else importance.float()
        if (isa := native_isa()) is not None and w.numel() and all_finite(w) and (scale is None or all_finite(scale)):
            found = torch.empty((len(w), w.shape[1] // self.dimension), dtype=torch.int32)
            arrays = w.contiguous().numpy(), weight.contiguous().numpy(), found.numpy()
            given: list[Any] = [None if one is None else one.contiguous().numpy() for one in (scale, offset)]
            processor.native().nearest_vectors(isa, self.native, *arrays, *given, torch.get_num_threads())
            return found
        if scale is not None:
            group = w.shape[1] // scale.shape[1]
            w = codes.unit_values(w, scale.repeat_interleave(group, 1), None if offset is None else offset.repeat_interleave(group, 1))
        vectors = w.unflatten(1, (-1, self.dimension))
        weight = weight.reshape(vectors.shape[1:])
        step = max(1, _CHUNK // max(1, vectors.shape[1] * len(self.table.grid)))
        return torch.cat([self.judged(part, weight)[0] for part in vectors.split(step)])

    def judged(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """x (rows, n, dimension), weight (n, dimension) -> codes (rows, n) int32 and the weighted squared error of each. The native
        search does the same operations in the same order."""
        x = x.clamp(-FARTHEST, FARTHEST)
        if self.shifts:
            (first, cost), (second, other) = (self._nearest_points(x - shift, weight) for shift in self.shifts)
            better = other < cost
            return torch.where(better, second | 1 << self.index_bits, first), torch.where(better, other, cost)
        if self.signs == "in the points":
            return self._nearest_points(x, weight)
        negative, size = self._sizes(x, weight)
        code, cost = self._nearest_points(size, weight)
        return code | number_of(negative) << (self.points * self.index_bits), cost

    def sizes(self, x: Tensor, weight: Tensor) -> Tensor:
        """What remains for the points if signs are bits of their own: they do not depend on a positive scale."""
        return x if self.signs == "in the points" else self._sizes(x, weight)[1]

    def _sizes(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Which weights are negative, and their magnitudes. Where signs must be even and are not, one must be wrong: the one that costs
        least. Its magnitude is then negative, and the points are chosen for that."""
        negative, size = x < 0, x.abs()
        if self.signs == "even":
            odd = negative.sum(-1, keepdim=True) % 2 == 1
            wrong = torch.nn.functional.one_hot((weight * size).argmin(-1), self.dimension).bool() & odd
            negative, size = negative ^ wrong, torch.where(wrong, -size, size)
        return negative, size

    def _nearest_points(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        width = self.table.grid.shape[1]
        code, cost = torch.zeros(x.shape[:-1], dtype=torch.int32), torch.zeros(x.shape[:-1])
        for i in range(self.points):
            part = slice(i * width, (i + 1) * width)
            index, least = self.table.nearest(x[..., part], weight[..., part])
            code |= index.int() << (i * self.index_bits)
            cost = least if i == 0 else cost + least
        return code, cost

    def rough_costs(self, x: Tensor, weight: Tensor, shifts: tuple[float, ...]) -> list[Tensor]:
        """The least cost of each vector of `sizes` under each shift, as trials of scales compare it: in 16-bit integers, of which 32767 is
        that of its energy, or of the smallest values where zeros must become these: else vectors of small weights would cost twice their
        energy at most."""
        unit = self._cost_unit(x, weight)
        weight = weight * unit.unsqueeze(-1)
        return [self._rough_points(x - shift, weight)[1].float() / unit for shift in shifts]

    def rough_codes(self, x: Tensor, weight: Tensor) -> Tensor:
        """The codes of these costs under no shift."""
        return self._rough_points(x, weight * self._cost_unit(x, weight).unsqueeze(-1))[0]

    def _cost_unit(self, x: Tensor, weight: Tensor) -> Tensor:
        square = weight * (x * x)
        energy, mass = square[..., 0], weight[..., 0]
        for j in range(1, self.dimension):
            energy, mass = energy + square[..., j], mass + weight[..., j]
        energy = torch.maximum(energy, mass * self.faintest).clamp(min=LEAST_ENERGY)
        return torch.full_like(energy, FULL_COST) / energy  # a number over a tensor would be rounded twice

    def _rough_points(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        width = self.table.grid.shape[1]
        code, cost = torch.zeros(x.shape[:-1], dtype=torch.int32), torch.zeros(x.shape[:-1], dtype=torch.int32)
        for i in range(self.points):
            part = slice(i * width, (i + 1) * width)
            index, least = self.table.rough_nearest(x[..., part], weight[..., part])
            code |= index.int() << (i * self.index_bits)
            cost = (cost + least).clamp(max=MOST_COST)
        return code, cost

    @property
    def native(self) -> Any:
        return _native(self)


@dataclass(frozen=True)
class PointTable:
    """A grid, and each of its points as two halves. A half is one of at most 81 vectors (four of three levels, or two of eight), whose
    costs are computed first. Points are in the order of their first halves: the cheapest second half of each is found, and then the
    cheapest sum."""

    grid: Tensor  # (points, 4 or 8) float32
    levels: tuple[float, ...]
    index: Tensor  # (points,) their numbers in the order of their first halves
    first: Tensor  # (points,) in that order: the number of the first half; its first weight is the lowest digit
    second: Tensor

    @property
    def halves(self) -> int:
        return int(len(self.levels) ** self.width)

    @property
    def width(self) -> int:
        return self.grid.shape[1] // 2

    def nearest(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:  # (..., 4 or 8) -> number and cost of a point (...)
        return self._cheapest(self._costs(x, weight), torch.inf, torch.inf)

    def rough_nearest(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """In 16-bit integers."""
        return self._cheapest(self._costs(x, weight).clamp(max=MOST_COST).round().int(), MOST_COST, 2 * MOST_COST)

    def _cheapest(self, costs: Tensor, most: float, beyond: float) -> tuple[Tensor, Tensor]:
        """(..., 4 or 8, levels): costs; sums are `most` at most, and what is no point costs `beyond`."""
        first, second = (self._half(costs[..., part, :]) for part in (slice(0, self.width), slice(self.width, None)))
        by_point = second[..., self.second]
        least = torch.full_like(first, beyond)
        least = least.scatter_reduce(-1, self.first.expand(by_point.shape), by_point, "amin")
        cost, half = torch.where(least < beyond, (first + least).clamp(max=most), beyond).min(-1, keepdim=True)
        candidates = torch.where(self.first == half, by_point, beyond)
        return self.index[candidates.argmin(-1)], cost.squeeze(-1)

    def _costs(self, x: Tensor, weight: Tensor) -> Tensor:  # (..., 4 or 8, levels)
        away = x.unsqueeze(-1) - torch.tensor(self.levels)
        return weight.unsqueeze(-1) * (away * away)

    def _half(self, costs: Tensor) -> Tensor:
        pairs = [_sums(costs[..., i, :], costs[..., i + 1, :]) for i in range(0, self.width, 2)]
        return pairs[0] if len(pairs) == 1 else _sums(pairs[0], pairs[1])


def _sums(low: Tensor, high: Tensor) -> Tensor:
    """Of every pair: the index of `low` is the lower digit."""
    return (low.unsqueeze(-2) + high.unsqueeze(-1)).flatten(-2)


@cache
def _table(name: str, unit: float) -> PointTable:
    points = grid(name) * unit
    levels = points.unique()
    digits = torch.searchsorted(levels, points)
    width = points.shape[1] // 2
    places = len(levels) ** torch.arange(width)
    first, second = ((half * places).sum(-1) for half in digits.split(width, 1))
    index = first.argsort(stable=True)
    return PointTable(points, tuple(levels.tolist()), index, first[index], second[index])


@cache
def _native(points: Points) -> Any:
    table = points.table
    first, second = (half[table.index.argsort()].tolist() for half in (table.first, table.second))
    signs = ("in the points", "free", "even").index(points.signs)
    return processor.native().VectorBook(points.dimension, signs, points.shifts, table.levels, first, second, table.grid.numpy())


def native_isa() -> str | None:
    """The instruction set for codes of vectors; None: torch, which gives the same bits."""
    return processor.fastest(("avx512", "avx2", "scalar")) if processor.backend() != "reference" else None


def normalised(importance: Tensor) -> Tensor:
    """Of mean 1. Columns that are never used keep a millionth, so that they get the codes nearest to them all the same."""
    mean = importance.float().mean()
    return (importance.float() / mean if mean > 0 else torch.ones_like(importance)).clamp(min=1e-6)


def all_finite(x: Tensor) -> bool:
    low, high = x.aminmax()  # a tenth of the time that x.isfinite() takes
    return bool((high - low).isfinite())


def bits_of(numbers: Tensor, count: int) -> Tensor:
    """(...) -> (..., count), the lowest first."""
    return (numbers.unsqueeze(-1) >> torch.arange(count, dtype=numbers.dtype)) & 1


def number_of(bits: Tensor) -> Tensor:
    """The opposite of `bits_of`."""
    return (bits.int() << torch.arange(bits.shape[-1], dtype=torch.int32)).sum(-1, dtype=torch.int32)
