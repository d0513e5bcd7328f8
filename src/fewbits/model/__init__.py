"""A path or hub id comes in; a `Model` goes out: a list of weights, each a (rows, cols) matrix, and the few tensors that stay in float.

What is a weight follows from the module graph of transformers, and which parameters hold experts from a small trial (experts.py): no
architecture has code of its own here. checkpoints/, gguf/ and onnx/ read the files, blocks.py and walk.py run a model one block at a time,
placement.py says on which device.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits.errors import InputError
from fewbits.model import checkpoints
from fewbits.model.checkpoints import Checkpoint, hub
from fewbits.model.checkpoints.converted import converted
from fewbits.model.finite import checked_finite, on_a_cache_line
from fewbits.model.gguf.quantized import StoredTypes
from fewbits.model.module import filled_module, skeleton_of
from fewbits.model.tokenizer import load_tokenizer
from fewbits.model.weights import Weight, kind_of

if TYPE_CHECKING:
    from torch import Tensor, nn


class Model:
    layout: str | None = None  # the container whose names its weights have; None: those of the transformers module

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self._skeleton = skeleton_of(self.config, self.path, len(checkpoint.names()))
        self.checkpoint = converted(checkpoint, self._skeleton)
        self._stored_names = set(self.checkpoint.names())
        self.weights, self.rest = self._walk()

    @property
    def path(self) -> Path:
        return self.checkpoint.path

    @property
    def name(self) -> str:
        """What it is called in files and reports: the name of its repository, folder or file."""
        return hub.name_of(self.path)

    @property
    def published_as(self) -> str:
        """Where others find it: `owner/name` of a model of the hub; else its name."""
        return hub.repository_of(self.path) or self.name

    @property
    def config(self) -> Any:
        return self.checkpoint.config

    @property
    def metadata_file(self) -> Path | None:
        """A GGUF whose metadata the next file gets; None: the source is no GGUF."""
        return self.path if self.path.is_file() else None

    @property
    def lossy(self) -> StoredTypes | None:
        """How its weights are stored, if they were rounded from floats that it no longer has."""
        stored = getattr(self.checkpoint, "source_quantization", None)
        return stored if isinstance(stored, StoredTypes) and stored.lossy else None

    def load(self, weight: Weight) -> Tensor:
        """(rows, cols) float32; non-finite values are refused by name."""
        return checked_finite(on_a_cache_line(self.stored(weight).float().contiguous()), weight.name)

    def stored(self, weight: Weight) -> Tensor:
        """(rows, cols) in the type of the checkpoint: not checked, and perhaps the mapped file. Do not write to it."""
        stored = self._stored(weight.parameter)
        if weight.expert is None:
            return weight.view(self.checkpoint.load(stored))
        matrix = self.checkpoint.load_slice(stored, weight.expert)
        return matrix.T if weight.transposed else matrix

    def tensor(self, name: str) -> Tensor:
        """One of `rest`, by the name of its parameter."""
        return checked_finite(self.checkpoint.load(self._stored(name)), name)

    def module(self) -> nn.Module:
        """The float32 transformers module: the reference that everything is judged against."""
        matrices = ((weight, self.load(weight)) for weight in self.weights)
        return filled_module(self.config, matrices, ((name, self.tensor(name)) for name in self.rest))

    @cached_property
    def tokenizer(self) -> Any:
        in_file = getattr(self.checkpoint, "tokenizer", None)  # a GGUF carries its own
        return in_file or load_tokenizer(self.path)

    @cached_property
    def fingerprint(self) -> str:
        """sha256 over the source files: every output names it."""
        digest = hashlib.sha256()
        for file in self.checkpoint.files():
            with file.open("rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
        return digest.hexdigest()

    def _walk(self) -> tuple[tuple[Weight, ...], tuple[str, ...]]:
        from torch import nn
        from transformers.pytorch_utils import Conv1D

        from fewbits.model import experts, reached

        weights: list[Weight] = []
        seen: dict[int, int] = {}  # id of the parameter -> index of its weight
        taken: set[str] = set()  # parameters that are weights
        stored = self._all_checked()
        experts_of = experts.find(self._skeleton, self.config)  # it multiplies, so every size must have been checked against the file
        for name, module in self._skeleton.named_modules():
            for parameter_name, tensor in module.named_parameters(name, recurse=False):
                if (transposed := experts_of.get(parameter_name)) is not None:
                    taken.add(parameter_name)
                    weights += self._experts(parameter_name, self.checkpoint.dtype(stored[parameter_name]), tuple(tensor.shape), transposed)
            convolution = isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) and "weight" in module._parameters
            if not convolution and not isinstance(module, nn.Linear | nn.Embedding | Conv1D):
                continue
            parameter = module.weight
            taken.add(f"{name}.weight")
            if id(parameter) in seen:
                first = weights[seen[id(parameter)]]
                weights[seen[id(parameter)]] = replace(first, tied_to=name)
                continue
            transposed = isinstance(module, Conv1D)
            rows, cols = parameter.flatten(1).shape
            if transposed:
                rows, cols = cols, rows
            kind = "convolution" if convolution else "embedding" if isinstance(module, nn.Embedding) else kind_of(name)
            seen[id(parameter)] = len(weights)
            weights.append(Weight(name, (rows, cols), kind, self.checkpoint.dtype(stored[f"{name}.weight"]), transposed))
        return reached.with_towers(weights, self._skeleton, self.config), tuple(name for name in stored if name not in taken)

    def _all_checked(self) -> dict[str, str]:
        """The checkpoint's name of every parameter and buffer that it must have, in the shape that it must have."""
        one_name_each = dict(self._skeleton.named_parameters())
        every = {name for name, _ in self._skeleton.named_parameters(remove_duplicate=False)}  # a tied bias has two names, stored once
        buffers = {name: tensor for name, tensor in self._skeleton.state_dict().items() if name not in every}
        return {name: self._checked(name, tuple(tensor.shape)) for name, tensor in (one_name_each | buffers).items()}

    def _experts(self, parameter: str, dtype: str, shape: tuple[int, ...], transposed: bool) -> list[Weight]:
        count, *sides = shape
        rows, cols = reversed(sides) if transposed else sides
        kind = kind_of(parameter)
        return [Weight(f"{parameter}.{i}", (rows, cols), kind, dtype, transposed, together=parameter, expert=i) for i in range(count)]

    def _checked(self, name: str, shape: tuple[int, ...]) -> str:
        stored = self._stored(name)
        if (stored_shape := self.checkpoint.shape(stored)) != shape:
            owner = name.removesuffix(".weight")
            raise InputError(f"`{owner}` is {stored_shape} in the weights and {shape} by config.json", "the two do not belong together")
        return stored

    def _stored(self, name: str) -> str:
        """The checkpoint's name of a parameter: some files leave the base model's prefix out, some add it."""
        prefix = f"{getattr(self._skeleton, 'base_model_prefix', '')}."
        for candidate in (name, name.removeprefix(prefix), prefix + name):
            if candidate in self._stored_names:
                return candidate
        raise InputError(f"`{name}` is missing from `{self.path}`", "the weights do not belong to this config.json, or are incomplete")


def open(where: str | Path, offline: bool = False) -> Model:
    return Model(checkpoints.open(where, offline))
