"""One artifact, every target: the same types and values in each file by somebody else's reader, and the same text from each runtime."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from enumerated import one_of
from greedy import by_llama_cpp, by_transformers, recomputed
from torch import Tensor

from fewbits import artifact as artifacts
from fewbits import embedded, formats, planning, targets
from fewbits import model as models
from fewbits.artifact import Artifact
from fewbits.errors import InputError
from fewbits.progress import silent
from fewbits.targets import WrongFileError, export
from fewbits.verification import runtimes
from fewbits.verification.crosscheck import crosscheck

needs_all = pytest.mark.skipif(
    any(runtimes.get(name).missing() for name in ("llama.cpp", "onnxruntime", "onnxruntime-genai", "transformers")),
    reason="one of the runtimes is not installed",
)
TARGETS = {"gguf": "model.gguf", "onnx": "model.onnx", "onnx-genai": "model.genai", "safetensors": "model.ct"}
GREEDY = {"gguf": by_llama_cpp, "onnx": recomputed, "safetensors": by_transformers}
PROMPTS = [  # of the kind that the embedded model was trained on
    "Return the", "The function", "If the argument", "A new list", "Changed in version", "This module", "The string", "Raises", "Note that",
    "Each object", "See also", "For example", "When the file", "Two values", "Set the", "The default", "An iterator", "Deprecated since",
    "All the keys", "The class",
]  # fmt: skip


def made(folder: Path, name: str, overrides: list[str], target: str = "fewbits") -> Artifact:
    source = models.open(embedded.MODEL)
    plan = planning.uniform(source.weights, targets.get(target), formats.get(name), overrides, "rtn", None, None)
    return artifacts.quantize(source, plan, folder, silent)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """The three formats that all targets share; compressed-tensors keeps embeddings in float."""
    return made(tmp_path_factory.mktemp("mixed") / "artifact", "int4_g32", ["embed=fp16", "down_proj=int8_g32", "o_proj=fp16"])


@pytest.fixture(scope="module")
def files(mixed: Artifact, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("files")
    return {name: export.export(mixed, folder / name, to=name) for name in TARGETS}


def gguf_values(path: Path) -> dict[str, Tensor]:
    """By gguf's own decoder; the order of rows by the definition: llama.cpp turns neighbours, transformers halves of a head."""
    import gguf

    config, found = models.open(embedded.MODEL).config, {}
    names = {
        "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    }  # fmt: skip
    for tensor in gguf.GGUFReader(path).tensors:
        values = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32))
        if tensor.name == "token_embd.weight":
            found["model.embed_tokens"] = values
        if not tensor.name.startswith("blk.") or "norm" in tensor.name:
            continue
        _, layer, name, _ = tensor.name.split(".")
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(name)
        if heads:
            values = values.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
        found[f"model.layers.{layer}.{names[name]}"] = values
    return found


def onnx_values(path: Path) -> dict[str, Tensor]:
    """By the definition of MatMulNBits: block_size codes from the low bits up, times a scale, around 2^(bits - 1)."""
    import onnx

    model = onnx.load(path / "model.onnx" if path.is_dir() else path)
    arrays = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    found: dict[str, Tensor] = {}
    for node in model.graph.node:
        if node.op_type != "MatMulNBits":
            continue
        said = {attribute.name: attribute.i for attribute in node.attribute}
        name = node.input[1].removesuffix(".codes")
        codes = torch.from_numpy(arrays[node.input[1]].copy()).reshape(said["N"], -1, 1)
        shifts = torch.arange(0, 8, said["bits"], dtype=torch.uint8)
        values = (codes >> shifts & ((1 << said["bits"]) - 1)).flatten(1).float() - (1 << (said["bits"] - 1))
        scales = torch.from_numpy(arrays[node.input[2]].copy()).reshape(said["N"], -1).float()
        found[name] = (values.unflatten(1, (scales.shape[1], -1)) * scales[..., None]).flatten(1)[:, : said["K"]]
    for name, array in arrays.items():
        if name.endswith(".values"):
            found[name.removesuffix(".values")] = torch.from_numpy(array.astype(np.float32))
    return found


