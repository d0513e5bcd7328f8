"""A GGUF file, memory-mapped: its tensors under the names and in the layout of the transformers module.

Quantized tensors are decoded one at a time to float32, exactly. Their `dtype` is fp16: that is what an unquantized copy of
them would be kept in, since float32 would double the size for digits that the file never had.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits import architectures, vocabularies
from fewbits.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

_DAMAGED = "the file is truncated or damaged; fetch it again"
_FLOATS = {"F32": "fp32", "F16": "fp16", "BF16": "bf16"}


class GgufFile:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._reader = open_reader(path)
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}

    @cached_property
    def fields(self) -> dict[str, Any]:
        """The metadata as plain values."""
        try:
            return {name: field.contents() for name, field in self._reader.fields.items()}
        except Exception as failure:
            raise InputError(f"the metadata of `{self.path}` cannot be read: {failure}", _DAMAGED) from failure

    @cached_property
    def config(self) -> Any:
        factors = self._tensors.get(architectures.ROPE_FACTORS)
        try:
            return architectures.config_of(self.fields, self._tensors.keys(), None if factors is None else factors.data.tolist())
        except (KeyError, TypeError, ValueError, ArithmeticError) as failure:
            raise InputError(f"the metadata of `{self.path}` does not describe a model: {failure!r}", _DAMAGED) from failure

    def names(self) -> list[str]:
        return list(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        shape = tuple(int(size) for size in self._stored[name].shape)  # GGUF gives the columns first
        return shape if name in self._transposed else shape[::-1]

    def dtype(self, name: str) -> str:
        return _FLOATS.get(self._stored[name].tensor_type.name, "fp16")

    def load(self, name: str) -> Tensor:
        import torch

        tensor = _decoded(self._stored[name])
        order = architectures.row_order(self.config, name)
        if order is not None:
            tensor = tensor[torch.tensor(order).argsort()]
        return tensor.T if name in self._transposed else tensor

    def load_slice(self, name: str, index: int) -> Tensor:
        return self.load(name)[index]

    def save_assets(self, folder: Path) -> None:
        self.config.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)

    def files(self) -> list[Path]:
        return [self.path]

    @cached_property
    def tokenizer(self) -> Any:
        return vocabularies.to_tokenizer(vocabularies.of_fields(self.fields))

    @cached_property
    def _stored(self) -> dict[str, Any]:
        """Parameter -> tensor of the file. What the module has no place for is an error: leaving it out would change the function."""
        rename = architectures.tensor_names(self.config)
        found = {name: self._tensors[stored] for name in self._skeleton.state_dict() if (stored := rename(name)) in self._tensors}
        used = {tensor.name for tensor in found.values()} | {architectures.ROPE_FACTORS}
        if unused := [name for name in self._tensors if name not in used]:
            kind = architectures.of(self.config).class_name
            raise InputError(f"`{self.path}` holds `{unused[0]}`, which {kind} has no place for", "open the original checkpoint instead")
        return found

    @cached_property
    def _transposed(self) -> set[str]:
        from transformers.pytorch_utils import Conv1D

        return {f"{name}.weight" for name, module in self._skeleton.named_modules() if isinstance(module, Conv1D)}

    @cached_property
    def _skeleton(self) -> Any:
        import torch
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(self.config)


def open_reader(path: Path) -> Any:
    import gguf

    try:
        reader = gguf.GGUFReader(path)
    except Exception as failure:  # it raises whatever the damage leads to
        reason = str(failure).strip() or type(failure).__name__
        raise InputError(f"`{path}` is not a GGUF file that can be read: {reason}", _DAMAGED) from failure
    if reader.byte_order != "I":
        raise InputError(f"`{path}` has the other byte order", "convert it with gguf-py's `gguf-convert-endian`")
    parts = reader.get_field("split.count")
    if parts is not None and parts.contents() > 1:
        raise InputError(f"`{path}` is one of {parts.contents()} parts", "join them with llama.cpp's `llama-gguf-split --merge`")
    return reader


def _decoded(tensor: Any) -> Tensor:
    import numpy as np
    import torch
    from gguf import quants

    data = np.array(tensor.data)  # a copy: torch does not take a read-only map
    if tensor.tensor_type.name in {"F32", "F16"}:
        return torch.from_numpy(data)
    if tensor.tensor_type.name == "BF16":
        return torch.from_numpy(data).view(torch.bfloat16)
    try:
        return torch.from_numpy(quants.dequantize(data, tensor.tensor_type))
    except NotImplementedError as failure:
        raise InputError(f"`{tensor.name}` is stored as {tensor.tensor_type.name}, which cannot be decoded", "update gguf") from failure
