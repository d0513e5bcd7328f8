"""Any float ONNX file in: what a weight is, what it becomes, what stays as it is, and what the file computes then."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from graphs import HALVES, KEPT, PACKED, X, model, node, values
from torch import Tensor, nn

from fewbits import formats, kernels, onnx_graphs
from fewbits.errors import InputError
from fewbits.methods import rtn
from fewbits.model.onnx import constants
from fewbits.model.onnx.graph import OnnxModel
from fewbits.onnx_graphs import inputs as samples
from fewbits.onnx_graphs import outputs, save, statistics, target, verbs
from fewbits.planning import Plan

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")

LONGEST = 72 + 2  # products in a sum, and what is added: the longest is a convolution's, 8 * 3 * 3
FORMATS = ("int4_g32", "int2_g32_asym", "int8_channel", "int8_channel_asym")


def opened(proto: Any, path: Path) -> OnnxModel:
    onnx.save(proto, path)
    return onnx_graphs.open(path)


def packed(source: OnnxModel, fmt: str, path: Path) -> tuple[Plan, Any]:
    plan = target.plan_for(source, target.OnnxFile(source, 0), fmt)
    verbs.write_quantized(source, plan, path, accuracy_level=0)
    return plan, onnx.load(path)


def run(proto: Any, feed: dict[str, Any], optimized: bool = True) -> list[Any]:
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    if not optimized:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    found: list[Any] = session.run(None, feed)
    return found


def with_decoded_weights(source: OnnxModel, plan: Plan, change: Callable[[Any], Any] = lambda array: array) -> Any:
    """The float graph itself, its weights set to what their codes stand for: the slow twin of the packed one."""
    proto = onnx.ModelProto.FromString(source.proto.SerializeToString())
    stored = {(scope, tensor.name): tensor for scope, graph in constants.graphs(proto) for tensor in graph.initializer}
    for scope, graph in constants.graphs(proto):
        stored |= {(scope, n.output[0]): n.attribute[0].t for n in graph.node if n.op_type == "Constant"}
    for weight in source.weights:
        fmt, constant = formats.get(plan[weight.name].format), source.graph_weight(weight.name).constant
        decoded = kernels.decode(fmt, rtn.quantize(source.load(weight), fmt), weight.shape)
        array = (decoded.T if weight.transposed else decoded).reshape(constant.shape).numpy()
        tensor = stored[constant.key]
        wide = np.float16 if source.graph_weight(weight.name).dtype == onnx.TensorProto.FLOAT16 else np.float32
        tensor.CopyFrom(onnx.numpy_helper.from_array(array.astype(wide), tensor.name))
    for tensor in stored.values():
        if tensor.data_type in (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16):
            array = change(onnx.numpy_helper.to_array(tensor))
            tensor.CopyFrom(onnx.numpy_helper.from_array(np.asarray(array), tensor.name))
    return proto


def feeds(source: OnnxModel, seed: int = 0) -> dict[str, Any]:
    feed = dict(samples.random(source, samples.declarations(source), seed))
    return feed | ({"take": np.array(seed % 2 == 0)} if "take" in feed else {})


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("name", PACKED)
def test_a_packed_file_computes_with_the_decoded_weights(name: str, fmt: str, tmp_path: Path) -> None:
    """All these graphs are sums of products: the bound is that of float32 sums, from the same graph run on magnitudes."""
    proto, count, operators = PACKED[name]
    source = opened(proto, tmp_path / "float.onnx")
    plan, made = packed(source, fmt, tmp_path / "packed.onnx")
    assert sum(formats.get(entry.format).levels is not None for entry in plan.entries) == count
    found = [n.op_type for n in made.graph.node]
    assert [op for op in found if op != "Slice"] == [op for op in operators if op != "Slice"] and set(operators) <= set(found)
    for seed in range(3):
        feed = feeds(source, seed)
        expected = run(with_decoded_weights(source, plan), feed)
        bounds = run(with_decoded_weights(source, plan, np.abs), {key: np.asarray(np.abs(value)) for key, value in feed.items()})
        for got, want, bound in zip(run(made, feed), expected, bounds, strict=True):
            assert got.shape == want.shape and got.dtype == want.dtype
            assert (np.abs(got - want) <= 2 * LONGEST * np.finfo(np.float32).eps * np.abs(bound)).all()


@pytest.mark.parametrize("fmt", ["int4_g32", "int8_channel"])
@pytest.mark.parametrize("name", HALVES)
def test_a_graph_in_float16_stays_in_float16(name: str, fmt: str, tmp_path: Path) -> None:
    source = opened(HALVES[name], tmp_path / "float.onnx")
    plan, made = packed(source, fmt, tmp_path / "packed.onnx")
    assert not plan.fallbacks or name == "conv"
    feed = feeds(source)
    (got,), (want,) = run(made, feed), run(with_decoded_weights(source, plan), feed)
    (bound,) = run(with_decoded_weights(source, plan, np.abs), {key: np.asarray(np.abs(value)) for key, value in feed.items()})
    assert got.dtype == want.dtype == np.float16
    # a runtime may hold sums of 16 bits wherever it likes: a few roundings of the result, and one of each product
    assert (np.abs(got.astype(np.float32) - want.astype(np.float32)) <= 4 * np.finfo(np.float16).eps * bound.astype(np.float32)).all()
    stored = sum(onnx.numpy_helper.to_array(t).nbytes for t in made.graph.initializer if t.name.startswith(f"{plan.entries[0].weight}."))
    assert stored == plan.entries[0].nbytes


@pytest.mark.parametrize("name", KEPT)
def test_what_cannot_be_packed_is_kept_as_it_is_and_the_plan_says_why(name: str, tmp_path: Path) -> None:
    proto, words = KEPT[name]
    source = opened(proto, tmp_path / "float.onnx")
    plan, made = packed(source, "int4_g32", tmp_path / "packed.onnx")
    (entry,) = plan.entries
    assert words in entry.reason and entry.fallback
    assert made.graph.SerializeToString() == proto.graph.SerializeToString()
    assert entry.nbytes == onnx.numpy_helper.to_array(proto.graph.initializer[0]).nbytes


@pytest.mark.parametrize("name", PACKED)
def test_the_bytes_of_every_weight_are_those_of_the_plan(name: str, tmp_path: Path) -> None:
    source = opened(PACKED[name][0], tmp_path / "float.onnx")
    for fmt in FORMATS:
        plan, made = packed(source, fmt, tmp_path / "packed.onnx")
        tensors = {t.name: t for _, graph in constants.graphs(made) for t in graph.initializer}
        for entry in plan.entries:
            parts = [tensors[f"{entry.weight}.{part}"] for part in ("codes", "scales", "zeros") if f"{entry.weight}.{part}" in tensors]
            assert sum(onnx.numpy_helper.to_array(t).nbytes for t in parts) == entry.nbytes, (fmt, entry)


def test_names_are_those_of_tensors_layers_or_nodes(tmp_path: Path) -> None:
    names = {name: opened(PACKED[name][0], tmp_path / "m.onnx").weights[0].name for name in ("matmul", "matmul, bias added")}
    assert names == {"matmul": "w", "matmul, bias added": "layer.weight"}
    inside = opened(PACKED["inside an if, stored outside and inside"][0], tmp_path / "m.onnx")
    assert {w.name for w in inside.weights} == {"w", "choose.then_branch/inner", "choose.else_branch/inner"}
    counted = model([node("MatMul", ["x", "val_3"], ["y"], name="/head/MatMul")], {"val_3": values(64, 24)}, X)
    assert opened(counted, tmp_path / "m.onnx").weights[0].name == "/head/MatMul"
    scopes = onnx.StringStringEntryProto(key="pkg.torch.onnx.name_scopes", value="['', 'encoder', 'encoder.query', 'linear_3']")
    counted.graph.node[0].metadata_props.append(scopes)
    assert opened(counted, tmp_path / "m.onnx").weights[0].name == "encoder.query.weight"


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random BERT of one layer with the embedded model's tokenizer beside it, its tensors in a file of their own."""
    import shutil
    import warnings

    from transformers import BertConfig, BertModel

    from fewbits import embedded

    folder = tmp_path_factory.mktemp("bert")
    shutil.copyfile(embedded.MODEL / "tokenizer.json", folder / "tokenizer.json")
    vocabulary = json.loads((embedded.MODEL / "config.json").read_text())["vocab_size"]
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=vocabulary, hidden_size=64, num_hidden_layers=1, num_attention_heads=4, intermediate_size=160,
        max_position_embeddings=128, initializer_range=0.15, attn_implementation="eager",
    )  # fmt: skip

    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bert = BertModel(config, add_pooling_layer=False)

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            hidden: Tensor = self.bert(input_ids=input_ids, attention_mask=attention_mask, return_dict=False)[0]
            return hidden

    made, ids = Hidden().eval(), torch.ones(2, 7, dtype=torch.long)
    names, sizes = ["input_ids", "attention_mask"], {0: "batch", 1: "sequence"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            made, (ids, ids), folder / "model.onnx", dynamo=False, opset_version=17,
            input_names=names, output_names=["hidden"], dynamic_axes=dict.fromkeys(names, sizes),
        )  # fmt: skip
    onnx.save(onnx.load(folder / "model.onnx"), folder / "model.onnx", save_as_external_data=True, location="model.onnx.data")
    with torch.no_grad():
        expected = made(ids, ids).numpy()
    np.testing.assert_allclose(run_file(folder / "model.onnx", {name: ids.numpy() for name in names}), expected, atol=1e-4)
    return folder / "model.onnx"