def transformers_values(path: Path) -> dict[str, Tensor]:
    """By compressed-tensors, when transformers loads the folder."""
    from transformers import AutoModelForCausalLM
    from transformers.utils.quantization_config import CompressedTensorsConfig

    module = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, quantization_config=CompressedTensorsConfig(run_compressed=False)
    )
    return {
        name: child.weight.detach().float() for name, child in module.named_modules() if isinstance(getattr(child, "weight", None), Tensor)
    }


READERS = {"gguf": gguf_values, "onnx": onnx_values, "onnx-genai": onnx_values, "safetensors": transformers_values}


@needs_all
@pytest.mark.parametrize("target", TARGETS)
def test_one_plan_has_the_same_types_and_values_everywhere(target: str, mixed: Artifact, files: dict[str, Path]) -> None:
    values = READERS[target](files[target])
    for weight in mixed.weights:
        assert torch.equal(values[weight.name], mixed.decoded(weight)), weight.name
    written = targets.get(target).written(files[target])
    q4, q8 = {"gguf": ("q4_0", "q8_0")}.get(target, ("int4_g32", "int8_g32"))
    named = {"embed_tokens": "fp16", "down_proj": q8, "o_proj": "fp16"}
    wanted = {weight.name: named.get(weight.name.rpartition(".")[2], q4) for weight in mixed.weights}
    assert {name: written[name] for name in wanted} == wanted


MIXES = {
    "gguf": ("q4_k", ["embed=q6_k", "down_proj=iq4_nl", "v_proj=q5_0", "o_proj=bf16"]),
    "onnx": ("int4_g32_asym", ["embed=int8_channel", "down_proj=int8_g32", "v_proj=int4_g64", "o_proj=bf16"]),
    "onnx-genai": ("int4_g32_asym", ["embed=int8_g32", "down_proj=int2_g32_asym", "v_proj=int4_g64", "o_proj=fp16"]),
    "safetensors": ("int4_g32_asym", ["embed=keep", "down_proj=int8_channel", "v_proj=fp8_e4m3_channel", "o_proj=int6_g32"]),
}


@needs_all
@pytest.mark.parametrize("target", one_of(TARGETS))
def test_each_target_carries_a_mixture_of_its_own(target: str, tmp_path: Path) -> None:
    """Types as planned, and a runtime that computes what the artifact says: its KL to torch is what rounded inputs explain, or nothing."""
    own = made(tmp_path / "artifact", *MIXES[target], target)
    assert len({entry.format for entry in own.plan.entries}) >= 4
    file = export.export(own, tmp_path / "out", to=target)
    targets.get(target).check(own.plan, own.weights, file)
    window = own.tokenizer("The function returns a new list of the keys in the dictionary, sorted by their values.")["input_ids"]
    session = runtimes.get(targets.get(target).runtime).open(file, 64)
    found = crosscheck(own, targets.get(target), session, [window], floor=0.0)
    session.close()
    assert found.agrees and (found.explained > 0) == (target != "safetensors"), found


def test_a_file_that_is_not_as_planned_is_noticed(files: dict[str, Path], tmp_path: Path) -> None:
    other = made(tmp_path / "other", "int8_g32", ["embed=fp16"])
    with pytest.raises(WrongFileError, match=r"has `model.layers.0.self_attn.q_proj` as q4_0, and the plan says q8_0"):
        targets.get("gguf").check(other.plan, other.weights, files["gguf"])
    with pytest.raises(WrongFileError, match=r"as int4_g32, and the plan says int8_g32"):
        targets.get("onnx").check(other.plan, other.weights, files["onnx"])


@needs_all
@pytest.mark.slow
def test_runtimes_continue_a_text_alike(tmp_path: Path, record_property: Any) -> None:
    """Greedy, 32 tokens, 20 prompts, one int8 plan. Where two runtimes choose otherwise, it is between the two best tokens, and those are
    nearer to each other than the runtimes' logits were before: what comes after is another text, and not compared."""
    own = made(tmp_path / "artifact", "int8_g32", ["embed=fp16"])
    sessions = {}
    for name in ("gguf", "onnx", "safetensors"):
        file = export.export(own, tmp_path / name, to=name)
        sessions[name] = runtimes.get(targets.get(name).runtime).open(file, 128)
    same = 0
    for prompt in PROMPTS:
        tokens = own.tokenizer(prompt)["input_ids"]
        texts = {name: GREEDY[name](session, tokens, 32) for name, session in sessions.items()}
        first = texts.pop("safetensors")
        for name, text in texts.items():
            place = next((i for i in range(32) if first[i] != text[i]), None)
            if place is None:
                same += 1
                continue
            shared = tokens + first[:place]
            one, two = sessions["safetensors"].logits(shared), sessions[name].logits(shared)
            elsewhere = float((one - two)[:-1].abs().max())  # at the place itself the margin is below it by definition
            best = one[-1].topk(2).values
            assert float(best[0] - best[1]) <= elsewhere and text[place] in one[-1].topk(2).indices, (prompt, name, place)
    record_property("table", f"same greedy text as transformers, of {2 * len(PROMPTS)}: {same}")
    assert same >= len(PROMPTS)  # so that not everything is a near-tie


