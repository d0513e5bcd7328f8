"""A copy of the graph in which planned weights are packed, with nodes that read them so. Everything else stays as it was.

MatMul, Gemm   MatMulNBits; with static activations QuantizeLinear, DequantizeLinear, MatMul (targets/onnx/qdq.py)
               transA, alpha, beta and C of a Gemm become separate nodes
Gather         GatherBlockQuantized, and a Slice where the last block is padded
Conv           DequantizeLinear per channel in front of it, and QuantizeLinear, DequantizeLinear on its input
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from fewbits import formats
from fewbits.artifact import manifest
from fewbits.model.onnx import constants
from fewbits.model.onnx.constants import attribute
from fewbits.onnx_graphs import target
from fewbits.targets.onnx import qdq, storage

if TYPE_CHECKING:
    from fewbits.artifact.manifest import Provenance
    from fewbits.artifact.outcomes import Stream
    from fewbits.formats import Format, Parts
    from fewbits.formats.runtime.activations import Activation
    from fewbits.model.onnx.constants import GraphWeight, Use
    from fewbits.model.onnx.graph import OnnxModel
    from fewbits.model.weights import Weight
    from fewbits.planning import Plan
    from fewbits.targets.onnx.storage import Blocks

_MICROSOFT = "com.microsoft"
_PASSING_ON = ("Identity", "Cast", "Transpose")


def rewritten(model: OnnxModel, plan: Plan, accuracy_level: int, quantized: Stream, calibration: str | None = None) -> Any:
    """An onnx.ModelProto; tensors in data files stay there. `calibration`: the hash of the inputs that were calibrated with."""
    proto = onnx.ModelProto()
    proto.CopyFrom(model.proto)
    rewriter = _Rewriter(proto, model.opset, accuracy_level)
    for weight, outcome in quantized:
        entry = plan[weight.name]
        fmt = formats.get(entry.format)
        if not fmt.is_cast:
            rewriter.replace(model.graph_weight(weight.name), fmt, entry.activation, outcome.parts)
    rewriter.finish()
    _describe(proto, plan, manifest.provenance(model.path.name, model.fingerprint, calibration))
    return proto


class _Rewriter:
    def __init__(self, proto: Any, opset: int, accuracy_level: int) -> None:
        self._proto, self._opset, self._level = proto, opset, accuracy_level
        self._graphs = dict(constants.graphs(proto))
        self._names = {name for graph in self._graphs.values() for name in _names_in(graph)}
        self._instead: dict[tuple[str, str], list[Any]] = {}  # removed nodes, and the nodes that replace them
        self._gone: set[str] = set()  # tensors that were packed
        self._dequantize = "" if opset > 12 else _MICROSOFT  # before 13 it has no axis

    def replace(self, in_graph: GraphWeight, fmt: Format, activation: Activation | None, parts: Parts) -> None:
        graph = self._graphs[in_graph.constant.scope]
        self._gone.add(in_graph.constant.name)
        if in_graph.weight.kind == "convolution":
            names = self._convolution_tensors(graph, in_graph, fmt, activation, parts)
            for use in in_graph.uses:
                self._instead[use.key] = self._convolution(use, names, activation, in_graph.dtype)
            return
        store = storage.store(fmt, in_graph.weight.shape, self._level, activation)
        arrays = {part: array.contiguous().numpy() for part, array in store.arrays(parts).items()}
        if activation:
            names = {part: self._tensor(graph, f"{in_graph.weight.name}.{part}", array) for part, array in arrays.items()}
            for use in in_graph.uses:
                self._instead[use.key] = self._linear(graph, use, partial(self._integers, names, activation), in_graph.dtype)
            return
        assert store.blocks
        if in_graph.dtype == TensorProto.FLOAT16:
            arrays["scales"] = arrays["scales"].astype(np.float16)  # their values are float16: see storage.py
        if not in_graph.reads("linear"):
            arrays["codes"] = arrays["codes"].reshape(len(arrays["codes"]), -1)
        names = {part: self._tensor(graph, f"{in_graph.weight.name}.{part}", array) for part, array in arrays.items()}
        for use in in_graph.uses:
            if use.reading == "table":
                self._instead[use.key] = self._table(graph, use, names, store.blocks, in_graph)
            else:
                self._instead[use.key] = self._linear(
                    graph, use, partial(self._packed, names, store.blocks, in_graph.weight), in_graph.dtype
                )

    def finish(self) -> None:
        for scope, graph in reversed(self._graphs.items()):  # subgraphs first: copying a node copies its subgraphs
            nodes: list[Any] = []
            for node in graph.node:
                nodes += self._instead.get((scope, node.output[0] if node.output else ""), [node])
            del graph.node[:]
            graph.node.extend(nodes)
        self._graphs = dict(constants.graphs(self._proto))
        self._sweep()
        if self._instead and not any(entry.domain == _MICROSOFT for entry in self._proto.opset_import):
            self._proto.opset_import.append(helper.make_opsetid(_MICROSOFT, 1))

    def _packed(self, names: dict[str, str], blocks: Blocks, weight: Weight, x: str, y: str) -> list[Any]:
        rows, cols = weight.shape
        inputs = [x, *(names[part] for part in ("codes", "scales", "zeros") if part in names)]
        numbers = {"K": cols, "N": rows, "bits": blocks.bits, "block_size": blocks.size, "accuracy_level": self._level}
        return [helper.make_node("MatMulNBits", inputs, [y], domain=_MICROSOFT, **numbers)]

    def _integers(self, names: dict[str, str], activation: Activation, x: str, y: str) -> list[Any]:
        nodes, rounded = self._rounded(x, names, activation, y)
        weight = self._new(f"{y}.weight")
        return [
            *nodes,
            helper.make_node("DequantizeLinear", [names["codes"], names["scales"], names["zeros"]], [weight], axis=1),
            helper.make_node("MatMul", [rounded, weight], [y]),
        ]

    def _rounded(self, x: str, names: dict[str, str], activation: Activation, y: str) -> tuple[list[Any], str]:
        """x rounded to a static activation."""
        nodes, given = [], [names["input_scale"], names["input_zero"]]
        codes, values = self._new(f"{y}.input_codes"), self._new(f"{y}.input")
        if activation.symmetric:
            clipped = self._new(f"{y}.input_clipped")
            nodes.append(helper.make_node("Clip", [x, names["input_low"]], [clipped]))
            x = clipped
        nodes.append(helper.make_node("QuantizeLinear", [x, *given], [codes]))
        return [*nodes, helper.make_node("DequantizeLinear", [codes, *given], [values])], values

    def _linear(self, graph: Any, use: Use, product: Callable[[str, str], list[Any]], dtype: int) -> list[Any]:
        """`product(x, y)` makes the nodes that multiply; the rest of a Gemm comes before and after."""
        node, out = use.node, use.node.output[0]
        before: list[Any] = []
        after: list[tuple[str, str]] = []  # operator, its second input
        x = node.input[0]
        if node.op_type == "Gemm":
            if attribute(node, "transA", 0):
                x = self._new(f"{out}.transposed")
                before.append(helper.make_node("Transpose", [node.input[0]], [x], perm=[1, 0]))
            if (alpha := attribute(node, "alpha", 1.0)) != 1.0:
                after.append(("Mul", self._scalar(graph, f"{out}.alpha", alpha, dtype)))
            beta = attribute(node, "beta", 1.0)
            if len(node.input) > 2 and node.input[2] and beta != 0.0:
                added = node.input[2]
                if beta != 1.0:
                    added = self._new(f"{out}.scaled_bias")
                    scale = self._scalar(graph, f"{out}.beta", beta, dtype)
                    before.append(helper.make_node("Mul", [node.input[2], scale], [added]))
                after.append(("Add", added))
        values = [self._new(f"{out}.{operator.lower()}_input") for operator, _ in after] + [out]
        nodes = before + product(x, values[0])
        for (operator, second), first, result in zip(after, values, values[1:], strict=False):
            nodes.append(helper.make_node(operator, [first, second], [result]))
        nodes[-1].name = node.name
        return nodes

    def _table(self, graph: Any, use: Use, names: dict[str, str], blocks: Blocks, in_graph: GraphWeight) -> list[Any]:
        node, out = use.node, use.node.output[0]
        rows, cols = in_graph.weight.shape
        padded = -(-cols // blocks.size) * blocks.size
        nodes, codes = [], names["codes"]
        if in_graph.reads("linear"):  # they are shaped for MatMulNBits: [rows, blocks, bytes]
            codes = self._new(f"{out}.codes")
            shape = self._tensor(graph, f"{out}.shape", np.array([rows, padded * blocks.bits // 8], np.int64))
            nodes.append(helper.make_node("Reshape", [names["codes"], shape], [codes]))
        gathered = out if padded == cols else self._new(f"{out}.padded")
        inputs = [codes, node.input[1], names["scales"], *([names["zeros"]] if "zeros" in names else [])]
        numbers = {"bits": blocks.bits, "block_size": blocks.size, "gather_axis": 0, "quantize_axis": 1}
        nodes.append(helper.make_node("GatherBlockQuantized", inputs, [gathered], domain=_MICROSOFT, **numbers))
        if padded != cols:
            nodes.append(self._cut(graph, gathered, cols, out))
        nodes[-1].name = node.name
        return nodes

    def _cut(self, graph: Any, x: str, cols: int, y: str) -> Any:
        if self._opset < 10:
            return helper.make_node("Slice", [x], [y], starts=[0], ends=[cols], axes=[-1])
        ends = {"starts": 0, "ends": cols, "axes": -1}
        return helper.make_node("Slice", [x, *(self._tensor(graph, f"{y}.{k}", np.array([v], np.int64)) for k, v in ends.items())], [y])

    def _convolution_tensors(
        self, graph: Any, in_graph: GraphWeight, fmt: Format, activation: Activation | None, parts: Parts
    ) -> dict[str, str]:
        codes, scales, zeros = (array.numpy() for array in qdq.channels(fmt, in_graph.weight.shape, parts))
        arrays = {"codes": codes.reshape(in_graph.constant.shape), "scales": scales, "zeros": zeros}
        if not target.has_zeros(fmt, activation):
            arrays = {"codes": (arrays["codes"].astype(np.int16) - 128).astype(np.int8), "scales": scales}
        if activation:
            arrays |= {part: array.numpy() for part, array in qdq.input_arrays(activation).items()}
        return {part: self._tensor(graph, f"{in_graph.weight.name}.{part}", array) for part, array in arrays.items()}

    def _convolution(self, use: Use, names: dict[str, str], activation: Activation | None, dtype: int) -> list[Any]:
        node, out = use.node, use.node.output[0]
        nodes, x = self._rounded(node.input[0], names, activation, out) if activation else ([], node.input[0])
        weight = self._new(f"{out}.weight")
        inputs = [names[part] for part in ("codes", "scales", "zeros") if part in names]
        nodes.append(helper.make_node("DequantizeLinear", inputs, [weight], axis=0, domain=self._dequantize))
        if dtype == TensorProto.FLOAT16:  # a scale in float16 came with opset 19
            cast = self._new(f"{out}.weight_float16")
            nodes.append(helper.make_node("Cast", [weight], [cast], to=TensorProto.FLOAT16))
            weight = cast
        convolution = onnx.NodeProto()
        convolution.CopyFrom(node)
        convolution.input[0], convolution.input[1] = x, weight
        return [*nodes, convolution]

    def _tensor(self, graph: Any, name: str, array: Any) -> str:
        name = self._new(name)
        graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(array).reshape(array.shape), name))
        return name

    def _scalar(self, graph: Any, name: str, value: float, dtype: int) -> str:
        return self._tensor(graph, name, np.array(value, np.float16 if dtype == TensorProto.FLOAT16 else np.float32))

    def _new(self, name: str) -> str:
        while name in self._names:
            name += "_"
        self._names.add(name)
        return name

    def _sweep(self) -> None:
        """Removes the float tensors that were packed, and nodes that only transposed or cast them, unless other nodes read them."""
        candidates = set(self._gone)
        while True:
            read = {name for graph in self._graphs.values() for name in _read_in(graph)}
            dropped = False
            for graph in self._graphs.values():
                for node in list(graph.node):
                    if node.op_type in _PASSING_ON and node.input[0] in candidates:
                        candidates.add(node.output[0])
                        if node.output[0] not in read:
                            graph.node.remove(node)
                            dropped = True
            if not dropped:
                break
        dead = candidates - read
        for graph in self._graphs.values():
            for entries in (graph.initializer, graph.value_info):
                for entry in [entry for entry in entries if entry.name in dead]:
                    entries.remove(entry)
            for node in [node for node in graph.node if node.op_type == "Constant" and node.output[0] in dead]:
                graph.node.remove(node)


def _names_in(graph: Any) -> Iterable[str]:
    yield from (entry.name for entries in (graph.input, graph.initializer, graph.value_info) for entry in entries)
    for node in graph.node:
        yield from node.output


def _read_in(graph: Any) -> Iterable[str]:
    yield from (entry.name for entry in graph.output)
    for node in graph.node:
        yield from node.input


def _describe(proto: Any, plan: Plan, origin: Provenance) -> None:
    about = manifest.graph_metadata(origin, plan)
    kept = {entry.key: entry.value for entry in proto.metadata_props if entry.key not in about}
    helper.set_model_props(proto, kept | about)