def test_a_bert_is_packed_and_the_rest_is_untouched_byte_for_byte(bert: Path, tmp_path: Path) -> None:
    source = onnx_graphs.open(bert)
    result = verbs.quantize(bert, tmp_path / "out.onnx", format="int4_g32", override=["query=int8_channel", "value=keep"], samples=16)
    kinds = Counter(entry.format for entry in result.plan.entries)
    assert kinds == {"int4_g32": 6, "int8_channel": 1, "fp32": 2}  # one kept by name, and the 2 x 64 token types
    before, after = onnx.load(bert), onnx.load(tmp_path / "out.onnx")
    assert not source.beside & {"out.onnx.data"} and not (tmp_path / "out.onnx.data").exists()

    replaced = {
        use.node.output[0] for w in source.weights for use in source.graph_weight(w.name).uses if result.plan[w.name].format != "fp32"
    }
    assert set(plain(before.graph.node)) - set(plain(after.graph.node)) == {
        n.SerializeToString() for n in before.graph.node if n.output[0] in replaced
    }
    new = [n for n in after.graph.node if n.SerializeToString() not in set(plain(before.graph.node))]
    assert Counter(n.op_type for n in new) == {"MatMulNBits": 5, "GatherBlockQuantized": 2}
    gone = {source.graph_weight(e.weight).constant.name for e in result.plan.entries if e.format != "fp32"}
    kept = {t.name: onnx.numpy_helper.to_array(t).tobytes() for t in before.graph.initializer if t.name not in gone}
    stored = {t.name: onnx.numpy_helper.to_array(t).tobytes() for t in after.graph.initializer}
    assert kept.items() <= stored.items() and not gone & set(stored)


