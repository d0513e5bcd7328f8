"""Small ONNX graphs for tests, each with one way of reading a weight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper

FLOAT, FLOAT16, INT64 = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.INT64
node = helper.make_node


def values(*shape: int, seed: int = 0, dtype: Any = np.float32) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def model(
    nodes: Sequence[Any],
    tensors: dict[str, Any],
    inputs: dict[str, tuple[int, Sequence[int | str]]],
    outputs: Sequence[str] = ("y",),
    kind: int = FLOAT,
    opset: int = 20,
    also_inputs: Sequence[str] = (),
) -> Any:
    """`also_inputs`: tensors that can be given as inputs, too."""
    declared = [helper.make_tensor_value_info(name, *entry) for name, entry in inputs.items()]
    declared += [helper.make_tensor_value_info(name, FLOAT, tensors[name].shape) for name in also_inputs]
    graph = helper.make_graph(
        list(nodes),
        "graph",
        declared,
        [helper.make_tensor_value_info(name, kind, None) for name in outputs],
        [value if isinstance(value, TensorProto) else numpy_helper.from_array(value, name) for name, value in tensors.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def branch(tensors: dict[str, Any], *nodes: Any) -> Any:
    """One side of an If."""
    outputs = [helper.make_tensor_value_info(nodes[-1].output[0], FLOAT, None)]
    return helper.make_graph(list(nodes), "branch", [], outputs, [numpy_helper.from_array(value, key) for key, value in tensors.items()])


X = {"x": (FLOAT, ["batch", "tokens", 64])}
FLAT = {"x": (FLOAT, ["batch", 64])}
IDS = {"ids": (INT64, ["batch", "tokens"])}
IMAGE = {"x": (FLOAT, ["batch", 8, 9, 9])}


def _step() -> Any:
    """A loop's body: what comes in is multiplied and goes round again."""
    entries = [("i", INT64, []), ("go", TensorProto.BOOL, []), ("h", FLOAT, None), ("on", TensorProto.BOOL, []), ("n", FLOAT, None)]
    i, go, h, on, n = (helper.make_tensor_value_info(*entry) for entry in entries)
    return helper.make_graph([node("MatMul", ["h", "w"], ["n"]), node("Identity", ["go"], ["on"])], "body", [i, go, h], [on, n])


# name -> (graph, weights that are packed, expected operators)
PACKED: dict[str, tuple[Any, int, tuple[str, ...]]] = {
    "matmul": (model([node("MatMul", ["x", "w"], ["y"], name="layer")], {"w": values(64, 24)}, X), 1, ("MatMulNBits",)),
    "matmul of a vector": (model([node("MatMul", ["x", "w"], ["y"])], {"w": values(64, 24)}, {"x": (FLOAT, [64])}), 1, ("MatMulNBits",)),
    "matmul, transposed on the way": (
        model([node("Transpose", ["w"], ["t"], perm=[1, 0]), node("MatMul", ["x", "t"], ["y"])], {"w": values(24, 64)}, X),
        1,
        ("MatMulNBits",),
    ),
    "matmul, bias added": (
        model(
            [node("MatMul", ["x", "onnx::MatMul_7"], ["m"]), node("Add", ["layer.bias", "m"], ["y"])],
            {"onnx::MatMul_7": values(64, 24), "layer.bias": values(24, seed=1)},
            X,
        ),
        1,
        ("MatMulNBits", "Add"),
    ),
    "gemm, transB, alpha, beta, bias": (
        model([node("Gemm", ["x", "w", "c"], ["y"], transB=1, alpha=0.5, beta=2.0)], {"w": values(24, 64), "c": values(24, seed=1)}, FLAT),
        1,
        ("Mul", "MatMulNBits", "Mul", "Add"),
    ),
    "gemm, transA, matrix added": (
        model(
            [node("Gemm", ["x", "w", "c"], ["y"], transA=1)],
            {"w": values(64, 24), "c": values(5, 24, seed=1)},
            {"x": (FLOAT, [64, 5])},
        ),
        1,
        ("Transpose", "MatMulNBits", "Add"),
    ),
    "gather": (model([node("Gather", ["w", "ids"], ["y"])], {"w": values(32, 64)}, IDS), 1, ("GatherBlockQuantized",)),
    "gather, last block padded": (
        model([node("Gather", ["w", "ids"], ["y"])], {"w": values(32, 40)}, IDS),
        1,
        ("GatherBlockQuantized", "Slice"),
    ),
    "tied: gathered and multiplied": (
        model(
            [
                node("Gather", ["w", "ids"], ["h"]),
                node("Transpose", ["w"], ["t"], perm=[1, 0]),
                node("MatMul", ["h", "t"], ["y"]),
            ],
            {"w": values(32, 64)},
            IDS,
        ),
        1,
        ("Reshape", "GatherBlockQuantized", "MatMulNBits"),
    ),
    "shared by two products": (
        model(
            [node("MatMul", ["x", "w"], ["a"]), node("Neg", ["x"], ["n"]), node("MatMul", ["n", "w"], ["y"])],
            {"w": values(64, 24)},
            X,
            ("a", "y"),
        ),
        1,
        ("MatMulNBits", "Neg", "MatMulNBits"),
    ),
    "constant node": (
        model([node("Constant", [], ["w"], value=numpy_helper.from_array(values(64, 24))), node("MatMul", ["x", "w"], ["y"])], {}, X),
        1,
        ("MatMulNBits",),
    ),
    "stored in float16, cast": (
        model(
            [node("Cast", ["w"], ["c"], to=FLOAT), node("MatMul", ["x", "c"], ["y"])],
            {"w": values(64, 24, dtype=np.float16)},
            X,
        ),
        1,
        ("MatMulNBits",),
    ),
    "inside an if, stored outside and inside": (
        model(
            [
                node(
                    "If",
                    ["take"],
                    ["y"],
                    name="choose",
                    then_branch=branch(
                        {"inner": values(24, 24, seed=3)}, node("MatMul", ["x", "w"], ["h"]), node("MatMul", ["h", "inner"], ["p"])
                    ),
                    else_branch=branch({"inner": values(64, 24, seed=4)}, node("MatMul", ["x", "inner"], ["q"])),
                )
            ],
            {"w": values(64, 24)},
            X | {"take": (TensorProto.BOOL, [])},
        ),
        3,
        ("If",),
    ),
    "inside a loop": (
        model(
            [node("Loop", ["twice", "", "x"], ["y"], body=_step())],
            {"w": values(64, 64), "twice": np.array(2, np.int64)},
            X,
        ),
        1,
        ("Loop",),
    ),
    "conv": (
        model([node("Conv", ["x", "w", "b"], ["y"], pads=[1, 1, 1, 1])], {"w": values(6, 8, 3, 3), "b": values(6, seed=1)}, IMAGE),
        1,
        ("DequantizeLinear", "Conv"),
    ),
    "conv in groups, before opset 13": (
        model([node("Conv", ["x", "w"], ["y"], group=2)], {"w": values(16, 4, 3, 3)}, IMAGE, opset=11),
        1,
        ("DequantizeLinear", "Conv"),
    ),
}

