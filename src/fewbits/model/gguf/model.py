"""A model as llama.cpp lays it out: the matrices of a float GGUF under its own names, with what is known of each from its checkpoint.

The file says how a model is stored, and is carried over as it is but for the matrices that a plan quantizes. The checkpoint, where there
is one, says how the model computes: statistics are taken there and follow each matrix's rows into the file (calibration/matched.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from fewbits.errors import InputError
from fewbits.model import Model
from fewbits.model.gguf import metadata, settings, vocabularies
from fewbits.model.gguf.quantized import StoredTypes, stored_types

if TYPE_CHECKING:
    from torch import Tensor

    from fewbits.model.checkpoints import Checkpoint
    from fewbits.model.gguf.matrices import GgufMatrices
    from fewbits.model.matching import Match
    from fewbits.model.weights import Weight

LAYOUT = "gguf"


class GgufModel(Model):
    """For planning, quantizing and writing a model like any other; it has no module."""

    layout = LAYOUT

    def __init__(
        self, file: GgufMatrices, origin: Model | None = None, matches: Mapping[str, Match] | None = None, remark: str = ""
    ) -> None:
        """`origin`: the checkpoint, which `matches` leads to by the names of the file's weights. `remark`: what a reader of the result
        should know of the two."""
        self.file, self.origin, self.matches, self.remark = file, origin, dict(matches or {}), remark
        self.checkpoint = cast("Checkpoint", self)  # as far as writing an artifact asks: its files and what is saved beside the weights
        self.weights, self.rest = tuple(self._as_in_checkpoint(weight) for weight in file.weights), file.rest

    @property
    def path(self) -> Path:
        return self.origin.path if self.origin else self.file.path

    @property
    def metadata_file(self) -> Path:
        """A GGUF whose metadata the next file gets."""
        return self.file.path

    @property
    def source_quantization(self) -> StoredTypes | None:
        return stored_types(self.file.tensors.values()) if self.origin is None else None

    @cached_property
    def config(self) -> Any:
        return self.origin.config if self.origin else settings.config_of(self.file.fields, len(self.file.tensors), self.file.path)

    @cached_property
    def tokenizer(self) -> Any:
        """An error if nothing here knows the rules of its vocabulary; a runtime does."""
        return self.origin.tokenizer if self.origin else vocabularies.to_tokenizer(vocabularies.of_fields(self.file.fields))

    @cached_property
    def fingerprint(self) -> str:
        hashes = [self.file.fingerprint] + ([self.origin.fingerprint] if self.origin else [])
        return hashlib.sha256(" ".join(hashes).encode()).hexdigest()

    def load(self, weight: Weight) -> Tensor:
        return self.file.load(weight)

    def tensor(self, name: str) -> Tensor:
        return self.file.tensor(name)

    def module(self) -> Any:
        raise InputError(f"`{self.file.path.name}` is laid out for llama.cpp: no module is made of it", "run it in llama.cpp")

    def names(self) -> list[str]:
        return list(self.file.tensors)

    def files(self) -> list[Path]:
        return [*(self.origin.checkpoint.files() if self.origin else []), *self.file.files()]

    def save_assets(self, folder: Path) -> None:
        if self.origin:
            self.origin.checkpoint.save_assets(folder)
        metadata.save(self.file.path, folder)

    def _as_in_checkpoint(self, weight: Weight) -> Weight:
        """With the type and the kind of the weight that it comes from."""
        match = self.matches.get(weight.name)
        if match is None or self.origin is None:
            return weight
        of = self._origins[match.sources[0]]
        kind = weight.kind if weight.kind in ("embedding", "output") or of.kind in ("embedding", "output") else of.kind
        return replace(weight, dtype=of.dtype, kind=kind)

    @cached_property
    def _origins(self) -> dict[str, Weight]:
        return {weight.name: weight for weight in self.origin.weights} if self.origin else {}
