"""A GGUF of any architecture: its matrices as weights under the names and in the layout of the file. No module is built from it."""

from __future__ import annotations

import hashlib
import re
import warnings
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits.errors import InputError
from fewbits.model.finite import checked_finite, on_a_cache_line
from fewbits.model.gguf.checkpoint import decoded, open_reader
from fewbits.model.gguf.kept import stays_in_float
from fewbits.model.matching.fingerprints import DECODED
from fewbits.model.weights import Weight

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

_FLOATS = {"F32": "fp32", "F16": "fp16", "BF16": "bf16"}
_KINDS = {"token_embd": "embedding", "per_layer_token_embd": "embedding", "output": "output"}


class GgufMatrices:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._opened = open_reader(path)
        self.tensors = {tensor.name: tensor for tensor in self._opened.tensors}
        if not re.fullmatch(r"[\w.+-]{1,64}", self.architecture):
            raise InputError(f"`{path}` is of the architecture {self.architecture[:100]!a}, which is no name", "do not trust it")
        self.weights, self.rest = self._sorted()

    @cached_property
    def fields(self) -> dict[str, Any]:
        return {name: field.contents() for name, field in self._opened.fields.items()}

    @property
    def architecture(self) -> str:
        said = self._opened.fields.get("general.architecture")
        return str(said.contents()) if said else ""

    def files(self) -> list[Path]:
        return list(self._opened.paths)

    @cached_property
    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for file in self.files():
            with file.open("rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
        return digest.hexdigest()

    def kind(self, weight: Weight) -> str:
        """The float type that its numbers are compared in."""
        name = str(self.tensors[weight.parameter].tensor_type.name)
        return name if name in _FLOATS else DECODED

    def stored(self, weight: Weight) -> Tensor:
        """(rows, cols) in the type of the file, and if it is a float type the mapped file itself: do not write to it. A quantized one
        is decoded."""
        import torch

        tensor = self.tensors[weight.parameter]
        if tensor.tensor_type.name not in _FLOATS:
            return decoded(tensor, weight.expert)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*not writable.*")
            data = torch.from_numpy(tensor.data if weight.expert is None else tensor.data[weight.expert])
        return data.view(torch.bfloat16) if tensor.tensor_type.name == "BF16" else data

    def load(self, weight: Weight) -> Tensor:
        """(rows, cols) float32; non-finite values are refused by name."""
        return checked_finite(on_a_cache_line(decoded(self.tensors[weight.parameter], weight.expert).float().contiguous()), weight.name)

    def tensor(self, name: str) -> Tensor:
        """One of `rest`."""
        return checked_finite(decoded(self.tensors[name], None), name)

    def nbytes(self, parameter: str) -> int:
        return int(self.tensors[parameter].n_bytes)

    def keeping(self, parameters: Mapping[str, object] | set[str]) -> GgufMatrices:
        """The same file with these tensors among the rest, which is carried over as it is."""
        other = object.__new__(GgufMatrices)
        other.__dict__.update(self.__dict__)
        other.weights = tuple(weight for weight in self.weights if weight.parameter not in parameters)
        other.rest = (*self.rest, *(name for name in self.tensors if name in parameters))
        return other

    def _sorted(self) -> tuple[tuple[Weight, ...], tuple[str, ...]]:
        weights: list[Weight] = []
        rest: list[str] = []
        for name, tensor in self.tensors.items():
            shape = tuple(int(size) for size in reversed(tensor.shape))
            if stays_in_float(name, shape, self.architecture) or len(shape) > 3 or not name.endswith(".weight"):
                rest.append(name)
                continue
            module, dtype = name.removesuffix(".weight"), _FLOATS.get(tensor.tensor_type.name, "fp16")
            kind = _KINDS.get(module) or _kind_in_block(module)
            tied = "output" if module == "token_embd" and "output.weight" not in self.tensors else None
            one = Weight(module, (shape[-2], shape[-1]), kind, dtype, tied_to=tied)
            count = shape[0] if len(shape) == 3 else 0
            weights += [replace(one, name=f"{name}.{i}", together=name, expert=i) for i in range(count)] if count else [one]
        if not weights:
            raise InputError(f"`{self.path}` holds no matrix that could be quantized", "is it the file of a model?")
        return tuple(weights), tuple(rest)


def _kind_in_block(name: str) -> str:
    last = name.rpartition(".")[2]
    return "attention" if last.startswith("attn") else "mlp" if last.startswith("ffn") else "other"
