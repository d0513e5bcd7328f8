"""llama.cpp's importance matrix: the mean square of every input channel, per tensor, as its quantizer reads it and its tool writes it.

GGUF (current): `general.type` = imatrix; `NAME.weight.in_sum2` (sum of squares, float32 [mats, cols]) and `NAME.weight.counts`
(float32 [mats, 1]) under llama.cpp's tensor names; `imatrix.datasets`, `imatrix.chunk_count`, `imatrix.chunk_size`.
Legacy (.dat): int32 entries; each: int32 length, name, int32 calls, int32 values, float32 values (mean squares * calls).
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fewbits import architectures
from fewbits.calibration.statistics import InputStatistics, WeightStatistics
from fewbits.errors import InputError
from fewbits.files import Staged

if TYPE_CHECKING:
    from fewbits.calibration.storing import Statistics
    from fewbits.model import Model

_HINT = "give a file that llama.cpp's llama-imatrix or `fewbits calibrate --imatrix` wrote"


def write(statistics: Statistics, source: Model, path: Path) -> None:
    """In the current form. The tokens of all positions count, as they do in llama.cpp."""
    import gguf

    rename = architectures.tensor_names(source.config)
    runs = statistics.about["runs"]
    tokens, samples = sum(run["tokens"] for run in runs), sum(run["samples"] for run in runs)
    chunk = max(1, tokens // max(1, samples))
    with Staged(path) as staged:
        writer = gguf.GGUFWriter(staged, arch="", use_temp_file=False)
        writer.kv_data[0].pop("general.architecture", None)  # an importance matrix has a type instead
        writer.add_type("imatrix")
        writer.add_array("imatrix.datasets", [run["data_sha256"] for run in runs])
        writer.add_uint32("imatrix.chunk_count", max(1, tokens // chunk))
        writer.add_uint32("imatrix.chunk_size", chunk)
        for weight in source.weights:
            if statistics.site(weight.name) is None or weight.kind == "embedding":
                continue  # llama.cpp has none for a lookup, and a tied output is its embedding
            seen = statistics.input(weight.name)
            name = rename(f"{weight.name}.weight")
            squares = seen.mean_square().double() * seen.tokens()
            writer.add_tensor(f"{name}.in_sum2", squares.float().unsqueeze(0).numpy())
            writer.add_tensor(f"{name}.counts", np.array([[seen.tokens()]], np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


class ImportanceMatrix:
    """What such a file says about a model's weights: importance per column, and nothing of Hessians or gradients."""

    def __init__(self, path: Path, source: Model) -> None:
        self.path = path
        self._rename = architectures.tensor_names(source.config)
        self._squares = _read(path)
        if not any(self._rename(f"{weight.name}.weight") in self._squares for weight in source.weights):
            raise InputError(f"`{path}` names no weight of `{source.path.name}`", "is it the importance matrix of another model?")
        self._cols = {weight.name: weight.shape[1] for weight in source.weights}

    def of(self, weight: str) -> WeightStatistics | None:
        """None: the file says nothing about it."""
        found = self._squares.get(self._rename(f"{weight}.weight"))
        if found is None:
            return None
        if len(found) != self._cols[weight]:
            differs = f"`{self.path}` has {len(found)} columns for `{weight}`, the model has {self._cols[weight]}"
            raise InputError(differs, "is it the importance matrix of another model?")
        squares = found.double().expand(2, -1).clone()  # there are no halves to tell apart: both are all there is
        seen = InputStatistics(
            count=torch.tensor([1, 1]),
            total=torch.zeros_like(squares),
            square=squares,
            low=-found.sqrt(),
            high=found.sqrt(),
            first=torch.empty(0, len(found)),
            first_half=torch.empty(0, dtype=torch.uint8),
            extremes=torch.empty(0, 2),
            some=torch.empty(0, len(found), dtype=torch.float16),
            some_half=torch.empty(0, dtype=torch.uint8),
        )
        return WeightStatistics(seen)


def _read(path: Path) -> dict[str, Tensor]:
    """Mean squares by llama.cpp's tensor name."""
    try:
        with path.open("rb") as file:
            magic = file.read(4)
        found = _read_gguf(path) if magic == b"GGUF" else _read_legacy(path.read_bytes())
    except OSError as failure:
        raise InputError(f"`{path}` cannot be read: {failure.strerror}", _HINT) from failure
    except (ValueError, KeyError, IndexError, struct.error, UnicodeDecodeError) as failure:
        raise InputError(f"`{path}` is not an importance matrix: {failure}", _HINT) from failure
    if not found or not all(values.isfinite().all() and bool((values >= 0).all()) for values in found.values()):
        raise InputError(f"`{path}` holds no importance that can be used", _HINT)
    return found


def _read_gguf(path: Path) -> dict[str, Tensor]:
    import gguf

    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    found = {}
    for name, tensor in tensors.items():
        if name.endswith(".in_sum2"):
            counts = np.array(tensors[f"{name.removesuffix('.in_sum2')}.counts"].data, np.float64).reshape(-1, 1)
            squares = np.array(tensor.data, np.float64).reshape(len(counts), -1)
            found[name.removesuffix(".in_sum2")] = torch.from_numpy((squares / np.maximum(counts, 1)).mean(0)).float()
    return found


def _read_legacy(content: bytes) -> dict[str, Tensor]:
    (entries,) = struct.unpack_from("<i", content)
    at, found = 4, {}
    if not 0 < entries < 1 << 20:
        raise ValueError(f"{entries} entries")
    for _ in range(entries):
        (length,) = struct.unpack_from("<i", content, at)
        name = content[at + 4 : at + 4 + length].decode()
        calls, count = struct.unpack_from("<ii", content, at + 4 + length)
        at += 12 + length
        if not (0 < length < 4096 and 0 < count <= (len(content) - at) // 4):
            raise ValueError(f"an entry of {count} values at byte {at}")
        found[name] = torch.from_numpy(np.frombuffer(content, "<f4", count, at).copy()) / max(1, calls)
        at += 4 * count
    return found