def plain(nodes: Any) -> list[bytes]:
    return [n.SerializeToString() for n in nodes]


def test_the_verdict_says_how_far_every_output_is_from_the_float_file(bert: Path, tmp_path: Path) -> None:
    result = verbs.quantize(bert, tmp_path / "out.onnx", format="int8_g32", method="rtn", min_cosine=0.99)
    verdict = result.verdict
    assert verdict and verdict.passed and verdict.inputs == "embedded text" and verdict.samples == 64
    again = verbs.verify(tmp_path / "out.onnx", bert, min_cosine=0.99)
    assert again == verdict
    given = samples.gather(onnx_graphs.open(bert), (), 64).samples
    base, test = ([run_file(path, dict(sample)) for sample in given] for path in (bert, tmp_path / "out.onnx"))
    a, b = (np.concatenate([part.ravel() for part in parts]).astype(np.float64) for parts in (base, test))
    (output,) = verdict.outputs
    assert output.cosine == pytest.approx(a @ b / math.sqrt((a @ a) * (b @ b)), abs=1e-12)
    assert output.relative_error == pytest.approx(np.linalg.norm(a - b) / np.linalg.norm(a), rel=1e-9)
    assert output.max_abs_diff == np.abs(a - b).max()
    assert verdict.bytes == (tmp_path / "out.onnx").stat().st_size < verdict.bytes_float / 2.5
    failed = verbs.verify(tmp_path / "out.onnx", bert, min_cosine=1.0, max_error=0.0)
    assert not failed.passed and len(failed.failures) == 2
    assert json.loads(json.dumps(result.to_dict()))["verdict"]["passed"] is True


def run_file(path: Path, feed: dict[str, Any]) -> Any:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"]).run(None, feed)[0]


def test_statistics_of_the_files_own_inputs_make_better_codes(bert: Path, tmp_path: Path) -> None:
    errors = {}
    for method in ("rtn", "gptq"):
        result = verbs.quantize(bert, tmp_path / f"{method}.onnx", format="int4_g32", override=["embeddings=keep"], method=method)
        assert result.verdict
        errors[method] = result.verdict.outputs[0].relative_error
        used = {how["method"] for name, how in result.outcomes.items() if "embeddings" not in name}
        assert used == {method}
    assert errors["gptq"] < 0.8 * errors["rtn"]


