"""Affine integers: the bit stream against single bits, decoding against the formula, and ONNX Runtime's own kernels as a judge."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from fewbits import formats, kernels, planning, targets
from fewbits.formats import Format
from fewbits.formats.affine import Integer, IntegerWithZero
from fewbits.formats.search.zeros import fit_scale_and_zero
from fewbits.formats.storage import bitstream
from fewbits.methods import rtn
from fewbits.model.weights import Weight
from fewbits.targets.onnx import storage

SYMMETRIC = [f for f in formats.all().values() if type(f) is Integer]
ASYMMETRIC = [f for f in formats.all().values() if isinstance(f, IntegerWithZero)]
integers = pytest.mark.parametrize("fmt", SYMMETRIC + ASYMMETRIC, ids=lambda f: f.name)
asymmetric = pytest.mark.parametrize("fmt", ASYMMETRIC, ids=lambda f: f.name)
EPS = torch.finfo(torch.float32).eps


def gaussian(shape: tuple[int, int], seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.02


def slow_stream(fields: list[int], width: int) -> list[int]:
    """One number as long as the row, field i at bit (width * i), cut into bytes from its low end."""
    number = sum(field << (width * i) for i, field in enumerate(fields))
    return list(number.to_bytes(-(-len(fields) * width // 8), "little"))


@settings(deadline=None)
@given(width=st.integers(1, 8), data=st.data())
def test_a_bit_stream_is_one_long_little_endian_number(width: int, data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 40))
    row = st.lists(st.integers(0, (1 << width) - 1), min_size=n, max_size=n)
    fields = data.draw(st.lists(row, min_size=1, max_size=3))
    stream = bitstream.pack(torch.tensor(fields, dtype=torch.uint8), width)
    assert stream.tolist() == [slow_stream(one, width) for one in fields]
    assert bitstream.unpack(stream, width, n).tolist() == fields


@integers
def test_codes_lie_in_the_file_as_the_stream_says(fmt: Integer) -> None:
    parts = rtn.quantize(gaussian((3, 256)), fmt)
    codes, _ = fmt.unpack(parts)
    if parts["codes"].dtype == torch.int8:
        assert (parts["codes"].int() + 128).equal(codes.int())
    else:
        assert parts["codes"].tolist() == [slow_stream(row, fmt.bits) for row in codes.tolist()]


@integers
def test_the_outermost_levels_are_used_at_both_ends(fmt: Integer) -> None:
    codes, _ = fmt.unpack(rtn.quantize(gaussian((64, 512)), fmt))
    assert (codes.min(), codes.max()) == (0, (1 << fmt.bits) - 1)


@asymmetric
@pytest.mark.parametrize("how", ["max", "search"])
def test_asymmetric_weights_are_exactly_scale_times_code_less_zero(fmt: IntegerWithZero, how: formats.How) -> None:
    w = gaussian((5, 512)) + 0.01
    parts = rtn.quantize(w, fmt, how=how)
    codes, grid = fmt.unpack(parts)
    groups, scales, zeros = codes.double().reshape(5, grid["scales"].shape[1], -1), grid["scales"].double(), grid["zeros"].double()
    expected = (scales.unsqueeze(-1) * (groups - zeros.unsqueeze(-1))).reshape(5, 512)
    assert torch.equal(kernels.decode(fmt, parts, (5, 512)).double(), expected)
    assert (scales > 0).all() and parts["zeros"].tolist() == [slow_stream(row, fmt.bits) for row in grid["zeros"].tolist()]


@asymmetric
def test_zero_is_exact_on_every_asymmetric_grid(fmt: IntegerWithZero) -> None:
    for shift in (-0.05, 0.0, 0.05):  # all negative, around zero, all positive
        w = gaussian((4, 256)) + shift
        w[:, ::16] = 0
        assert not kernels.decode(fmt, rtn.quantize(w, fmt), (4, 256))[:, ::16].any()


def test_the_textbook_zero_point_is_min_max_with_zero_in_range() -> None:
    x = torch.tensor([[-1.0, 2.0, 0.5], [1.0, 2.0, 3.0], [-3.0, -2.0, -1.0], [0.0, 0.0, 0.0]])
    scale, zero = fit_scale_and_zero(x, 15, how="max")
    assert scale.tolist() == pytest.approx([0.2, 0.2, 0.2, 0.0], rel=2**-11)
    assert zero.tolist() == [5, 0, 15, 0]


def test_the_zero_point_search_comes_close_to_trying_everything() -> None:
    """Every zero point and 400 scales: the search is 0.8 % above the least error; the textbook 12 %, a search of one scale 3.5 %."""
    x = torch.randn((100, 32), generator=torch.Generator().manual_seed(3))
    span = x.amax(-1).clamp(min=0) - x.amin(-1).clamp(max=0)
    least = torch.full((100,), torch.inf)
    for zero in range(16):
        for width in np.linspace(10, 40, 400):
            scale = (span / width).unsqueeze(-1)
            decoded = ((x / scale).round() + zero).clamp(0, 15).sub(zero).mul(scale)
            least = torch.minimum(least, (decoded - x).square().sum(-1))

    def error(how: formats.How) -> Tensor:
        scale, zero = (entry.unsqueeze(-1) for entry in fit_scale_and_zero(x, 15, how=how))
        return (((x / scale).round() + zero).clamp(0, 15).sub(zero).mul(scale) - x).square().sum(-1)

    assert error("search").sum() <= 1.015 * least.sum()
    assert error("search").sum() <= 0.95 * error("max").sum()


def test_a_fallback_never_goes_to_one_scale_for_the_weight() -> None:
    weight = Weight("a", (64, 172), "mlp", "fp16")
    plan = planning.uniform([weight], targets.get("onnx"), formats.get("q4_k"))
    assert [entry.format for entry in plan.fallbacks] == ["int8_channel"]


def test_one_scale_for_the_weight_clips_what_few_weights_need() -> None:
    w = gaussian((64, 512))
    w[3, 7] = 1.0  # 50 standard deviations: kept, it would leave 4 bits no other level than zero
    fmt = formats.get("int4_tensor")
    kept, clipped = (kernels.decode(fmt, rtn.quantize(w, fmt, how=how), (64, 512)) for how in ("max", "search"))
    assert (kept != 0).float().mean() < 0.01 and (clipped != 0).float().mean() > 0.5
    assert (clipped - w).norm() < 0.5 * (kept - w).norm()


GGUF_TWINS = ["int8_tensor", "int4_tensor", "int8_g32", "int4_g64", "int4_g128", "int4_channel", "int5_g32", "int5_channel"]


@pytest.mark.parametrize("name", GGUF_TWINS)
def test_gguf_takes_symmetric_integers_by_their_values(name: str) -> None:
    import gguf

    from fewbits.targets.gguf import layout

    fmt, w = formats.get(name), gaussian((4, 256))
    gguf_layout = layout(fmt)
    assert gguf_layout and gguf_layout.type == {4: "Q4_0", 5: "Q5_0", 8: "Q8_0"}[fmt.bits]  # type: ignore[attr-defined]
    parts = rtn.quantize(w, fmt)
    theirs = gguf.quants.dequantize(gguf_layout.convert(parts).numpy(), gguf.GGMLQuantizationType[gguf_layout.type])
    assert torch.equal(torch.from_numpy(theirs), kernels.decode(fmt, parts, (4, 256)))


@pytest.mark.parametrize("name", ["int4_g32_asym", "int3_g32", "int6_channel", "fp8_e4m3_channel"])
def test_gguf_refuses_what_it_could_not_hold_exactly(name: str) -> None:
    assert "no type" in (targets.get("gguf").accepts(Weight("a", (64, 256), "mlp", "fp16"), formats.get(name)) or "")


# -- ONNX Runtime: the same numbers through MatMulNBits and GatherBlockQuantized -------------------------------------------------

RUNNABLE = [f for f in SYMMETRIC + ASYMMETRIC if f.bits in (2, 4, 8)]
runnable = pytest.mark.parametrize("fmt", RUNNABLE, ids=lambda f: f.name)
COLS = {"channel": 296, "tensor": 296}  # no whole number of the blocks that they are written in


def one_node(fmt: Format, parts: dict[str, Tensor], shape: tuple[int, int], op: str, level: int = 0) -> tuple[Any, int]:
    onnx, ort = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    store = storage.store(fmt, shape, level)
    assert store.blocks
    arrays: dict[str, NDArray[Any]] = {name: array.contiguous().numpy() for name, array in store.arrays(parts).items()}
    if op == "GatherBlockQuantized":
        arrays["codes"] = arrays["codes"].reshape(shape[0], -1)
        inputs, extra, kind, x_shape = ["codes", "x", "scales"], {"gather_axis": 0, "quantize_axis": 1}, onnx.TensorProto.INT64, [None]
    else:
        extra = {"K": shape[1], "N": shape[0], "accuracy_level": level}
        inputs, kind, x_shape = ["x", "codes", "scales"], onnx.TensorProto.FLOAT, [None, shape[1]]
    inputs += ["zeros"] if "zeros" in arrays else []
    node = onnx.helper.make_node(op, inputs, ["y"], domain="com.microsoft", bits=store.blocks.bits, block_size=store.blocks.size, **extra)
    graph = onnx.helper.make_graph(
        [node],
        "one",
        [onnx.helper.make_tensor_value_info("x", kind, x_shape)],
        [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)],
        [onnx.numpy_helper.from_array(array, name) for name, array in arrays.items()],
    )
    domains = [onnx.helper.make_opsetid("", 20), onnx.helper.make_opsetid("com.microsoft", 1)]
    model = onnx.helper.make_model(graph, opset_imports=domains, ir_version=10)
    return ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]), store.blocks.size


def stored(fmt: Format) -> tuple[dict[str, Tensor], tuple[int, int], Tensor]:
    shape = (24, COLS.get(fmt.name.split("_")[1], 384))
    parts = rtn.quantize(gaussian(shape) + 0.005, fmt)
    return parts, shape, kernels.decode(fmt, parts, shape)


@runnable
@pytest.mark.parametrize("tokens", [1, 5])
def test_onnx_runtime_multiplies_by_the_same_weights(fmt: Format, tokens: int) -> None:
    parts, shape, w = stored(fmt)
    session, _ = one_node(fmt, parts, shape, "MatMulNBits")
    x = torch.randn((tokens, shape[1]), generator=torch.Generator().manual_seed(1))
    got = torch.from_numpy(session.run(None, {"x": x.numpy()})[0]).double()
    bound = shape[1] * EPS * (x.double().abs() @ w.double().abs().T)  # n * eps * sum |x||w|
    assert ((got - x.double() @ w.double().T).abs() <= bound).all()


@runnable
def test_onnx_runtime_looks_up_exactly_the_same_weights(fmt: Format) -> None:
    parts, shape, w = stored(fmt)
    session, _ = one_node(fmt, parts, shape, "GatherBlockQuantized")
    ids = torch.tensor([3, 0, 23, 3])
    got = torch.from_numpy(session.run(None, {"x": ids.numpy()})[0])
    assert torch.equal(got[:, : shape[1]], w[ids])
    assert not got[:, shape[1] :].any()


@runnable
def test_at_level_4_onnx_runtime_is_off_by_no_more_than_inputs_of_8_bits(fmt: Format) -> None:
    parts, shape, w = stored(fmt)
    session, size = one_node(fmt, parts, shape, "MatMulNBits", level=4)
    x = torch.randn((5, shape[1]), generator=torch.Generator().manual_seed(1))
    got = torch.from_numpy(session.run(None, {"x": x.numpy()})[0]).double()
    padded = torch.nn.functional.pad(x, (0, -shape[1] % size)).reshape(5, -1, size)
    half_step = (padded.abs().amax(-1, keepdim=True) / 127 / 2).expand_as(padded).reshape(5, -1)[:, : shape[1]].double()
    bound = (1.01 * half_step + 8 * shape[1] * EPS * x.abs()) @ w.double().abs().T  # 1.01: its step is itself a rounded float32 quotient
    assert ((got - x.double() @ w.double().T).abs() <= bound).all()


@runnable
def test_onnx_prices_what_it_stores(fmt: Format) -> None:
    parts, shape, _ = stored(fmt)
    held = storage.store(fmt, shape, 0).arrays(parts)
    assert sum(array.nbytes for array in held.values()) == targets.get("onnx").nbytes(Weight("a", shape, "mlp", "fp16"), fmt)


@pytest.mark.parametrize(("name", "word"), [("int3_g64", "8 levels"), ("fp8_e4m3_channel", "consecutive"), ("mxfp4", "consecutive")])
def test_onnx_refuses_other_levels_with_the_reason(name: str, word: str) -> None:
    assert word in (targets.get("onnx").accepts(Weight("a", (64, 256), "mlp", "fp16"), formats.get(name)) or "")
