"""Where every row of a checkpoint is, by its hash."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fewbits.model.matching.fingerprints import bits_of, pieces

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from fewbits.model.matching.fingerprints import Bits, Hashes
    from fewbits.model.weights import Weight

    Load = Callable[[Weight], Tensor]  # (rows, cols) in the type of the checkpoint


@dataclass(frozen=True)
class Found:
    """Where the rows of a matrix are in a checkpoint."""

    weights: NDArray[np.int32]  # (rows,): which weight
    rows: NDArray[np.int64]  # (rows,): which of its rows


class Ambiguous(Exception):  # noqa: N818 - the caller tries to resolve it, and only then it is an error
    """Rows that are in several weights, and nothing in them says which."""

    def __init__(self, weights: list[int]) -> None:
        super().__init__(weights)
        self.weights = weights


class Table:
    """The rows of some weights that have the same number of columns."""

    def __init__(self, hashed: Sequence[tuple[int, Hashes]]) -> None:
        """`hashed`: the number of a weight, and the hashes of its rows."""
        hashes = np.concatenate([hashes for _, hashes in hashed])
        order = np.argsort(hashes, kind="stable")  # stable: equal rows stay in the order of weights and rows
        self._hashes = hashes[order]
        self._weights = np.concatenate([np.full(len(hashes), number, np.int32) for number, hashes in hashed])[order]
        self._rows = np.concatenate([np.arange(len(hashes), dtype=np.int64) for _, hashes in hashed])[order]

    def count(self, hashes: Hashes) -> int:
        """How many of these rows are there."""
        return int((np.searchsorted(self._hashes, hashes, "right") > np.searchsorted(self._hashes, hashes, "left")).sum())

    def find(self, hashes: Hashes, among: frozenset[int] | None = None) -> Found | None:
        """None: some row is nowhere. `among`: weights that may be meant, where it is known."""
        first, last = (np.searchsorted(self._hashes, hashes, side) for side in ("left", "right"))
        if (first == last).any():
            return None
        found = Found(self._weights[first].copy(), self._rows[first].copy())
        several = last - first > 1
        if not several.any() and among is None:
            return found
        likely = among if among is not None else self._likely(several, found, first, last)
        for here in _groups(hashes, np.flatnonzero(several) if among is None else np.arange(len(hashes))):
            entries = np.arange(first[here[0]], last[here[0]])
            meant = entries[np.isin(self._weights[entries], list(likely))]
            if not len(meant):
                if among is not None:
                    return None
                raise Ambiguous(sorted({int(number) for number in self._weights[entries]}))
            chosen = meant[np.arange(len(here)) % len(meant)]  # in order: the values are equal, and mostly so is their place
            found.weights[here], found.rows[here] = self._weights[chosen], self._rows[chosen]
        return found

    def _likely(self, several: NDArray[np.bool_], found: Found, first: NDArray[np.int64], last: NDArray[np.int64]) -> frozenset[int]:
        """The weights that rows found once belong to; where there are none, the only weight that has all rows."""
        if not several.all():
            return frozenset(int(number) for number in np.unique(found.weights[~several]))
        common: set[int] | None = None
        for start, stop in {(int(a), int(b)) for a, b in zip(first, last, strict=True)}:
            here = {int(number) for number in np.unique(self._weights[start:stop])}
            common = here if common is None else common & here
        if not common or len(common) > 1:
            raise Ambiguous(sorted(common or {int(number) for number in self._weights[first]}))
        return frozenset(common)


def _groups(hashes: Hashes, places: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """These places, those of equal hashes together, each group in order. A row of zeros may be there a thousand times."""
    places = places[np.argsort(hashes[places], kind="stable")]
    values = hashes[places]
    return np.split(places, np.flatnonzero(values[1:] != values[:-1]) + 1) if len(places) else []


def table_of(weights: Sequence[tuple[int, Weight]], load: Load, kind: str, hashing: Callable[[Bits], Hashes]) -> Table:
    """`kind`: GGUF's float type in which rows are compared."""
    return Table([(number, hashes_of(load(weight), kind, hashing)) for number, weight in weights])


def hashes_of(matrix: Tensor, kind: str, hashing: Callable[[Bits], Hashes]) -> Hashes:
    return np.concatenate([hashing(bits_of(matrix[some], kind)) for some in pieces(*matrix.shape)])
