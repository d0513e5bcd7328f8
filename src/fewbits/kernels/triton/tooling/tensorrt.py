"""The int4 product as a TensorRT plugin, and int4 weights as ONNX for TensorRT's importer. Neither has been run, for want of a GPU: see
docs/kernels.md.

    State                  what defines a plugin: format, group, shape, type. Its bytes are stored in the engine, with a schema version
    creator()              TensorRT's plugin creator, to be registered; needs TensorRT 10
    qdq_model(...)         DequantizeLinear + MatMul without a plugin, which TensorRT fuses by itself

Importing this module does not need TensorRT. The plugin's inputs are x (tokens, cols), the plane of codes as int8 (rows, bytes), scales
float16 (groups, rows) and, where the format has them, zeros as int8 (groups, rows): the bits of `repack.repack`, as int8 because TensorRT
has no uint8 inside a network.
"""

from __future__ import annotations

import importlib.util
import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from fewbits import formats
from fewbits.errors import InputError, MissingError
from fewbits.formats import Format, Shape

if TYPE_CHECKING:
    from fewbits.formats import Parts

NAME, VERSION, NAMESPACE = "FewbitsInt4Linear", "1", "fewbits"
SCHEMA = 2
_TYPES = ("float16", "bfloat16")
_IMPORTED_GROUPS = (64, 128)  # columns under a scale that TensorRT's int4 products know


