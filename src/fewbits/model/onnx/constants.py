"""Which tensors of a graph are weights: which nodes read each, as which operand, and why it has to stay in float where it has to.

A tensor may be read as it is stored or through Transpose, Cast and Identity, by several nodes, and from inside If and Loop. The nodes
that read it decide what it is:

    MatMul (right side), Gemm (B)   x @ W: rows of the weight are the outputs
    Gather (axis 0)                 a table: rows are its entries
    Conv                            (out, in / groups * kernel)

A table that is also multiplied along its columns (a tied output) is one weight. A large tensor that any other node reads stays in float,
and the plan names that node.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from onnx import TensorProto, helper

from fewbits.model.weights import Weight

LINEAR: tuple[str, ...] = ("MatMul", "Gemm")
_FEWEST = 256  # values: a smaller tensor saves nothing, and may be a constant of some formula
# Rows of a table. At 4 bits MiniLM gains 0.0018 of cosine if its two token types stay in float, and 0.0010 if its 30522 words get 8 bits.
_FEWEST_ROWS = 16
_DTYPES = {TensorProto.FLOAT: "fp32", TensorProto.FLOAT16: "fp16", TensorProto.BFLOAT16: "bf16", TensorProto.DOUBLE: "fp64"}
_GENERATED = re.compile(r"(onnx::\w*|val|_?v|const\w*|t|node)?_?\d*", re.IGNORECASE)  # names that exporters number
_SCOPES = "pkg.torch.onnx.name_scopes"  # ['', 'encoder', 'encoder.query', 'linear']: modules, then the operation

Reading = Literal["linear", "table", "convolution"]


@dataclass(frozen=True)
class Constant:
    """A stored tensor: an initializer, or the value of a Constant node."""

    name: str
    tensor: Any  # onnx.TensorProto
    scope: str  # of the graph that holds it; empty: the main graph

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.dims)

    @property
    def key(self) -> tuple[str, str]:
        return self.scope, self.name


@dataclass(frozen=True)
class View:
    """A constant as a value of the graph, after Transpose, Cast and Identity."""

    constant: Constant
    dtype: int  # of the value, after any Cast
    order: tuple[int, ...]  # of the axes
    cut_off: str | None = None  # why a reader of this value cannot read packed codes instead


@dataclass(frozen=True)
class Use:
    view: View
    scope: str
    node: Any  # onnx.NodeProto; None: the value is an output of the graph
    slot: int

    @property
    def key(self) -> tuple[str, str]:
        """Identifies the node by its first output, which no other node writes."""
        return self.scope, self.node.output[0]

    @property
    def reading(self) -> Reading | None:
        """What this node uses the tensor as; None: as none of these."""
        op, straight = (self.node.op_type, self.node.domain in ("", "ai.onnx")) if self.node else ("", False)
        if not straight or self.view.cut_off:
            return None
        dims = len(self.view.order)
        if op in LINEAR and self.slot == 1 and dims == 2:
            return "linear"
        if op == "Gather" and self.slot == 0 and dims == 2 and attribute(self.node, "axis", 0) in (0, -2):
            return "table"
        if op == "Conv" and self.slot == 1 and self.view.order == tuple(range(dims)):
            return "convolution"
        return None

    @property
    def transposed(self) -> bool:
        """Whether the file stores the weight as (cols, rows)."""
        swapped = self.view.order != tuple(range(len(self.view.order)))
        right = self.reading == "linear" and not (self.node.op_type == "Gemm" and attribute(self.node, "transB", 0))
        return right != swapped

    @property
    def misfit(self) -> str:
        """Why this use keeps a tensor in float."""
        if self.view.cut_off:
            return self.view.cut_off
        if self.node is None:
            return "it is an output of the graph"
        op = self.node.op_type
        if op in LINEAR and self.slot == 0:
            return f"{op} has it on the left side; ONNX Runtime multiplies packed weights from the right"
        if op in LINEAR and self.slot == 1:
            return f"{op} multiplies a batch of matrices ({' x '.join(map(str, self.view.constant.shape))}); packed weights are single ones"
        if op == "Gather" and self.slot == 0:
            return "Gather reads it along another axis than the first, or it is no matrix"
        return f"{op} reads it, which takes no packed weights"


@dataclass(frozen=True)
class GraphWeight:
    """A weight, the nodes that read it, and the reason if it has to stay in float."""

    weight: Weight
    constant: Constant
    uses: tuple[Use, ...]
    reason: str | None

    @property
    def dtype(self) -> int:
        """The type that the graph computes with where it reads the weight."""
        return self.uses[0].view.dtype

    def reads(self, reading: Reading) -> bool:
        return any(use.reading == reading for use in self.uses)


def attribute(node: Any, name: str, default: Any) -> Any:
    return next((helper.get_attribute_value(entry) for entry in node.attribute if entry.name == name), default)


def subgraphs(node: Any, scope: str) -> Iterator[tuple[str, Any]]:
    """(scope, graph) for every graph inside of an If, a Loop or a Scan."""
    for entry in node.attribute:
        for graph in [entry.g] if entry.HasField("g") else entry.graphs:
            yield f"{scope}{node.name or node.output[0]}.{entry.name}/", graph


def graphs(model: Any) -> Iterator[tuple[str, Any]]:
    pending = [("", model.graph)]
    while pending:
        scope, graph = pending.pop(0)
        yield scope, graph
        pending += [inner for node in graph.node for inner in subgraphs(node, scope)]


def find(model: Any) -> tuple[GraphWeight, ...]:
    """Every float tensor that is a weight or large. All of them appear in a plan, with a reason where one cannot be packed."""
    uses: dict[tuple[str, str], list[Use]] = {}
    _walk(model.graph, "", {}, uses)
    weights: list[GraphWeight] = []
    taken: set[str] = set()
    layers = _layers(model)
    for group in uses.values():
        constant = group[0].view.constant
        known = {use.reading for use in group} - {None}
        values = math.prod(constant.shape)
        if constant.tensor.data_type not in _DTYPES or len(constant.shape) < 2 or (not known and values < _FEWEST):
            continue
        weights.append(_graph_weight(constant, tuple(group), _name(constant, group, layers, taken), model))
        taken.add(weights[-1].weight.name)
    return tuple(weights)


def _walk(graph: Any, scope: str, outside: dict[str, View], uses: dict[tuple[str, str], list[Use]]) -> None:
    inputs = {entry.name for entry in graph.input}
    views = dict(outside)

    def hold(name: str, tensor: Any, cut_off: str | None = None) -> None:
        views[name] = View(Constant(name, tensor, scope), tensor.data_type, tuple(range(len(tensor.dims))), cut_off)

    for tensor in graph.initializer:
        hold(tensor.name, tensor, "the graph takes it as an input, this is its default" if tensor.name in inputs else None)
    for node in graph.node:
        if node.op_type == "Constant" and (tensor := attribute(node, "value", None)) is not None:
            hold(node.output[0], tensor)
        elif (view := _passed_on(node, views)) is not None:
            views[node.output[0]] = view
        else:
            for slot, name in enumerate(node.input):
                if name in views:
                    uses.setdefault(views[name].constant.key, []).append(Use(views[name], scope, node, slot))
        for inner, body in subgraphs(node, scope):
            _walk(body, inner, views, uses)
    for entry in graph.output:
        if entry.name in views:
            uses.setdefault(views[entry.name].constant.key, []).append(Use(views[entry.name], scope, None, 0))


def _passed_on(node: Any, views: dict[str, View]) -> View | None:
    """The output of this node, if it is a constant in another order or type."""
    view = views.get(node.input[0]) if node.input else None
    if view is None or node.domain not in ("", "ai.onnx"):
        return None
    if node.op_type == "Identity":
        return view
    if node.op_type == "Cast" and (to := attribute(node, "to", 0)) in _DTYPES:
        return replace(view, dtype=to)
    if node.op_type == "Transpose":
        axes = attribute(node, "perm", None) or range(len(view.order))[::-1]
        return replace(view, order=tuple(view.order[axis] for axis in axes))
    return None


def _graph_weight(constant: Constant, uses: tuple[Use, ...], name: str, model: Any) -> GraphWeight:
    readings = {use.reading for use in uses}
    reason = _misfit(constant, uses)
    stored = constant.shape
    rows, cols = stored[0], math.prod(stored[1:])
    transposed = len(stored) == 2 and reason is None and uses[0].transposed
    if transposed:
        rows, cols = cols, rows
    dtype = _DTYPES[constant.tensor.data_type]
    weight = Weight(
        name,
        (rows, cols),
        _kind(readings, uses, model),
        "fp32" if dtype == "fp64" else dtype,  # a name only: a float64 tensor is never stored again
        transposed,
        tied_to=next((_node_name(use) for use in uses if use.reading == "linear"), None) if "table" in readings else None,
    )
    return GraphWeight(weight, constant, uses, reason)


def _misfit(constant: Constant, uses: tuple[Use, ...]) -> str | None:
    """Why these uses cannot all read one packed weight; None: they can."""
    if misfit := next((use.misfit for use in uses if use.reading is None), None):
        return misfit
    if len({use.reading for use in uses}) > 1 and any(use.reading == "convolution" for use in uses):
        return "it is a convolution's kernel for one node and a matrix for another"
    if len({use.transposed for use in uses}) > 1:
        return "one node reads along its rows, another along its columns; blocks of scales lie along one of them"
    types = {use.view.dtype for use in uses}
    if len(types) > 1:
        return "its readers compute in different float types"
    if not types <= {TensorProto.FLOAT, TensorProto.FLOAT16}:
        name = TensorProto.DataType.Name(min(types)).lower()
        return f"the graph computes with it in {name}; ONNX Runtime's packed products take float and float16"
    if math.prod(constant.shape) < _FEWEST:
        return f"it has fewer than {_FEWEST} values: nothing to gain"
    if any(use.reading == "table" for use in uses) and constant.shape[uses[0].transposed] < _FEWEST_ROWS:
        return f"a table of fewer than {_FEWEST_ROWS} rows goes into all that is read, and there is nothing to gain"
    return None


def _kind(readings: set[Reading | None], uses: tuple[Use, ...], model: Any) -> str:
    if "table" in readings:
        return "embedding"
    if "convolution" in readings:
        return "convolution"
    return "output" if any(_is_last(use, model) for use in uses) else "other"


def _is_last(use: Use, model: Any) -> bool:
    """Whether the product is an output of the graph, with nothing but a bias or a cast between."""
    if use.node is None or use.reading != "linear" or use.scope:
        return False
    outputs, values = {entry.name for entry in model.graph.output}, {use.node.output[0]}
    for node in model.graph.node:
        if node.op_type in ("Add", "Cast", "Identity") and values & set(node.input):
            values.add(node.output[0])
    return bool(values & outputs)


def _name(constant: Constant, uses: list[Use], layers: dict[tuple[str, str], str], taken: set[str]) -> str:
    """The tensor's name, or that of its layer or node where an exporter only numbered it. Made unique."""
    candidates = [constant.name]
    if _GENERATED.fullmatch(constant.name):
        readers = [use for use in uses if use.reading]
        by_layer = [f"{layers[use.key]}.weight" for use in readers if use.key in layers]
        candidates = [*by_layer, *filter(None, map(_node_name, readers)), constant.name]
    name = next((name for name in candidates if constant.scope + name not in taken), constant.name)
    unique, count = constant.scope + name, 1
    while unique in taken:
        count += 1
        unique = f"{constant.scope}{name}.{count}"
    return unique


def _layers(model: Any) -> dict[tuple[str, str], str]:
    """Name of the layer of each product, by the key of its node: from the metadata of torch's exporter, or else from a bias LAYER.bias."""
    names: dict[tuple[str, str], str] = {}
    for scope, graph in graphs(model):
        for node in graph.node:
            path = re.search(r"'([^']+)', '[^']*'\]$", next((p.value for p in node.metadata_props if p.key == _SCOPES), ""))
            if path and node.op_type in ("MatMul", "Gemm", "Conv", "Gather"):
                names[scope, node.output[0]] = path[1]
            if node.op_type == "Gemm" and len(node.input) > 2 and node.input[2].endswith(".bias"):
                names.setdefault((scope, node.output[0]), node.input[2].removesuffix(".bias"))
            if node.op_type == "Add":
                for one, other in (tuple(node.input), tuple(node.input)[::-1]):
                    if other.endswith(".bias"):
                        names.setdefault((scope, one), other.removesuffix(".bias"))
    return names


def _node_name(use: Use) -> str | None:
    return use.node.name or None if use.node is not None else None
