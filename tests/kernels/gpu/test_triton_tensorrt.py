"""The TensorRT plugin's state, its class against a stand-in for TensorRT's bases, and the ONNX file in onnxruntime. No engine is built."""

from __future__ import annotations

import json
import sys
import types

import numpy as np
import pytest
import torch
from gpu_weights import activations, bound, expected, packed, planar

from fewbits import formats
from fewbits.errors import InputError, MissingError
from fewbits.kernels import reference
from fewbits.kernels.triton.tooling import tensorrt
from fewbits.kernels.triton.tooling.tensorrt import State

STATES = [
    State("int4_g128", 128, 4096, 11008), State("int4_g32_asym", 32, 7, 64, "bfloat16"), State("int4_channel", 0, 33, 100),
    State("int4_tensor_asym", 0, 5, 256),
]  # fmt: skip


@pytest.mark.parametrize("state", STATES, ids=lambda state: state.format)
def test_a_state_is_read_back_as_it_was_written(state: State) -> None:
    assert State.from_bytes(state.to_bytes()) == state
    assert json.loads(state.to_bytes())["schema"] == tensorrt.SCHEMA


def test_an_older_state_is_read_and_a_newer_one_refused() -> None:
    old = {"schema": 1, "format": "int4_g128", "group": 128, "rows": 8, "cols": 256}
    assert State.from_bytes(json.dumps(old).encode()) == State("int4_g128", 128, 8, 256, "float16")
    with pytest.raises(InputError, match="schema 3, this fewbits reads 1 to 2"):
        State.from_bytes(json.dumps({**old, "schema": 3, "dtype": "float16"}).encode())


@pytest.mark.parametrize(
    "stored",
    [
        b"",
        b"\xff",
        b"[]",
        b"{}",
        b'{"schema":2}',
        b'{"schema":"2"}',
        b'{"schema":1,"format":"int4_g128","group":128,"rows":8,"cols":"256"}',
    ],
)
def test_a_damaged_state_is_refused(stored: bytes) -> None:
    with pytest.raises(InputError):
        State.from_bytes(stored)


def test_a_state_that_no_kernel_serves_is_refused() -> None:
    for wrong in (("q4_k", 32, 8, 256), ("int8_channel", 0, 8, 256), ("int4_g128", 64, 8, 256), ("int4_g128", 128, 8, 100)):
        with pytest.raises(InputError):
            State(*wrong)


@pytest.mark.parametrize(
    "state", [State("int4_g32_asym", 32, 37, 96), State("int4_channel", 0, 19, 300, "bfloat16")], ids=lambda s: s.format
)
def test_what_the_plugin_runs_is_the_product(state: State) -> None:
    fmt, shape = formats.get(state.format), (state.rows, state.cols)
    parts = packed(fmt, shape)
    weight = planar(fmt, parts)
    arrays = [array.view(torch.int8) if array.dtype == torch.uint8 else array for array in (*weight.planes, *weight.grid)]
    assert [(tuple(a.shape), str(a.dtype).removeprefix("torch.")) for a in arrays] == [(s, kind) for _, kind, s in state.inputs]
    x = activations(3, state.cols, getattr(torch, state.dtype))
    out = x.new_empty(3, state.rows)
    tensorrt.run(state, x, arrays, out)
    wanted = expected(fmt, parts, x, None, None)
    assert ((out.double() - wanted).abs() <= bound(fmt, parts, x, wanted.abs(), weights_are_rounded=True)).all()


def stand_in() -> types.ModuleType:
    """As much of TensorRT as the plugin's class touches: its names are those of TensorRT 10's Python API."""

    class Base:
        pass

    class PluginField:
        def __init__(self, name: str, data: np.ndarray, type: object) -> None:
            self.name, self.data, self.type = name, data, type

    found = types.ModuleType("tensorrt")
    bases = ("IPluginV3", "IPluginV3OneCore", "IPluginV3OneBuild", "IPluginV3OneRuntime", "IPluginCreatorV3One")
    for name in bases:
        setattr(found, name, type(name, (Base,), {}))
    found.PluginField, found.PluginFieldCollection, found.DimsExprs = PluginField, list, list
    found.DataType = types.SimpleNamespace(HALF="half", BF16="bf16", INT8="int8")
    found.PluginFieldType = types.SimpleNamespace(INT8="int8")
    found.TensorFormat = types.SimpleNamespace(LINEAR="linear")
    return found