def test_statistics_in_several_runs_are_those_of_one(bert: Path) -> None:
    source = onnx_graphs.open(bert)
    plan = target.plan_for(source, target.OnnxFile(source), "int4_g32", method="gptq")
    given = samples.gather(source, (), 6)
    whole, parts = (statistics.Statistics(source, plan, given, list_of, memory) for memory in (1 << 30, 1 << 16))
    products = [w.name for w in source.weights if w.kind != "embedding"]
    for name in products:
        one, other = whole.of(name), parts.of(name)
        assert one and other and one.input and other.input
        torch.testing.assert_close(one.hessian(), other.hessian(), rtol=0, atol=0)
    assert len(parts._groups) == 3 and whole.of(source.weights[0].name) is None


def list_of(items: Any, total: int, what: str) -> Any:
    assert what == "calibrating" and total == 6
    yield from items


def test_text_without_blank_lines_is_cut_into_samples_none_of_which_is_lost(bert: Path, tmp_path: Path) -> None:
    text = "\n".join(" ".join(f"word{i}x{j}" for j in range(200)) for i in range(5))
    (tmp_path / "lines.txt").write_text(text)
    given = samples.gather(onnx_graphs.open(bert), [tmp_path / "lines.txt"], 1000)
    lengths = [sample["input_ids"].shape[1] for sample in given.samples]
    assert given.about == "lines.txt" and max(lengths) == 128 and len(lengths) > 10
    import tokenizers

    whole = tokenizers.Tokenizer.from_file(str(bert.parent / "tokenizer.json"))
    special = len(whole.encode("").ids)
    assert sum(lengths) - special * len(lengths) == sum(len(whole.encode(line).ids) - special for line in text.split("\n"))


def test_two_bits_without_data_are_refused_unless_rounding_is_asked_for(tmp_path: Path) -> None:
    onnx.save(PACKED["matmul"][0], tmp_path / "float.onnx")
    with pytest.raises(InputError, match=r"2\.56 bits, under 3, need to know which columns matter") as refused:
        verbs.quantize(tmp_path / "float.onnx", tmp_path / "out.onnx", format="int2_g32_asym")
    assert "`--data`" in refused.value.hint and not (tmp_path / "out.onnx").exists()
    assert verbs.quantize(tmp_path / "float.onnx", tmp_path / "out.onnx", format="int2_g32_asym", method="rtn").plan.entries


def test_a_packed_graph_has_a_model_card(tmp_path: Path) -> None:
    from huggingface_hub import ModelCard

    onnx.save(PACKED["matmul"][0], tmp_path / "float.onnx")
    verbs.quantize(tmp_path / "float.onnx", tmp_path / "out.onnx", format="int8_channel", method="rtn")
    card = ModelCard.load(tmp_path / "out.onnx.README.md")
    assert card.data.to_dict()["fewbits_command"] == "fewbits quantize float.onnx -o out.onnx --format int8_channel --method rtn"
    assert "cosine to float" in card.text and "int8_channel" in card.text and str(tmp_path) not in card.content


def test_a_plan_that_was_written_makes_the_same_file(bert: Path, tmp_path: Path) -> None:
    first = verbs.quantize(bert, tmp_path / "a.onnx", format="int4_g32", method="rtn", no_verify=True)
    assert first.verdict is None
    second = verbs.quantize(bert, tmp_path / "b.onnx", plan=first.plan_path, no_verify=True)
    assert (tmp_path / "a.onnx").read_bytes() == (tmp_path / "b.onnx").read_bytes()
    assert second.plan == first.plan


def test_large_files_keep_their_tensors_beside_them(bert: Path, tmp_path: Path) -> None:
    source = onnx_graphs.open(bert)
    plan = target.plan_for(source, target.OnnxFile(source), "int4_g32")
    verbs.write_quantized(source, plan, tmp_path / "one.onnx")
    proto = onnx.load(tmp_path / "one.onnx")
    save.save(proto, source, tmp_path / "two.onnx", largest=1 << 12)
    inside = onnx.load(tmp_path / "two.onnx", load_external_data=False).graph.initializer
    assert all(len(tensor.raw_data) < 1024 for tensor in inside)
    feed = dict(samples.gather(source, (), 1).samples[0])
    np.testing.assert_array_equal(run_file(tmp_path / "one.onnx", feed), run_file(tmp_path / "two.onnx", feed))
    nbytes = outputs.verify(tmp_path / "two.onnx", bert, samples.gather(source, (), 1)).bytes
    assert nbytes == sum((tmp_path / name).stat().st_size for name in ("two.onnx", "two.onnx.data"))
    one, two = (stored_in(tmp_path / f"{name}.onnx") for name in ("one", "two"))
    assert one.keys() == two.keys() and all(np.array_equal(one[name], two[name]) for name in one)


