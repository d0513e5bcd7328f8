"""Static int8 activations as QDQ: the .onnx file multiplies integers, and computes what torch does by the same plan."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from enumerated import one_of
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from fewbits import artifact, formats, model, planning, progress, targets
from fewbits.artifact import Artifact
from fewbits.artifact.draft import Draft
from fewbits.errors import InputError
from fewbits.formats.runtime.activations import Activation
from fewbits.model.weights import Weight
from fewbits.planning import Plan
from fewbits.targets.onnx import Onnx, qdq, storage
from fewbits.verification.runtimes.torch import of_module, readers

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")

LLAMA = LlamaConfig(
    vocab_size=160, num_hidden_layers=1, hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=64, initializer_range=0.3, tie_word_embeddings=True, bos_token_id=0, eos_token_id=0,
)  # fmt: skip
GPT2 = GPT2Config(vocab_size=160, n_layer=1, n_embd=64, n_head=4, n_positions=64, initializer_range=0.3, bos_token_id=0, eos_token_id=0)
CASES: dict[str, tuple[Any, str, bool]] = {
    "llama, symmetric": (LLAMA, "int8_channel", True),
    "gpt2, biases, zero points on both sides": (GPT2, "int8_channel_asym", False),
}
TARGET = Onnx(accuracy_level=0)  # the output's MatMulNBits, which has no static activation, adds no error of its own


@dataclass(frozen=True)
class Written:
    source: model.Model
    artifact: Artifact
    path: Path
    proto: Any

    @property
    def plan(self) -> Plan:
        return self.artifact.plan

    def session(self, optimized: bool, save: Path | None = None) -> Any:
        options = ort.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = 1, 3
        levels = ort.GraphOptimizationLevel
        options.graph_optimization_level = levels.ORT_ENABLE_ALL if optimized else levels.ORT_DISABLE_ALL
        if save:
            options.optimized_model_filepath = str(save)
        return ort.InferenceSession(self.path, options, providers=["CPUExecutionProvider"])


def calibrated(source: model.Model, plan: Plan, share: float) -> Plan:
    """Scales from a share of each input's range: the rest is clipped, on both ends."""
    module, seen = source.module(), dict[str, tuple[float, float]]()
    hooks = []
    for name, layer in module.named_modules():
        if name in plan.activations:
            hooks.append(layer.register_forward_pre_hook(lambda _, x, name=name: seen.update({name: ends(x[0])})))
    of_module(module).logits(tokens(64))
    for hook in hooks:
        hook.remove()
    found: Mapping[str, Activation] = plan.activations
    return planning.with_activations(plan, {n: a.calibrated(share * seen[n][0], share * seen[n][1]) for n, a in found.items()})


def ends(x: Tensor) -> tuple[float, float]:
    return float(x.min()), float(x.max())


def tokens(count: int, seed: int = 0) -> list[int]:
    found: list[int] = torch.randint(0, 160, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    return found


@pytest.fixture(scope="module", params=one_of(CASES), ids=lambda name: name.replace(", ", "-").replace(" ", "_"))
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Written:
    config, fmt, symmetric = CASES[request.param]
    folder = tmp_path_factory.mktemp("static")
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(config)
    for name, parameter in made.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.3)
    made.save_pretrained(folder / "source")
    source = model.open(folder / "source")
    activation = Activation("int8", static=True, symmetric=symmetric)
    plan = calibrated(source, planning.uniform(source.weights, TARGET, formats.get(fmt), (), "rtn", activation), 0.7)
    quantized = artifact.quantize(source, plan, folder / "artifact", progress.silent)
    TARGET.write(quantized, folder / "model.onnx", progress.silent)
    return Written(source, quantized, folder / "model.onnx", onnx.load(folder / "model.onnx"))


def test_every_planned_product_is_made_of_integers_when_a_session_loads(written: Written, tmp_path: Path) -> None:
    written.session(True, tmp_path / "optimized.onnx")
    operators = [node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node]
    assert operators.count("MatMulIntegerToFloat") == len(written.plan.activations) > 3
    assert "DequantizeLinear" not in operators  # what is left of one would be a product in float


def test_stored_codes_scales_and_zeros_are_exactly_the_decoded_weights(written: Written) -> None:
    stored = {entry.name: onnx.numpy_helper.to_array(entry) for entry in written.proto.graph.initializer}
    for name, activation in written.plan.activations.items():
        weight = next(w for w in written.artifact.weights if w.name == name)
        codes, scales, zeros = (stored[f"{name}.{part}"] for part in ("codes", "scales", "zeros"))
        values = (codes.astype(np.float32) - zeros.astype(np.float32)) * scales
        np.testing.assert_array_equal(values.T, written.artifact.decoded(weight).numpy())
        assert stored[f"{name}.input_scale"] == np.float32(activation.scale)
        assert stored[f"{name}.input_zero"] == activation.zero + 128
        assert codes.dtype == stored[f"{name}.input_zero"].dtype == np.uint8  # see the test on a processor without VNNI


def test_logits_are_those_of_the_same_plan_in_torch_fused_or_not(written: Written) -> None:
    """Codes are the same, so only the order of sums in float32 differs: 1e-6 of what rounding the inputs changes. Where that moves a
    later input over the middle of two codes the sequence differs by that code, so it is the median of many that is asked for."""
    module = written.artifact.module()
    plain, rounded = of_module(module), of_module(module, readers(written.plan, written.artifact.weights))
    fused, apart = written.session(True), written.session(False)
    differences = []
    for seed in range(40):
        ids = tokens(12, seed)
        ours = rounded.logits(ids)
        explained = (ours - plain.logits(ids)).norm()
        assert explained > 0.01 * ours.norm()  # rounding and clipping do something
        got = [torch.from_numpy(session.run(None, {"input_ids": np.array([ids])})[0][0]) for session in (fused, apart)]
        differences.append([float((a - b).norm() / explained) for a, b in ((got[0], ours), (got[1], ours), (got[0], got[1]))])
    assert np.median(differences, axis=0).max() < 1e-4


