"""Hostile ONNX files: graphs that lie about their tensors, lead out of their folder, or never end."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from benign import Benign, graph
from cases import case
from onnx import TensorProto, helper

FLOAT = TensorProto.FLOAT


def saved(folder: Path, content: bytes) -> Path:
    (folder / "model.onnx").write_bytes(content)
    return folder / "model.onnx"


def model(nodes: list[Any], tensors: list[Any], inputs: list[Any] | None = None, outputs: tuple[str, ...] = ("y",)) -> bytes:
    ends = [helper.make_tensor_value_info("x", FLOAT, ["n", 64])] if inputs is None else inputs
    body = helper.make_graph(nodes, "graph", ends, [helper.make_tensor_value_info(name, FLOAT, None) for name in outputs], tensors)
    made: bytes = helper.make_model(body, opset_imports=[helper.make_opsetid("", 20)], ir_version=8).SerializeToString()
    return made


def product(tensor: Any) -> bytes:
    return model([helper.make_node("MatMul", ["x", "w"], ["y"])], [tensor])


def outside(folder: Path, location: str, offset: int = 0, length: int = 64 * 32 * 4) -> Path:
    """A weight whose bytes lie in another file; those are there."""
    (folder.parent / "outside.bin").write_bytes(np.ones(1 << 14, np.float32).tobytes())
    tensor = TensorProto(name="w", data_type=FLOAT, dims=[64, 32], data_location=TensorProto.EXTERNAL)
    for key, value in {"location": location, "offset": offset, "length": length}.items():
        tensor.external_data.add(key=key, value=str(value))
    return saved(folder, product(tensor))


def varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out, value = out + bytes([value & 127 | 128]), value >> 7
    return out + bytes([value])


@case("onnx")
def not_a_graph(folder: Path, _: Benign) -> Path:
    """bytes that are no protobuf"""
    return saved(folder, b"\xff" * 1000)


@case("onnx")
def no_bytes(folder: Path, _: Benign) -> Path:
    """an empty file, which is a valid message without a graph"""
    return saved(folder, b"")


@case("onnx")
def message_beyond_its_end(folder: Path, _: Benign) -> Path:
    """a graph that says it has 2^60 bytes"""
    return saved(folder, b"\x3a" + varint(1 << 60) + b"abc")


@case("onnx")
def deep_messages(folder: Path, _: Benign) -> Path:
    """graphs in attributes of nodes in graphs, 5,000 deep"""
    inner = b""
    for _depth in range(5000):
        attribute = b"\x0a\x01g" + b"\x32" + varint(len(inner)) + inner
        node = b"\x12\x01z\x22\x02If\x2a" + varint(len(attribute)) + attribute
        inner = b"\x0a" + varint(len(node)) + node
    return saved(folder, b"\x08\x08\x3a" + varint(len(inner)) + inner)


@case("onnx")
def data_up_the_tree(folder: Path, _: Benign) -> Path:
    """external data that lies up and out of the folder"""
    return outside(folder, "../outside.bin")


@case("onnx")
def data_at_the_root(folder: Path, _: Benign) -> Path:
    """external data with an absolute path"""
    return outside(folder, str(folder.parent / "outside.bin"))


@case("onnx")
def data_through_a_link(folder: Path, _: Benign) -> Path:
    """external data in a link out of the folder"""
    (folder / "weights.bin").symlink_to(folder.parent / "outside.bin")
    return outside(folder, "weights.bin")


@case("onnx")
def data_in_a_pipe(folder: Path, _: Benign) -> Path:
    """external data in a pipe that nobody writes to"""
    os.mkfifo(folder / "weights.bin")
    return outside(folder, "weights.bin")


@case("onnx")
def data_beyond_the_end(folder: Path, _: Benign) -> Path:
    """external data at an offset behind the end of its file"""
    path = outside(folder, "weights.bin", offset=1 << 40)
    (folder / "weights.bin").write_bytes(bytes(64 * 32 * 4))
    return path


@case("onnx")
def data_of_negative_length(folder: Path, _: Benign) -> Path:
    """external data of -8 bytes"""
    path = outside(folder, "weights.bin", length=-8)
    (folder / "weights.bin").write_bytes(bytes(64 * 32 * 4))
    return path


@case("onnx")
def data_without_a_name(folder: Path, _: Benign) -> Path:
    """external data in a file with no name: the folder itself"""
    return outside(folder, "")


@case("onnx")
def vast_dimensions(folder: Path, _: Benign) -> Path:
    """a weight of 2^40 x 2^40 values and 4 bytes"""
    return saved(folder, product(TensorProto(name="w", data_type=FLOAT, dims=[1 << 40, 1 << 40], raw_data=b"abcd")))


@case("onnx")
def dimensions_around_the_end(folder: Path, _: Benign) -> Path:
    """dimensions whose product is 2^64"""
    return saved(folder, product(TensorProto(name="w", data_type=FLOAT, dims=[1 << 32, 1 << 32], raw_data=b"")))


@case("onnx")
def negative_dimensions(folder: Path, _: Benign) -> Path:
    """a weight of -64 x -32 values: as many as it has bytes for"""
    return saved(folder, product(TensorProto(name="w", data_type=FLOAT, dims=[-64, -32], raw_data=bytes(64 * 32 * 4))))


@case("onnx")
def few_bytes(folder: Path, _: Benign) -> Path:
    """a weight of 64 x 32 values in 16 bytes"""
    return saved(folder, product(TensorProto(name="w", data_type=FLOAT, dims=[64, 32], raw_data=bytes(16))))


@case("onnx")
def unknown_type(folder: Path, _: Benign) -> Path:
    """a weight of a type that nobody knows"""
    return saved(folder, product(TensorProto(name="w", data_type=99, dims=[64, 32], raw_data=bytes(64 * 32 * 4))))


@case("onnx", passes=("inspect",))
def circle(folder: Path, _: Benign) -> Path:
    """two nodes, each waiting for the other"""
    weight = helper.make_tensor("w", FLOAT, [64, 64], np.ones(64 * 64, np.float32))
    nodes = [helper.make_node("MatMul", ["b", "w"], ["a"]), helper.make_node("MatMul", ["a", "w"], ["b"])]
    return saved(folder, model([*nodes, helper.make_node("Add", ["a", "x"], ["y"])], [weight]))


@case("onnx", passes=("inspect",))
def missing_input(folder: Path, _: Benign) -> Path:
    """a node that reads what nobody gives"""
    weight = helper.make_tensor("w", FLOAT, [64, 32], np.ones(64 * 32, np.float32))
    return saved(folder, model([helper.make_node("MatMul", ["nowhere", "w"], ["y"])], [weight]))


@case("onnx", passes=("inspect",))
def node_without_outputs(folder: Path, _: Benign) -> Path:
    """a node with no input and no output, to be indexed by its first"""
    weight = helper.make_tensor("w", FLOAT, [64, 32], np.ones(64 * 32, np.float32))
    nodes = [helper.make_node(kind, [], []) for kind in ("Constant", "Identity", "If", "Gather", "MatMul", "Transpose")]
    return saved(folder, model([helper.make_node("MatMul", ["x", "w"], ["y"]), *nodes], [weight]))


@case("onnx", passes=("inspect",))
def transposition_out_of_range(folder: Path, _: Benign) -> Path:
    """axes that the tensor does not have"""
    weight = helper.make_tensor("w", FLOAT, [64, 32], np.ones(64 * 32, np.float32))
    nodes = [helper.make_node("Transpose", ["w"], ["t"], perm=[7, -9]), helper.make_node("MatMul", ["x", "t"], ["y"])]
    return saved(folder, model(nodes, [weight]))


@case("onnx", passes=("inspect",))
def vast_constant(folder: Path, _: Benign) -> Path:
    """a constant of 2^40 values, made when the file is loaded"""
    weight = helper.make_tensor("w", FLOAT, [64, 32], np.ones(64 * 32, np.float32))
    shape = helper.make_tensor("s", TensorProto.INT64, [2], [1 << 30, 1 << 10])
    nodes = [helper.make_node("ConstantOfShape", ["s"], ["c"]), helper.make_node("MatMul", ["x", "w"], ["p"])]
    nodes += [helper.make_node("ReduceMax", ["c"], ["m"], keepdims=0), helper.make_node("Add", ["p", "m"], ["y"])]
    return saved(folder, model(nodes, [weight, shape]))


@case("onnx", passes=("inspect", "quantize"))
def vast_input(folder: Path, _: Benign) -> Path:
    """an input of 2^40 values: random ones would be made up to try the file"""
    weight = helper.make_tensor("w", FLOAT, [64, 32], np.ones(64 * 32, np.float32))
    ends = [helper.make_tensor_value_info("x", FLOAT, [1 << 34, 64])]
    return saved(folder, model([helper.make_node("MatMul", ["x", "w"], ["y"])], [weight], ends))


@case("onnx", passes=("inspect",), fails=("verify", "verify against"))
def weights_that_are_not_finite(folder: Path, _: Benign) -> Path:
    """one NaN in one weight"""
    made = graph()
    values = np.frombuffer(made.graph.initializer[0].raw_data, np.float32).copy()
    values[17] = np.nan
    made.graph.initializer[0].raw_data = values.tobytes()
    return saved(folder, made.SerializeToString())


@case("onnx", passes=("inspect",))
def unknown_operator(folder: Path, _: Benign) -> Path:
    """an operator of somebody's own library"""
    made = graph()
    made.graph.node.append(helper.make_node("Run", ["y"], ["z"], domain="evil.example"))
    made.opset_import.append(helper.make_opsetid("evil.example", 1))
    del made.graph.output[:]
    made.graph.output.append(helper.make_tensor_value_info("z", FLOAT, None))
    return saved(folder, made.SerializeToString())


@case("onnx", passes=("inspect", "quantize", "verify", "verify against"))
def thousands_of_nodes(folder: Path, _: Benign) -> Path:
    """a chain of 5,000 nodes that pass a value on, against whoever follows it by recursion or squares"""
    made = graph()
    made.graph.node[0].output[0] = "v0"
    made.graph.node.extend(helper.make_node("Identity", [f"v{i}"], [f"v{i + 1}" if i < 4_999 else "y"]) for i in range(5_000))
    return saved(folder, made.SerializeToString())