_HALF = {"x": (FLOAT16, ["batch", "tokens", 64])}
HALVES: dict[str, Any] = {  # the same in a graph that computes in float16
    "matmul": model([node("MatMul", ["x", "w"], ["y"])], {"w": values(64, 24, dtype=np.float16)}, _HALF, kind=FLOAT16),
    "gather": model([node("Gather", ["w", "ids"], ["y"])], {"w": values(32, 64, dtype=np.float16)}, IDS, kind=FLOAT16),
    "gemm": model(
        [node("Gemm", ["x", "w", "c"], ["y"], alpha=0.5)],
        {"w": values(64, 24, dtype=np.float16), "c": values(24, dtype=np.float16)},
        {"x": (FLOAT16, ["batch", 64])},
        kind=FLOAT16,
    ),
    "conv": model(
        [node("Conv", ["x", "w"], ["y"])], {"w": values(6, 8, 3, 3, dtype=np.float16)}, {"x": (FLOAT16, [1, 8, 9, 9])}, kind=FLOAT16
    ),
}

# name -> (graph, words of the reason)
KEPT: dict[str, tuple[Any, str]] = {
    "batched": (model([node("MatMul", ["x", "w"], ["y"])], {"w": values(3, 64, 24)}, X), "batch of matrices (3 x 64 x 24)"),
    "left": (model([node("MatMul", ["w", "x"], ["y"])], {"w": values(24, 64)}, {"x": (FLOAT, [64, "n"])}), "left side"),
    "default of an input": (
        model([node("MatMul", ["x", "w"], ["y"])], {"w": values(64, 24)}, X, also_inputs=["w"]),
        "the graph takes it as an input",
    ),
    "also added": (
        model([node("MatMul", ["x", "w"], ["m"]), node("Add", ["m", "w"], ["y"])], {"w": values(64, 64)}, X),
        "Add reads it",
    ),
    "also given out": (
        model([node("MatMul", ["x", "w"], ["y"]), node("Identity", ["w"], ["z"])], {"w": values(64, 24)}, X, ("y", "z")),
        "output of the graph",
    ),
    "gathered along columns": (model([node("Gather", ["w", "ids"], ["y"], axis=1)], {"w": values(32, 64)}, IDS), "another axis"),
    "read from both sides": (
        model(
            [node("MatMul", ["x", "w"], ["a"]), node("Transpose", ["w"], ["t"]), node("MatMul", ["a", "t"], ["y"])],
            {"w": values(64, 24)},
            X,
        ),
        "one node reads along its rows",
    ),
    "float64": (
        model([node("MatMul", ["x", "w"], ["y"])], {"w": values(64, 24, dtype=np.float64)}, {"x": (11, ["n", 64])}, kind=11),
        "in double",
    ),
    "few rows": (model([node("Gather", ["w", "ids"], ["y"])], {"w": values(8, 64)}, IDS), "fewer than 16 rows"),
    "few values": (model([node("MatMul", ["x", "w"], ["y"])], {"w": values(64, 3)}, X), "fewer than 256"),
    "another operator": (
        model([node("Einsum", ["x", "w"], ["y"], equation="btk,kn->btn")], {"w": values(64, 24)}, X),
        "Einsum reads it",
    ),
}
