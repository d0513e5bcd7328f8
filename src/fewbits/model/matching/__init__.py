"""Which matrix of a GGUF is which weight of a checkpoint, seen from their content. No architecture is named here.

llama.cpp's converter renames, stacks, splits, fuses and permutes weights in a way of its own for each architecture, but it computes
nothing: a row of a matrix in its file is a row of the checkpoint. So the rows of both are hashed and looked up.

    rows        in any order, of one weight or of several, all of them or some
    transposed  the columns of the matrix are rows of a weight: a part that llama.cpp multiplies from the other side
    columns     the same rows with their columns in another order

Every element of what is found is compared. What is not found is named, and never guessed.

fingerprints.py  rows -> hashes          tables.py  hash -> where the row is in the checkpoint
columns.py       the order of columns    search.py  the three ways, one matrix after the other
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True)
class Match:
    """Where one matrix of a file (of a stack: one of its slices) comes from."""

    sources: tuple[str, ...]  # names of the checkpoint's weights
    source: NDArray[np.int32]  # of each row: index into `sources`
    rows: NDArray[np.int64]  # of each row: which row of that weight
    columns: NDArray[np.int64] | None = None  # column j is the weight's column columns[j]; None: all in order
    transposed: bool = False  # `source` and `rows` are of the matrix's columns

    @property
    def in_order(self) -> bool:
        """A whole weight as it is, or some of its rows in order."""
        steps = self.rows[1:] - self.rows[:-1]
        return len(self.sources) == 1 and not self.transposed and self.columns is None and bool((steps == 1).all())


@dataclass(frozen=True)
class Unmatched:
    tensor: str
    rows: int
    found: int  # of its rows
    nbytes: int
    numbers: int

    def __str__(self) -> str:
        return f"`{self.tensor}` ({self.nbytes / 1e6:.3g} MB, {self.found} of its {self.rows} rows are in the checkpoint)"


@dataclass(frozen=True)
class Matching:
    matches: Mapping[str, Match]  # by the name of the file's weight
    unmatched: tuple[Unmatched, ...]  # tensors
