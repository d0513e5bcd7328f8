"""The order of columns: which column of one matrix is which of another that has the same rows in another order of columns."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fewbits.model.matching.fingerprints import Bits


def order_of(bits: Bits, of: Bits) -> NDArray[np.int64] | None:
    """`order` with bits == of[:, order]; None: there is none. Both (rows, cols), row by row the same numbers.

    Columns that are equal in every row are taken in order: exchanging them changes no number.
    """
    here, there = _hashes(bits), _hashes(of)
    left, right = np.argsort(here, kind="stable"), np.argsort(there, kind="stable")
    if not np.array_equal(here[left], there[right]):
        return None
    order = np.empty(len(left), np.int64)
    order[left] = right
    return order


def _hashes(bits: Bits) -> NDArray[np.uint64]:  # (rows, cols) -> (cols,)
    mixed = (bits.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(32)
    factors = np.random.default_rng(len(bits)).integers(0, 1 << 63, len(bits), np.uint64) * np.uint64(2) + np.uint64(1)
    return np.asarray((mixed * factors[:, None]).sum(0, dtype=np.uint64))
