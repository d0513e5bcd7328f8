"""llama.cpp's importance matrix: the mean square of every input channel, per tensor, as its quantizer reads it and its tool writes it.

GGUF (current): `general.type` = imatrix; `NAME.weight.in_sum2` (sum of squares, float32 [mats, cols]) and `NAME.weight.counts`
(tokens, float32 [mats, 1]) under llama.cpp's tensor names; `imatrix.datasets`, `imatrix.chunk_count`, `imatrix.chunk_size`.
Legacy (.dat): int32 entries; each: int32 length, name, int32 calls, int32 values, float32 values (mean squares * calls); then
int32 chunks, int32 length, name of the data. A tensor of experts has a row and a count for each of them; the legacy form has no counts.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fewbits.calibration.statistics import InputStatistics, WeightStatistics
from fewbits.errors import InputError
from fewbits.model.gguf import architectures
from fewbits.store.files import Staged

if TYPE_CHECKING:
    from fewbits.calibration.folder import Statistics
    from fewbits.model import Model

_HINT = "give a file that llama.cpp's llama-imatrix or `fewbits calibrate --imatrix` wrote"


@dataclass(frozen=True)
class _Entry:
    """What the file says about one tensor."""

    squares: Tensor  # (mats, cols) float64: sums over tokens
    counts: Tensor  # (mats,) float64: tokens; 0 for an expert that was given none


def write(statistics: Statistics, source: Model, path: Path) -> None:
    """In the legacy form if the file is named `.dat`. Tokens at all positions count alike, as in llama.cpp."""
    runs = statistics.about["runs"]
    tokens, samples = sum(run["tokens"] for run in runs), sum(run["samples"] for run in runs)
    chunk = max(1, tokens // max(1, samples))
    entries, datasets = _entries(statistics, source), [str(run["data_sha256"]) for run in runs]
    with Staged(path) as staged:
        if path.suffix == ".dat":
            _write_legacy(staged, entries, datasets, chunk, max(1, tokens // chunk))
        else:
            _write_gguf(staged, entries, datasets, chunk, max(1, tokens // chunk))


def _entries(statistics: Statistics, source: Model) -> dict[str, _Entry]:
    """By llama.cpp's tensor name. It has no entry for an embedding, nor for an output tied to one."""
    places = architectures.Places(source.config)
    entries: dict[str, _Entry] = {}
    multiplied = (weight for weight in source.weights if statistics.site(weight.name) is not None and weight.kind != "embedding")
    for parameter, together in groupby(multiplied, lambda weight: weight.parameter):
        seen = [statistics.input(weight.name) for weight in together]
        counts = torch.tensor([one.tokens() for one in seen], dtype=torch.float64)
        squares = torch.stack([one.mean_square().double() * one.tokens() for one in seen])
        entries |= {place.tensor: _Entry(squares, counts) for place in places(parameter)}
    return entries


