"""Safetensors files written one weight at a time: every size is known beforehand, so each tensor goes straight to its place.

A file is the length of its header in 8 bytes, the header in JSON, padded with spaces to a multiple of 8, and the tensors without gaps.
Those of larger elements come first, as the safetensors package orders them too, so that every tensor is aligned.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fewbits.store.dtypes import ITEMS

if TYPE_CHECKING:
    from torch import Tensor

    from fewbits.progress import Progress

INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5 * 10**9  # of a file at most, unless one weight is larger: a download that breaks off is not all lost


class Array(NamedTuple):
    dtype: str  # torch's name
    shape: tuple[int, ...]

    @property
    def item_bytes(self) -> int:
        return ITEMS[self.dtype][1]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.item_bytes


@dataclass(frozen=True)
class Piece:
    """The tensors that are in memory at once: those of one weight, or a single float tensor."""

    arrays: Mapping[str, Array]
    load: Callable[[], Mapping[str, Tensor]]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())


@dataclass(frozen=True)
class Shard:
    name: str
    pieces: tuple[Piece, ...]
    metadata: Mapping[str, str]

    @cached_property
    def places(self) -> dict[str, tuple[Array, int]]:
        """Every tensor, and how far behind the header it begins."""
        arrays = [item for piece in self.pieces for item in piece.arrays.items()]
        arrays.sort(key=lambda item: (-item[1].item_bytes, item[0]))
        places, end = {}, 0
        for name, array in arrays:
            places[name] = (array, end)
            end += array.nbytes
        return places

    @cached_property
    def header(self) -> bytes:
        said: dict[str, Any] = {"__metadata__": {"format": "pt", **self.metadata}}
        for name, (array, start) in self.places.items():
            said[name] = {"dtype": ITEMS[array.dtype][0], "shape": array.shape, "data_offsets": [start, start + array.nbytes]}
        text = json.dumps(said, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    @property
    def nbytes(self) -> int:
        return len(self.header) + sum(piece.nbytes for piece in self.pieces)


def split(pieces: Sequence[Piece], metadata: Mapping[str, str], limit: int) -> list[Shard]:
    """Pieces in their order; a file ends before it would grow beyond the limit."""
    groups: list[list[Piece]] = [[]]
    size = 0
    for piece in pieces:
        if groups[-1] and size + piece.nbytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(piece)
        size += piece.nbytes
    if len(groups) == 1:
        return [Shard("model.safetensors", tuple(groups[0]), metadata)]
    count = len(groups)
    return [Shard(f"model-{i:05}-of-{count:05}.safetensors", tuple(group), metadata) for i, group in enumerate(groups, 1)]


def index(shards: Sequence[Shard]) -> str | None:
    """Which file holds each tensor; None where there is but one file."""
    if len(shards) == 1:
        return None
    total = sum(piece.nbytes for shard in shards for piece in shard.pieces)
    weight_map = {name: shard.name for shard in shards for name in shard.places}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}, indent=1) + "\n"


def write(shards: Sequence[Shard], folder: Path, progress: Progress[Any]) -> None:
    steps = [(shard, piece) for shard in shards for piece in shard.pieces]
    with ExitStack() as opened:
        files = {shard.name: opened.enter_context((folder / shard.name).open("wb")) for shard in shards}
        for shard in shards:
            files[shard.name].write(shard.header)
        for shard, piece in progress(steps, len(steps), "writing safetensors"):
            for place, octets in _placed(shard, piece):
                files[shard.name].seek(place)
                files[shard.name].write(octets)


def _placed(shard: Shard, piece: Piece) -> Iterator[tuple[int, memoryview]]:
    import torch

    tensors = piece.load()
    assert tensors.keys() == piece.arrays.keys(), piece.arrays.keys()
    for name, tensor in tensors.items():
        array, start = shard.places[name]
        given = Array(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        assert given == array, f"{name}: {given} instead of {array}"
        octets = tensor.contiguous().reshape(-1).view(torch.uint8)
        yield len(shard.header) + start, octets.numpy().data