def test_a_plugin_goes_through_its_fields_and_comes_back() -> None:
    plugin_class, creator_class = tensorrt._classes(stand_in())
    plugin = plugin_class(STATES[1])
    again = creator_class().create_plugin("layer", plugin.get_fields_to_serialize(), "runtime")
    assert again.state == STATES[1] and again.clone().state == STATES[1]
    assert (again.plugin_name, again.plugin_version, again.plugin_namespace) == (creator_class().name, "1", "fewbits")
    with pytest.raises(InputError, match="fields named `state`"):
        creator_class().create_plugin("layer", [], "build")


def test_a_plugin_takes_its_own_types_in_rows_alone() -> None:
    plugin = tensorrt._classes(stand_in())[0](STATES[1])  # x, codes, scales, zeros -> y
    right = ["bf16", "int8", "half", "int8", "bf16"]

    def described(kinds: list[str], format: str = "linear") -> list[object]:
        return [types.SimpleNamespace(desc=types.SimpleNamespace(type=kind, format=format)) for kind in kinds]

    assert all(plugin.supports_format_combination(pos, described(right), 4) for pos in range(5))
    assert not plugin.supports_format_combination(0, described(["half", *right[1:]]), 4)
    assert not plugin.supports_format_combination(1, described(right, "chw32"), 4)
    assert not plugin.supports_format_combination(0, described(right), 3)
    builder = types.SimpleNamespace(constant=lambda n: n)
    assert plugin.get_output_shapes([["b", "t", 64]], [], builder) == [["b", "t", 7]] and plugin.get_output_data_types([]) == ["bf16"]


def test_without_tensorrt_the_creator_says_so() -> None:
    if "tensorrt" in sys.modules or tensorrt.missing() is None:
        pytest.skip("TensorRT is here")
    with pytest.raises(MissingError, match="TensorRT is not installed"):
        tensorrt.creator()


@pytest.mark.parametrize("name", ["int4_g128", "int4_g64", "int8_channel", "int8_tensor"])
def test_the_onnx_file_computes_the_product(name: str) -> None:
    """onnxruntime as the judge of what the file says; whether TensorRT takes it was not tried."""
    onnxruntime = pytest.importorskip("onnxruntime")
    fmt, shape = formats.get(name), (24, 256)
    parts = packed(fmt, shape)
    model = tensorrt.qdq_model("layer", fmt, parts, shape, "float32")
    options = onnxruntime.SessionOptions()
    # optimised, the pattern becomes MatMulNBits, which rounds x to int8
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(1))
    (y,) = session.run(None, {"x": x.numpy()})
    w = reference.decode(fmt, parts).double()
    assert (np.abs(y - (x.double() @ w.T).numpy()) <= (260 * 2.0**-24 * (x.double().abs() @ w.abs().T)).numpy()).all()
    half = tensorrt.qdq_model("layer", fmt, parts, shape)
    assert half.opset_import[0].version == 21 and [node.op_type for node in half.graph.node] == ["DequantizeLinear", "MatMul"]


@pytest.mark.parametrize(
    "name, reason", [("int4_g32", "64 or 128"), ("int4_g128_asym", "symmetric"), ("q4_k", "more than codes"), ("mxfp4", "levels")]
)
def test_what_tensorrt_does_not_import_is_refused(name: str, reason: str) -> None:
    fmt = formats.get(name)
    with pytest.raises(InputError, match=reason):
        tensorrt.qdq_model("layer", fmt, packed(fmt, (4, 256)), (4, 256))