def test_the_plan_is_priced_to_the_byte_with_its_activations(written: Written) -> None:
    stored = {entry.name: onnx.numpy_helper.to_array(entry).nbytes for entry in written.proto.graph.initializer}
    for weight in written.artifact.weights:
        entry = written.plan[weight.name]
        store = storage.store(formats.get(entry.format), weight.shape, 0, entry.activation)
        expected = TARGET.nbytes(weight, formats.get(entry.format), entry.activation)
        assert sum(stored[f"{weight.name}.{part}"] for part in store.specs()) == expected


WEIGHT = Weight("layer", (64, 256), "mlp", "fp16")
STATIC = Activation("int8", static=True)


@pytest.mark.parametrize(
    ("fmt", "activation", "word"),
    [
        ("int8_g32", STATIC, "32 columns"),
        ("int4_channel", STATIC, "int8_channel is"),
        ("fp8_e4m3_channel", STATIC, "int8_channel is"),
        ("int8_channel", Activation("fp8_e4m3", static=True), "no product of fp8_e4m3"),
        ("int8_channel", Activation("int8"), "by itself"),
    ],
)
def test_what_onnx_runtime_would_not_multiply_as_integers_is_refused(fmt: str, activation: Activation, word: str) -> None:
    assert word in (targets.get("onnx").accepts_activation(WEIGHT, formats.get(fmt), activation) or "")


@pytest.mark.parametrize("fmt", ["int8_channel", "int8_tensor", "int8_channel_asym", "int8_tensor_asym"])
def test_8_bit_integers_with_a_scale_per_row_are_accepted(fmt: str) -> None:
    assert targets.get("onnx").accepts_activation(WEIGHT, formats.get(fmt), STATIC) is None
    looked_up = Weight("table", (64, 256), "embedding", "fp16", tied_to="output")
    assert "looked up" in (targets.get("onnx").accepts_activation(looked_up, formats.get(fmt), STATIC) or "")


def test_an_activation_that_calibration_left_dynamic_is_not_written_as_something_else(written: Written) -> None:
    name = next(iter(written.plan.activations))
    dynamic = planning.with_activations(written.plan, {name: Activation("int8")})
    with pytest.raises(InputError, match="int8 activations"):
        TARGET.overhead(Draft(written.source, dynamic))


def worst_case(path: Path, cols: int) -> Tensor:
    """All products as large as they can be, of either sign, in one file: (cols, 2) weights."""
    w = torch.full((2, cols), 127.0)
    w[1] = -127.0
    fmt, activation = formats.get("int8_tensor"), Activation("int8", static=True, scale=1.0)
    grid = {"scales": torch.ones(1, 1, dtype=torch.float16)}
    arrays = qdq.arrays(fmt, (2, cols), activation, fmt.pack((w + 128).to(torch.uint8), grid))
    helper = onnx.helper
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "input_scale", "input_zero"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "input_scale", "input_zero"], ["d"]),
        helper.make_node("DequantizeLinear", ["codes", "scales", "zeros"], ["w"], axis=1),
        helper.make_node("MatMul", ["d", "w"], ["y"]),
    ]
    x, y = (helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, ["rows", size]) for n, size in (("x", cols), ("y", 2)))
    tensors = [onnx.numpy_helper.from_array(a.contiguous().numpy(), n) for n, a in arrays.items() if n != "input_low"]
    graph = helper.make_graph(nodes, "worst", [x], [y], tensors)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    return w


RUN = """
import sys, numpy as np, onnxruntime as ort
options = ort.SessionOptions()
options.intra_op_num_threads = 1
session = ort.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])
for rows in (1, 2, 9):
    for value in (127, -127):
        print(*session.run(None, {"x": np.full((rows, int(sys.argv[2])), value, np.float32)})[0].astype(np.int64).ravel())
"""


@pytest.mark.parametrize("emulated", [False, True], ids=["here", "without_vnni"])
def test_the_largest_products_do_not_saturate(tmp_path: Path, emulated: bool) -> None:
    """x86 without VNNI adds pairs of products of unsigned and signed bytes in 16 bits. A Haswell is such a one."""
    if emulated and not (emulator := shutil.which("qemu-x86_64")):
        pytest.skip("needs qemu-user")
    cols = 1024
    worst_case(tmp_path / "worst.onnx", cols)
    command = [*([emulator, "-cpu", "Haswell"] if emulated else []), sys.executable, "-c", RUN, str(tmp_path / "worst.onnx"), str(cols)]
    got = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    largest = 127 * 127 * cols
    expected = [sign * value for rows in (1, 2, 9) for sign in (1, -1) for value in [largest, -largest] * rows]
    assert [int(value) for value in got] == expected


def test_sums_beyond_31_bits_on_the_way_come_back(tmp_path: Path) -> None:
    """Unsigned codes add up to 255 * 255 * cols before zero points are taken off: integers wrap around, and back."""
    cols = 40_000
    assert 254 * 255 * cols > 2**31 > 127 * 127 * cols
    worst_case(tmp_path / "worst.onnx", cols)
    session = ort.InferenceSession(tmp_path / "worst.onnx", providers=["CPUExecutionProvider"])
    (got,) = session.run(None, {"x": np.full((3, cols), 127, np.float32)})
    np.testing.assert_allclose(got[:, 0], 127 * 127 * cols, rtol=1e-7)  # a float32 holds 24 bits of it