def stored_in(path: Path) -> dict[str, Any]:
    return {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in onnx.load(path).graph.initializer}


def test_a_convolution_falls_back_to_8_bits_per_channel(tmp_path: Path) -> None:
    source = opened(PACKED["conv"][0], tmp_path / "m.onnx")
    (entry,) = target.plan_for(source, target.OnnxFile(source), "int4_g32").entries
    assert entry.format == "int8_channel" and entry.fallback


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"z": values(2, 5, 64)}, "no array `x`"),
        ({"x": values(2, 64)}, "2 axes, the file takes 3"),
        ({"x": values(2, 5, 32)}, "the file takes batch x tokens x 64"),
        ({"x": np.array([["a"]])}, "the file takes float32"),
        ({"x": values(0, 2, 5, 64)}, "no samples"),
    ],
)
def test_arrays_that_do_not_fit_are_input_errors(arrays: dict[str, Any], words: str, tmp_path: Path) -> None:
    onnx.save(PACKED["matmul"][0], tmp_path / "float.onnx")
    np.savez(tmp_path / "data.npz", **arrays)
    with pytest.raises(InputError, match=words) as caught:
        verbs.quantize(tmp_path / "float.onnx", tmp_path / "out.onnx", format="int4_g32", data=[tmp_path / "data.npz"])
    assert caught.value.hint and not (tmp_path / "out.onnx").exists()


def test_other_mistakes_are_input_errors_with_hints(bert: Path, tmp_path: Path) -> None:
    onnx.save(PACKED["matmul"][0], tmp_path / "float.onnx")
    (tmp_path / "text.txt").write_text("some words that nobody can give to a matrix")
    np.savez(tmp_path / "single.npz", x=values(2, 5, 64))
    (tmp_path / "broken.onnx").write_bytes(bert.read_bytes()[:1000])
    (tmp_path / "alone.onnx").write_bytes(bert.read_bytes())
    relu = model([node("Relu", ["x"], ["y"])], {}, X)
    onnx.save(relu, tmp_path / "relu.onnx")
    mistakes: list[tuple[str, dict[str, Any]]] = [
        ("float.onnx", {"data": [tmp_path / "text.txt"], "format": "int4_g32"}),
        ("float.onnx", {}),
        ("float.onnx", {"format": "int4_g32", "plan": "plan.json"}),
        ("float.onnx", {"format": "int4_g32", "min_cosine": 2.0}),
        ("float.onnx", {"format": "int4_g32", "data": [tmp_path / "single.npz"]}),
        ("float.onnx", {"format": "int4_g32", "out": tmp_path / "float.onnx"}),
        ("broken.onnx", {"format": "int4_g32"}),
        ("alone.onnx", {"format": "int4_g32"}),
        ("absent.onnx", {"format": "int4_g32"}),
        ("relu.onnx", {"format": "int4_g32"}),
    ]
    for name, given in mistakes:
        with pytest.raises(InputError) as caught:
            verbs.quantize(tmp_path / name, given.pop("out", tmp_path / "out.onnx"), **given)
        assert caught.value.hint, name
    assert not (tmp_path / "out.onnx").exists()


def test_a_damaged_weight_is_refused_by_name(tmp_path: Path) -> None:
    w = values(64, 24)
    w[3, 5] = np.inf
    source = opened(model([node("MatMul", ["x", "w"], ["y"])], {"w": w}, X), tmp_path / "m.onnx")
    with pytest.raises(InputError, match="`w` holds inf at row 5, column 3"):
        packed(source, "int8_channel", tmp_path / "out.onnx")


def test_outputs_that_are_not_finite_fail_the_verdict(tmp_path: Path) -> None:
    onnx.save(model([node("MatMul", ["x", "w"], ["y"])], {"w": values(64, 24)}, X), tmp_path / "float.onnx")
    divided = [node("MatMul", ["x", "w"], ["m"]), node("Div", ["m", "zero"], ["y"])]
    infinite = model(divided, {"w": values(64, 24), "zero": np.float32(0)}, X)
    onnx.save(infinite, tmp_path / "bad.onnx")
    verdict = verbs.verify(tmp_path / "bad.onnx", tmp_path / "float.onnx")
    assert not verdict.passed and "not finite" in verdict.failures[0]
