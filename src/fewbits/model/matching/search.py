"""The matrices of a file looked for in a checkpoint, one after the other: memory holds the hashes of all rows and one matrix."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from fewbits.errors import InputError
from fewbits.model.matching import Match, Matching, Unmatched
from fewbits.model.matching.columns import order_of
from fewbits.model.matching.fingerprints import bits_of, in_any_order, in_order, pieces
from fewbits.model.matching.tables import Ambiguous, Found, Table, hashes_of, table_of
from fewbits.progress import silent

if TYPE_CHECKING:
    from torch import Tensor

    from fewbits.model.matching.fingerprints import Hashes
    from fewbits.model.weights import Weight
    from fewbits.progress import Progress

_LARGEST_PERMUTED = 1 << 28  # numbers of a matrix whose columns are put in order: both are held in memory as integers


class Checkpoint(Protocol):
    @property
    def weights(self) -> Sequence[Weight]: ...

    def stored(self, weight: Weight) -> Tensor: ...


class File(Protocol):
    @property
    def weights(self) -> Sequence[Weight]: ...

    def kind(self, weight: Weight) -> str:
        """The float type that its numbers are compared in: F32, F16, BF16, or `fingerprints.DECODED`."""

    def stored(self, weight: Weight) -> Tensor: ...

    def nbytes(self, parameter: str) -> int: ...


def match(checkpoint: Checkpoint, file: File, progress: Progress[Any] = silent) -> Matching:
    search = _Search(checkpoint, file)
    matches: dict[str, Match] = {}
    later: list[Weight] = []
    search.read_checkpoint(progress)
    for weight in progress(file.weights, len(file.weights), "matching the float file"):
        found = search.by_rows(weight)
        if found is not None:
            matches[weight.name] = found
        else:
            later.append(weight)
    for weight in later:
        if (found := search.by_other_ways(weight, matches)) is not None:
            matches[weight.name] = found
    return Matching(matches, tuple(_unmatched(search, file, matches)))


class _Search:
    def __init__(self, checkpoint: Checkpoint, file: File) -> None:
        self._checkpoint, self._file = checkpoint, file
        self._weights = list(checkpoint.weights)
        self._tables: dict[tuple[int, str], Table] = {}
        self._blocks: dict[str, str] = {}  # block of the file -> block of the checkpoint, as far as seen

    def read_checkpoint(self, progress: Progress[Any]) -> None:
        """Hashes of all rows that may be looked up, each weight read once."""
        kinds: dict[int, set[str]] = defaultdict(set)
        for weight in self._file.weights:
            for cols in weight.shape:  # rows of it, or of its transpose
                kinds[cols].add(self._file.kind(weight))
        hashed: dict[tuple[int, str], list[tuple[int, Hashes]]] = defaultdict(list)
        numbered = list(enumerate(self._weights))
        for number, weight in progress(numbered, len(numbered), "hashing the checkpoint's rows"):
            if wanted := kinds.get(weight.shape[1]):
                matrix = self._checkpoint.stored(weight)
                for kind in sorted(wanted):
                    hashed[weight.shape[1], kind].append((number, hashes_of(matrix, kind, in_order)))
        self._tables = {key: Table(rows) for key, rows in hashed.items()}

    def by_rows(self, weight: Weight) -> Match | None:
        matrix, kind = self._file.stored(weight), self._file.kind(weight)
        found = self._looked_up(weight, self._tables.get((weight.shape[1], kind)), hashes_of(matrix, kind, in_order))
        if found is None or not self._equal(matrix, kind, found):
            return None
        self._learn(weight, found)
        return self._matched(found)

    def by_other_ways(self, weight: Weight, matches: Mapping[str, Match]) -> Match | None:
        kind, matrix = self._file.kind(weight), self._file.stored(weight)
        table = self._tables.get((weight.shape[0], kind))
        if table is not None:
            turned = matrix.T.contiguous()
            found = self._looked_up(weight, table, hashes_of(turned, kind, in_order))
            if found is not None and self._equal(turned, kind, found):
                return self._matched(found, transposed=True)
        return self._by_columns(weight, matrix, kind, matches)

    def rows_found(self, weight: Weight) -> int:
        kind = self._file.kind(weight)
        table = self._tables.get((weight.shape[1], kind))
        return table.count(hashes_of(self._file.stored(weight), kind, in_order)) if table else 0

    def _by_columns(self, weight: Weight, matrix: Tensor, kind: str, matches: Mapping[str, Match]) -> Match | None:
        if matrix.numel() > _LARGEST_PERMUTED:
            return None
        taken = {name for match in matches.values() for name in match.sources}
        free = [(i, w) for i, w in enumerate(self._weights) if w.shape[1] == weight.shape[1] and w.name not in taken]
        if not free:
            return None
        table = table_of(free, self._checkpoint.stored, kind, in_any_order)
        found = self._looked_up(weight, table, hashes_of(matrix, kind, in_any_order))
        if found is None or len(np.unique(found.weights)) > 1:
            return None
        source = bits_of(self._checkpoint.stored(self._weights[int(found.weights[0])])[_index(found.rows)], kind)
        bits = bits_of(matrix, kind)
        order = order_of(bits, source)
        if order is None or not np.array_equal(bits, source[:, order]):
            return None
        matched = self._matched(found)
        return Match(matched.sources, matched.source, matched.rows, order)

    def _looked_up(self, weight: Weight, table: Table | None, hashes: Hashes) -> Found | None:
        """Rows that are in several weights belong to the one in the same block, or to the one of the same kind."""
        if table is None:
            return None
        try:
            return table.find(hashes)
        except Ambiguous as failure:
            same_block = [number for number in failure.weights if self._in_block(weight, self._weights[number])]
            same_kind = [number for number in failure.weights if self._weights[number].kind == weight.kind]
            for some in (same_block, same_kind, [number for number in same_block if number in same_kind]):
                if len(some) == 1 and (found := table.find(hashes, frozenset(some))) is not None:
                    return found
            names = " and ".join(f"`{self._weights[number].name}`" for number in failure.weights[:3])
            raise InputError(
                f"`{weight.name}` has rows that are in {names} of the checkpoint: nothing says which of them it is",
                "weights with the same content cannot be told apart; is the checkpoint damaged?",
            ) from None

    def _equal(self, matrix: Tensor, kind: str, found: Found) -> bool:
        """Element by element."""
        for number in np.unique(found.weights):
            here = np.flatnonzero(found.weights == number)
            source = self._checkpoint.stored(self._weights[int(number)])
            for some in pieces(len(here), matrix.shape[1]):
                bits = bits_of(matrix[_index(here[some])], kind)
                if not np.array_equal(bits, bits_of(source[_index(found.rows[here[some]])], kind)):
                    return False
        return True

    def _matched(self, found: Found, transposed: bool = False) -> Match:
        numbers, source = np.unique(found.weights, return_inverse=True)
        names = tuple(self._weights[int(number)].name for number in numbers)
        return Match(names, source.astype(np.int32), found.rows, None, transposed)

    def _learn(self, weight: Weight, found: Found) -> None:
        blocks = {_block(self._weights[int(number)].name) for number in np.unique(found.weights)}
        if len(blocks) == 1 and (mine := _block(weight.name)) and (theirs := blocks.pop()):
            self._blocks.setdefault(mine, theirs)

    def _in_block(self, weight: Weight, other: Weight) -> bool:
        mine = _block(weight.name)
        return bool(mine) and self._blocks.get(mine, "") == _block(other.name)


def _unmatched(search: _Search, file: File, matches: Mapping[str, Match]) -> Iterator[Unmatched]:
    """One for each tensor: of a stack, if any slice was not found."""
    for parameter, together in groupby(file.weights, lambda weight: weight.parameter):
        weights = list(together)
        missing = [weight for weight in weights if weight.name not in matches]
        if missing:
            rows = sum(weight.shape[0] for weight in weights)
            found = rows - sum(weight.shape[0] - search.rows_found(weight) for weight in missing)
            numbers = sum(weight.shape[0] * weight.shape[1] for weight in weights)
            yield Unmatched(parameter, rows, found, file.nbytes(parameter), numbers)


def _index(rows: Any) -> Any:
    import torch

    return torch.from_numpy(np.ascontiguousarray(rows))


def _block(name: str) -> str:
    """`model.layers.3` of `model.layers.3.mlp.up_proj`, `blk.3` of `blk.3.ffn_up`; empty outside of blocks."""
    inside = re.match(r"(.*?\.\d+)\.", f"{name}.")
    return inside[1] if inside else ""