@dataclass(frozen=True)
class State:
    format: str
    group: int  # columns under one scale; 0: the whole row
    rows: int
    cols: int
    dtype: str = "float16"  # of x and the result. Schema 1 had no such field: it knew only float16

    def __post_init__(self) -> None:
        from fewbits.kernels import triton

        fmt = formats.get(self.format)
        if reason := triton.supports(fmt, (self.rows, self.cols), self.dtype) or _not_int4(fmt):
            raise InputError(
                f"no plugin for {self.format} of {self.rows} x {self.cols}: {reason}", "int4 formats with groups or whole rows have one"
            )
        if self.group != (fmt.group or 0):
            raise InputError(
                f"{self.format} has groups of {fmt.group or 0}, the plugin's state says {self.group}",
                "the engine is damaged: build it anew",
            )

    def to_bytes(self) -> bytes:
        return json.dumps({"schema": SCHEMA, **asdict(self)}, sort_keys=True, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, stored: bytes) -> State:
        try:
            fields = json.loads(stored.decode())
            schema = fields.pop("schema")
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise InputError(f"a plugin's state cannot be read: {error!r}", "the engine is damaged: build it anew") from None
        if not isinstance(schema, int) or not 1 <= schema <= SCHEMA:
            raise InputError(
                f"a plugin's state is of schema {schema}, this fewbits reads 1 to {SCHEMA}", "update fewbits, or build the engine anew"
            )
        wanted = {"format": str, "group": int, "rows": int, "cols": int} | ({"dtype": str} if schema >= 2 else {})
        if set(fields) != set(wanted) or any(type(fields[name]) is not kind for name, kind in wanted.items()):
            raise InputError(
                f"a plugin's state has the fields {sorted(fields)}, not {sorted(wanted)}", "the engine is damaged: build it anew"
            )
        return cls(**fields)

    @property
    def inputs(self) -> list[tuple[str, str, Shape]]:
        """(name, type, shape) of the inputs after x, in order."""
        from fewbits.kernels.triton import layout, repack

        fields, rows = repack.of(formats.get(self.format)).fields, self.rows
        tiles = -(-self.cols // layout.TILE)
        entries = 1 if self.group == 0 else tiles * (layout.TILE // self.group)
        arrays = [(field.name, "int8" if field.dtype == "uint8" else field.dtype, (entries, rows)) for field in fields]
        return [("codes", "int8", (rows, tiles * layout.TILE // 2)), *arrays]


def _not_int4(fmt: Format) -> str | None:
    from fewbits.kernels.triton import repack

    layout = repack.of(fmt)
    return None if layout.planes == (4,) and layout.family.startswith("integers") else "the plugin is for int4 products alone"


def missing() -> str | None:
    """Why the plugin cannot be registered here; None if it can."""
    return None if importlib.util.find_spec("tensorrt") else "TensorRT is not installed; `pip install tensorrt` brings it for NVIDIA GPUs"


def creator() -> Any:
    """Register with `tensorrt.get_plugin_registry().register_creator(creator(), NAMESPACE)`."""
    if reason := missing():
        raise MissingError(f"the plugin needs TensorRT 10: {reason}", "without it, `qdq_model` writes what TensorRT imports by itself")
    return _classes(__import__("tensorrt"))[1]()


def run(state: State, x: Any, arrays: list[Any], out: Any) -> None:
    """The product of tensors, which the plugin's `enqueue` computes. x (tokens, cols), out (tokens, rows)."""
    import torch

    from fewbits.kernels.triton import linear, repack
    from fewbits.kernels.triton.device import device_of
    from fewbits.kernels.triton.layout import Planar

    codes, *entries = (array.view(torch.uint8) if array.dtype == torch.int8 else array for array in arrays)
    weight = Planar(repack.of(formats.get(state.format)), (state.rows, state.cols), (codes,), tuple(entries))
    for call in linear.calls(x, weight, None, None, out, device_of(x)):
        call.run()


def _classes(trt: Any) -> tuple[Any, Any]:
    """The plugin's class and its creator's, made at run time because their bases come with TensorRT."""
    import numpy as np

    plugin = _plugin_class(trt)

    class Creator(trt.IPluginCreatorV3One):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IPluginCreatorV3One.__init__(self)
            self.name, self.plugin_version, self.plugin_namespace = NAME, VERSION, NAMESPACE
            self.field_names = trt.PluginFieldCollection([trt.PluginField("state", np.array([], dtype=np.int8), trt.PluginFieldType.INT8)])

        def create_plugin(self, name: str, fields: Any, phase: Any) -> Any:
            stored = [bytes(np.asarray(each.data, dtype=np.int8).tobytes()) for each in fields if each.name == "state"]
            if len(stored) != 1:
                raise InputError(f"the plugin `{name}` has {len(stored)} fields named `state`", "it takes one, from `State.to_bytes`")
            return plugin(State.from_bytes(stored[0]))

    return plugin, Creator


def _plugin_class(trt: Any) -> Any:
    import numpy as np

    types = {"float16": trt.DataType.HALF, "bfloat16": trt.DataType.BF16, "int8": trt.DataType.INT8}

    class Plugin(trt.IPluginV3, trt.IPluginV3OneCore, trt.IPluginV3OneBuild, trt.IPluginV3OneRuntime):  # type: ignore[misc]
        def __init__(self, state: State) -> None:
            for base in (trt.IPluginV3, trt.IPluginV3OneCore, trt.IPluginV3OneBuild, trt.IPluginV3OneRuntime):
                base.__init__(self)
            self.state = state
            self.plugin_name, self.plugin_version, self.plugin_namespace, self.num_outputs = NAME, VERSION, NAMESPACE, 1

        def get_capability_interface(self, type: Any) -> Any:
            return self

        def clone(self) -> Any:
            return Plugin(self.state)

        def get_output_data_types(self, input_types: list[Any]) -> list[Any]:
            return [types[self.state.dtype]]

        def get_output_shapes(self, inputs: list[Any], shape_inputs: list[Any], builder: Any) -> list[Any]:
            shape = trt.DimsExprs(inputs[0])
            shape[len(shape) - 1] = builder.constant(self.state.rows)
            return [shape]

        def supports_format_combination(self, pos: int, in_out: list[Any], num_inputs: int) -> bool:
            wanted = [self.state.dtype, *(kind for _, kind, _ in self.state.inputs), self.state.dtype]
            given = in_out[pos].desc
            return num_inputs == len(wanted) - 1 and given.type == types[wanted[pos]] and given.format == trt.TensorFormat.LINEAR

        def configure_plugin(self, inputs: list[Any], outputs: list[Any]) -> None:
            return None

        def on_shape_change(self, inputs: list[Any], outputs: list[Any]) -> None:
            return None

        def get_fields_to_serialize(self) -> Any:
            stored = np.frombuffer(self.state.to_bytes(), dtype=np.int8)
            return trt.PluginFieldCollection([trt.PluginField("state", stored, trt.PluginFieldType.INT8)])

        def attach_to_context(self, context: Any) -> Any:
            return self.clone()

        def enqueue(
            self, input_desc: list[Any], output_desc: list[Any], inputs: list[int], outputs: list[int], workspace: int, stream: int
        ) -> None:
            import torch

            tokens = int(np.prod(tuple(input_desc[0].dims)[:-1]))
            with torch.cuda.stream(torch.cuda.ExternalStream(stream)):
                x = _tensor(inputs[0], (tokens, self.state.cols), self.state.dtype)
                arrays = [_tensor(pointer, shape, kind) for pointer, (_, kind, shape) in zip(inputs[1:], self.state.inputs, strict=True)]
                run(self.state, x, arrays, _tensor(outputs[0], (tokens, self.state.rows), self.state.dtype))

    return Plugin


def _tensor(pointer: int, shape: Shape, dtype: str) -> Any:
    """TensorRT's memory as a tensor. The array interface has no bfloat16, so that is passed as integers of the same size."""
    import torch

    kind = {"float16": "<f2", "bfloat16": "<i2", "int8": "|i1"}[dtype]

    class Memory:
        def __init__(self) -> None:
            self.__cuda_array_interface__ = {"shape": shape, "typestr": kind, "data": (pointer, False), "version": 3}

    tensor = torch.as_tensor(Memory(), device="cuda")
    return tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor


def qdq_model(name: str, fmt: Format, parts: Parts, shape: Shape, dtype: str = "float16") -> Any:
    """An ONNX model of one linear layer, x (tokens, cols) -> (tokens, rows), with int4 weights in groups or int8 weights per row or group.

    The weight is stored transposed, (cols, rows), as MatMul takes it, with blocks of `block_size` along axis 0. TensorRT's quantization is
    symmetric, so zero points are left out, and its int4 products know groups of 64 and 128.
    """
    import numpy as np
    import onnx
    from onnx import TensorProto, helper

    if reason := _not_imported(fmt):
        raise InputError(f"TensorRT does not import {fmt.name}: {reason}", "int4_g64, int4_g128, int8_channel and int8_tensor it does")
    rows, cols = shape
    codes, grid = fmt.unpack(parts)
    assert fmt.levels
    first = round(fmt.levels[0])
    q = (codes.short() + first).T.numpy().astype(np.int8)
    real = {"float16": TensorProto.FLOAT16, "float32": TensorProto.FLOAT}[dtype]
    scales = grid["scales"].T.contiguous().numpy().astype(np.float16 if dtype == "float16" else np.float32)
    if fmt.group is None:
        scales = scales.reshape(-1) if scales.size > 1 else scales.reshape(())
    settings = {"axis": 0, "block_size": fmt.group} if fmt.group else {"axis": 1}
    weight = (
        helper.make_tensor("weight", TensorProto.INT4, (cols, rows), _nibbles(q), raw=True)
        if len(fmt.levels) == 16
        else helper.make_tensor("weight", TensorProto.INT8, (cols, rows), q.tobytes(), raw=True)
    )
    scale = helper.make_tensor("scale", real, scales.shape, scales.tobytes(), raw=True)
    nodes = [
        helper.make_node("DequantizeLinear", ["weight", "scale"], ["decoded"], name="decode", **settings),
        helper.make_node("MatMul", ["x", "decoded"], ["y"], name=name),
    ]
    x, y = (helper.make_tensor_value_info(label, real, ("tokens", n)) for label, n in (("x", cols), ("y", rows)))
    graph = helper.make_graph(nodes, name, [x], [y], [weight, scale])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10, producer_name="fewbits")
    onnx.checker.check_model(model, full_check=True)
    return model


def _not_imported(fmt: Format) -> str | None:
    from fewbits.formats.storage.codes import first_of_consecutive

    if fmt.levels is None or first_of_consecutive(fmt.levels) is None or len(fmt.levels) not in (16, 256):
        return "its levels are not integers of 4 or 8 bits"
    if set(fmt.parts((1, fmt.block))) != {"codes", "scales"}:
        return "it has more than codes and scales, and TensorRT's quantization is symmetric"
    if len(fmt.levels) == 16 and fmt.group not in _IMPORTED_GROUPS:
        return f"int4 must have groups of {' or '.join(map(str, _IMPORTED_GROUPS))}"
    return "int8 must have a scale per row or one for all" if len(fmt.levels) == 256 and fmt.group is not None else None


def _nibbles(q: Any) -> bytes:
    """Two values per byte, the first low, in the order of the flat array."""
    import numpy as np

    flat = q.reshape(-1).view(np.uint8) & 15
    flat = np.concatenate([flat, np.zeros(len(flat) % 2, np.uint8)])
    return bytes((flat[::2] | (flat[1::2] << 4)).tobytes())