def _write_gguf(path: Path, entries: dict[str, _Entry], datasets: list[str], chunk: int, chunks: int) -> None:
    import gguf

    writer = gguf.GGUFWriter(path, arch="", use_temp_file=False)
    writer.kv_data[0].pop("general.architecture", None)  # an importance matrix has a type instead
    writer.add_type("imatrix")
    writer.add_array("imatrix.datasets", datasets)
    writer.add_uint32("imatrix.chunk_count", chunks)
    writer.add_uint32("imatrix.chunk_size", chunk)
    for name, entry in entries.items():
        writer.add_tensor(f"{name}.in_sum2", entry.squares.float().numpy())
        writer.add_tensor(f"{name}.counts", entry.counts.float().unsqueeze(1).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_legacy(path: Path, entries: dict[str, _Entry], datasets: list[str], chunk: int, chunks: int) -> None:
    with path.open("wb") as file:
        file.write(struct.pack("<i", len(entries)))
        for name, entry in entries.items():
            calls = max(1, math.ceil(float(entry.counts.max()) / chunk))
            counts = entry.counts.unsqueeze(1)
            means = torch.where(counts > 0, entry.squares / counts.clamp(min=1), 1.0)  # without tokens llama.cpp takes all columns alike
            label, values = name.encode(), (means * calls).float().flatten().numpy()
            file.write(struct.pack("<i", len(label)) + label + struct.pack("<ii", calls, len(values)) + values.astype("<f4").tobytes())
        label = ",".join(datasets).encode()
        file.write(struct.pack("<ii", chunks, len(label)) + label)


class ImportanceMatrix:
    """What a file says about a model's weights: importance per column, without Hessians and gradients."""

    def __init__(self, path: Path, source: Model) -> None:
        self.path = path
        self._entries = _read(path)
        if source.layout:
            self._tensors = {weight.name: [weight.parameter] for weight in source.weights}
        else:
            places = architectures.Places(source.config)
            self._tensors = {weight.name: [place.tensor for place in places(weight.parameter)] for weight in source.weights}
        if not any(tensor in self._entries for tensors in self._tensors.values() for tensor in tensors):
            raise InputError(f"`{path}` names no weight of `{source.name}`", "is it the importance matrix of another model?")
        self._weights = {weight.name: weight for weight in source.weights}
        self._mats = Counter(weight.parameter for weight in source.weights)

    def __str__(self) -> str:
        """For a person: what it says something about."""
        known = sum(any(tensor in self._entries for tensor in tensors) for tensors in self._tensors.values())
        tied = "; llama.cpp's have none of an embedding" if known < len(self._tensors) else ""
        return f"importance matrix `{self.path.name}`: {known} of {len(self._tensors)} weights{tied}"

    def unseen(self) -> set[str]:
        """Weights of which the file should have an entry and has none. llama.cpp writes none of an embedding."""
        missing = {name for name, tensors in self._tensors.items() if not any(tensor in self._entries for tensor in tensors)}
        return {name for name in missing if self._weights[name].kind != "embedding"}

    def of(self, weight: str) -> WeightStatistics | None:
        """None: the file has nothing about it."""
        entry = next((self._entries[tensor] for tensor in self._tensors[weight] if tensor in self._entries), None)
        if entry is None:
            return None
        mats, cols = self._mats[self._weights[weight].parameter], self._weights[weight].shape[1]
        if entry.squares.numel() != mats * cols or entry.counts.numel() not in (1, mats):
            differs = f"`{self.path}` has {entry.squares.numel()} values for `{weight}`, the model {mats * cols}"
            raise InputError(differs, "is it the importance matrix of another model?")
        place = self._weights[weight].expert or 0
        count = float(entry.counts.flatten()[place if entry.counts.numel() > 1 else 0])
        if not count:
            return None  # an expert that no token was given to
        mean_square = (entry.squares.reshape(mats, cols)[place] / count).float()
        squares = mean_square.double().expand(2, -1).clone()  # the file has no halves: both get the same values
        seen = InputStatistics(
            count=torch.tensor([1, 1]),
            total=torch.zeros_like(squares),
            square=squares,
            low=-mean_square.sqrt().expand(2, -1),
            high=mean_square.sqrt().expand(2, -1),
            first=torch.empty(0, cols),
            first_half=torch.empty(0, dtype=torch.uint8),
            extremes=torch.empty(0, 2),
            some=torch.empty(0, cols, dtype=torch.float16),
            some_half=torch.empty(0, dtype=torch.uint8),
        )
        return WeightStatistics(seen)


def _read(path: Path) -> dict[str, _Entry]:
    """By llama.cpp's tensor name."""
    try:
        with path.open("rb") as file:
            magic = file.read(4)
        entries = _read_gguf(path) if magic == b"GGUF" else _read_legacy(path.read_bytes())
    except OSError as failure:
        raise InputError(f"`{path}` cannot be read: {failure.strerror}", _HINT) from failure
    except (ValueError, KeyError, IndexError, struct.error, UnicodeDecodeError) as failure:
        raise InputError(f"`{path}` is not an importance matrix: {failure}", _HINT) from failure
    numbers = [values for entry in entries.values() for values in (entry.squares, entry.counts)]
    if not entries or not all(values.isfinite().all() and bool((values >= 0).all()) for values in numbers):
        raise InputError(f"`{path}` holds no importance that can be used", _HINT)
    return entries


def _read_gguf(path: Path) -> dict[str, _Entry]:
    from fewbits.model.gguf.checkpoint import open_reader

    stored = open_reader(path).tensors
    if other := next((tensor for tensor in stored if tensor.tensor_type.name != "F32"), None):
        raise ValueError(f"`{other.name}` is stored as {other.tensor_type.name}")
    tensors = {tensor.name: torch.from_numpy(np.array(tensor.data, np.float64)) for tensor in stored}
    names = [name.removesuffix(".in_sum2") for name in tensors if name.endswith(".in_sum2")]
    return {name: _Entry(tensors[f"{name}.in_sum2"], tensors[f"{name}.counts"]) for name in names}


def _read_legacy(content: bytes) -> dict[str, _Entry]:
    (number,) = struct.unpack_from("<i", content)
    at, entries = 4, {}
    if not 0 < number < 1 << 20:
        raise ValueError(f"{number} entries")
    for _ in range(number):
        (length,) = struct.unpack_from("<i", content, at)
        name = content[at + 4 : at + 4 + length].decode()
        calls, count = struct.unpack_from("<ii", content, at + 4 + length)
        at += 12 + length
        if not (0 < length < 4096 and 0 < count <= (len(content) - at) // 4):
            raise ValueError(f"an entry of {count} values at byte {at}")
        values = torch.from_numpy(np.frombuffer(content, "<f4", count, at).astype(np.float64))
        entries[name] = _Entry(values, torch.tensor([max(1.0, calls)], dtype=torch.float64))
        at += 4 * count
    return entries
