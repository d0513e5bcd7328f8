"""Layers of the transformers module that read a weight as the file stores it, while the graph is traced.

A layer remains the same object and keeps what its class adds (Gemma scales its embedding, OPT shifts its positions): only the base class
that multiplies or looks up is exchanged. Buffers with the shape of the arrays, but without memory, stand for them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from fewbits.targets.onnx.storage import Store

_DOMAIN = "com.microsoft"
OPSET = 20  # of the operators that are not Microsoft's


class Reader:
    """One stored weight, and the module whose buffers hold it; a tied output reads through the embedding's."""

    def __init__(self, owner: nn.Module, store: Store) -> None:
        self.owner, self.store = owner, store
        for name, spec in store.specs().items():
            owner.register_buffer(name, torch.zeros((), dtype=getattr(torch, spec.dtype)).expand(spec.shape))

    def linear(self, x: Tensor) -> Tensor:  # (..., cols) -> (..., rows)
        owner: Any = self.owner
        if self.store.activation:
            return self._integer_linear(x)
        if self.store.blocks is None:
            return F.linear(x, owner.values.float())
        rows, cols = self.store.shape
        attributes = self._attributes() | {"K": cols, "N": rows, "accuracy_level": self.store.accuracy_level}
        return _op("MatMulNBits", (x, owner.codes, owner.scales, *self._zeros()), attributes, (*x.shape[:-1], rows))

    def _integer_linear(self, x: Tensor) -> Tensor:  # see qdq.py
        owner: Any = self.owner
        assert self.store.activation
        given = (owner.input_scale, owner.input_zero)
        low = _op("Clip", (x, owner.input_low), {}, x.shape, "") if self.store.activation.symmetric else x
        rounded = _op("QuantizeLinear", (low, *given), {}, x.shape, "", torch.uint8)
        inputs = _op("DequantizeLinear", (rounded, *given), {}, x.shape, "")
        weight = _op("DequantizeLinear", (owner.codes, owner.scales, owner.zeros), {"axis": 1}, owner.codes.shape, "")
        return _op("MatMul", (inputs, weight), {}, (*x.shape[:-1], self.store.shape[0]), "")

    def gather(self, ids: Tensor) -> Tensor:  # (...) -> (..., cols)
        owner: Any = self.owner
        if self.store.blocks is None:
            return F.embedding(ids, owner.values).float()
        rows, cols = self.store.shape
        codes = owner.codes.reshape(rows, -1)
        padded = codes.shape[1] * 8 // self.store.blocks.bits
        attributes = self._attributes() | {"gather_axis": 0, "quantize_axis": 1}
        values = _op("GatherBlockQuantized", (codes, ids, owner.scales, *self._zeros()), attributes, (*ids.shape, padded))
        return values if padded == cols else values[..., :cols]

    def _zeros(self) -> tuple[Tensor, ...]:
        owner: Any = self.owner
        return (owner.zeros,) if self.store.blocks and self.store.blocks.zeros else ()

    def _attributes(self) -> dict[str, int]:
        assert self.store.blocks
        return {"bits": self.store.blocks.bits, "block_size": self.store.blocks.size}


class _Linear(nn.Linear):
    reader: Reader

    def forward(self, x: Tensor) -> Tensor:
        y = self.reader.linear(x)
        return y if self.bias is None else y + self.bias


class _Conv1D(Conv1D):  # type: ignore[misc]  # transformers is untyped
    reader: Reader

    def forward(self, x: Tensor) -> Tensor:
        bias: Tensor = self.bias
        return self.reader.linear(x) + bias


class _Embedding(nn.Embedding):
    reader: Reader

    def forward(self, ids: Tensor) -> Tensor:
        return self.reader.gather(ids)


def _kernel(self: Any) -> Tensor:
    """A convolution's weight, which is never quantized and flat in the file. Some modules (LFM2) take it and convolve themselves."""
    values: Tensor = self.reader.owner.values
    return values.float().reshape(self.out_channels, self.in_channels // self.groups, *self.kernel_size)


_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_READING: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: _Linear,
    Conv1D: _Conv1D,
    nn.Embedding: _Embedding,
    **{plain: type(f"_{plain.__name__}", (plain,), {"weight": property(_kernel)}) for plain in _CONVOLUTIONS},
}


def replace(module: nn.Module, store: Store) -> Reader:
    """Let this layer read a stored weight of its own."""
    return share(module, Reader(module, store))


def share(module: nn.Module, reader: Reader) -> Reader:
    """Let this layer read a weight that another one holds."""
    layer: Any = module
    del layer.weight
    if not isinstance(module, _CONVOLUTIONS):
        layer.weight = torch.empty(0)  # Gemma asks for its dtype; computing with it must fail
    plain, reading = next((plain, reading) for plain, reading in _READING.items() if isinstance(module, plain))
    cls = type(module)
    # as the last base, `reading` is what a subclass's own forward reaches through super(); one that reads `weight` itself is left out
    bases = (reading, cls) if plain is nn.Linear and _multiplies_itself(cls) else (cls, reading)
    layer.__class__ = reading if cls is plain else type(cls.__name__, bases, {})
    layer.reader = reader
    return reader


def _multiplies_itself(cls: type[nn.Module]) -> bool:
    """Whether a subclass of Linear (Falcon's) computes what Linear does in a forward of its own, without Linear's: seen in a trial."""
    x, weight, bias = (torch.arange(size).float().sin().reshape(shape) for size, shape in ((10, (2, 5)), (15, (3, 5)), (3, (3,))))
    tried: Any = cls.__new__(cls)
    nn.Linear.__init__(tried, 5, 3)
    tried.weight, tried.bias = nn.Parameter(weight), nn.Parameter(bias)
    try:
        with torch.no_grad():
            return cls.forward is not nn.Linear.forward and torch.allclose(tried(x), F.linear(x, weight, bias), atol=1e-5)
    except Exception:  # a forward with other arguments, or one that needs what its own __init__ sets
        return False


def _op(
    name: str,
    inputs: tuple[Tensor, ...],
    attributes: dict[str, int],
    shape: tuple[int, ...],
    domain: str = _DOMAIN,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    version = 1 if domain else OPSET
    out: Tensor = torch.onnx.ops.symbolic(f"{domain}::{name}", inputs, {**attributes}, dtype=dtype, shape=shape, version=version)
    return out
