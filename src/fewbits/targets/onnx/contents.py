"""The types of a written model's weights, read from its graph by `onnx` alone, to be compared with the plan."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits.errors import InputError
from fewbits.targets.onnx import storage

if TYPE_CHECKING:
    from fewbits.formats import Format
    from fewbits.formats.runtime.activations import Activation

CASTS = {"FLOAT16": "fp16", "BFLOAT16": "bf16", "FLOAT": "fp32"}
_READERS = ("MatMulNBits", "GatherBlockQuantized")
_INTEGERS = "int8, multiplied as integers"


def types(path: Path) -> dict[str, str]:
    """By weight, in the words of `written_as`."""
    import onnx

    graph = read(path).graph
    reshaped = {node.output[0]: node.input[0] for node in graph.node if node.op_type == "Reshape"}
    by_weight: dict[str, str] = {}
    for node in graph.node:
        if node.op_type not in _READERS:
            continue
        codes = next(name for name in (reshaped.get(value, value) for value in node.input) if name.endswith(".codes"))
        zeros = any(value.endswith(".zeros") for value in node.input)
        said: dict[str, Any] = {attribute.name: attribute.i for attribute in node.attribute}
        name, kind = codes.removesuffix(".codes"), _name(said["bits"], said["block_size"], zeros)
        if by_weight.setdefault(name, kind) != kind:
            raise InputError(f"`{name}` is read as {by_weight[name]} and as {kind}", "the file is damaged; write it anew")
    for node in graph.node:
        if node.op_type == "DequantizeLinear" and node.input[0].endswith(".codes"):
            by_weight[node.input[0].removesuffix(".codes")] = _INTEGERS
    for tensor in graph.initializer:
        if tensor.name.endswith(".values"):
            by_weight[tensor.name.removesuffix(".values")] = CASTS[onnx.TensorProto.DataType.Name(tensor.data_type)]
    return by_weight


def written_as(fmt: Format, cols: int, activation: Activation | None = None) -> str:
    """What a weight of this format must be called by `types`: `int4_g32` for q4_0 too, which has the same values."""
    if activation:
        return _INTEGERS
    if fmt.is_cast:
        return fmt.name
    blocks = storage.blocks(fmt, cols)
    assert isinstance(blocks, storage.Blocks), blocks
    return _name(blocks.bits, blocks.size, blocks.zeros)


def read(path: Path) -> Any:
    """The graph without the values of its arrays. `path`: the file, or a folder with model.onnx."""
    from fewbits.model.onnx import inline_data

    file = path / "model.onnx" if path.is_dir() else path
    try:
        return inline_data.read(file)
    except Exception as failure:
        raise InputError(f"`{file}` cannot be read as ONNX: {failure}", "the file is missing or damaged") from failure


def _name(bits: int, size: int, zeros: bool) -> str:
    return f"int{bits}_g{size}{'_asym' if zeros else ''}"