class TestCommandLine:
    @needs_all
    def test_a_split_gguf_is_written_verified_and_looked_into(self, run: Any, mixed: Artifact, tmp_path: Path) -> None:
        code, out, err = run("export", mixed.path, "-o", tmp_path / "parts", "--split-size", "1MB", "--json")
        assert code == 0, err
        parts = sorted((tmp_path / "parts").glob("*.gguf"))
        assert len(parts) > 1 and json.loads(out)["bytes"] >= sum(part.stat().st_size for part in parts)
        code, out, err = run("verify", tmp_path / "parts", "--against", embedded.MODEL, "--tokens", "256", "--no-floor", "--json")
        assert code == 0 and json.loads(out)["runtime"] == "llama.cpp", err
        code, out, _ = run("inspect", tmp_path / "parts", "--no-values", "--json")
        assert code == 0 and len(json.loads(out)["tensors"]) > len(mixed.weights)
        code, _, err = run("export", mixed.path, "-o", tmp_path / "one.gguf", "--split-size", "1MB")
        assert code == 2 and "folder" in err

    @needs_all
    @pytest.mark.parametrize("target", one_of(["safetensors", "onnx-genai"]))
    def test_quantize_ends_with_a_verdict_of_the_runtime(self, target: str, run: Any, tmp_path: Path) -> None:
        words = ("quantize", embedded.MODEL, "-o", tmp_path, "--to", target, "--format", "int8_g32", "--method", "rtn", "--tokens", "512")
        code, out, err = run(*words, "--json")
        assert code == 0, err
        result = json.loads(out)
        verdict = result["verdict"]
        assert verdict["runtime"] == targets.get(target).runtime and verdict["kl_mean"] < 2e-3
        stored = Artifact(Path(result["artifact"])).verdicts
        assert stored[verdict["runtime"]]["kl_mean"] == verdict["kl_mean"]
        assert abs(verdict["bits_per_weight"] - result["plan"]["bits_per_weight"]) < 0.01
        code, out, _ = run("inspect", result["file"], "--no-values", "--json")
        assert code == 0 and json.loads(out)["tensors"]

    def test_a_float_onnx_file_is_quantized_and_judged(self, run: Any, tmp_path: Path) -> None:
        onnx = pytest.importorskip("onnx")
        from onnx import TensorProto, helper, numpy_helper

        w = numpy_helper.from_array(np.random.default_rng(0).standard_normal((64, 48)).astype(np.float32), "w")
        x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [None, size]) for n, size in (("x", 64), ("y", 48)))
        graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "g", [x], [y], [w])
        onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), tmp_path / "f.onnx")
        words = ("quantize", tmp_path / "f.onnx", "-o", tmp_path / "q.onnx", "--format", "int8_g32", "--method", "rtn")
        code, out, err = run(*words, "--min-cosine", "0.999", "--json")
        assert code == 0 and json.loads(out)["verdict"]["passed"], err
        code, _, err = run("verify", tmp_path / "q.onnx", "--against", tmp_path / "f.onnx", "--min-cosine", "1.0")
        assert code == 1 and "is below 1" in err
        code, _, err = run(*words, "--size", "4bpw")
        assert code == 2 and "--size" in err
        code, _, err = run("verify", tmp_path / "q.onnx", "--against", embedded.MODEL, "--min-cosine", "0.9")
        assert code == 2 and "--max-kl" in err

    def test_split_goes_with_gguf_alone(self, mixed: Artifact, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="split-size"):
            export.export(mixed, tmp_path / "x", to="onnx", split_size=1000)
