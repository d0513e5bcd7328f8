from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from fewbits import formats
from fewbits.errors import InputError
from fewbits.model.gguf import architectures
from fewbits.model.weights import Weight
from fewbits.planning import recipes

# Types that llama-quantize stored: the first word for every tensor, then what differs; `type@layers|type` where it depends on the layer.
_SMOLLM2_MORE = "0-2,5,8,11,14,17,20,23,26-29"
SMOLLM2 = {  # llama-quantize --imatrix, August 2026
    "q6_k": "q8_0 ffn_down=q6_k",
    "q4_k_m": f"q5_0 token_embd=q8_0 attn_v=q8_0@{_SMOLLM2_MORE}|q5_0 ffn_down=q6_k@{_SMOLLM2_MORE}|q4_k",
    "q3_k_m": "q4_0 token_embd=q8_0 attn_v=q5_1@0-1|q5_0 attn_output=q5_0 ffn_down=q5_k@0|q4_k",
    "iq4_xs": "iq4_nl token_embd=q8_0 ffn_down=iq4_xs",
    "q4_0": "q4_0 token_embd=q8_0 ffn_down=q4_1@0-2|q4_0",
    "q2_k": "q4_0 token_embd=q8_0 ffn_down=q3_k",
}
_LLAMA_MORE = "0-1,4,7,10,13,16,19-21"
LLAMA_1B = {  # llama-quantize --dry-run, August 2026: without an importance matrix, as the ffn_down of iq4_xs shows
    "q6_k": "q6_k",
    "q5_k_m": f"q5_k output=q6_k attn_v=q6_k@{_LLAMA_MORE}|q5_k ffn_down=q6_k@{_LLAMA_MORE}|q5_k",
    "q4_k_m": f"q4_k output=q6_k attn_v=q6_k@{_LLAMA_MORE}|q4_k ffn_down=q6_k@{_LLAMA_MORE}|q4_k",
    "q4_k_s": "q4_k output=q6_k attn_v=q5_k@0-3|q4_k ffn_down=q5_k@0-1|q4_k",
    "q3_k_m": "q3_k output=q6_k attn_v=q5_k@0-1|q4_k attn_output=q4_k ffn_down=q5_k@0|q4_k",
    "iq4_xs": "iq4_xs output=q6_k attn_v=q5_k ffn_down=q5_k@0-1|iq4_xs",
    "q2_k": "q2_k output=q6_k attn_v=q4_k attn_output=q3_k ffn_down=q3_k",
}

# Below four bits, with an importance matrix: what the functions of llama-quant.cpp answer when they are compiled and asked (August 2026)
LOW_LLAMA_1B = {
    "q1_0": "q1_0 output=q6_k",
    "q2_0": "q2_0 output=q6_k token_embd=q4_k",
    "iq1_s": "iq1_s output=q5_k token_embd=q2_k attn_output=iq2_xxs attn_v=q4_k ffn_down=q2_k@0-1|iq1_s",
    "iq1_m": "iq1_m output=q5_k token_embd=q2_k attn_output=iq2_xxs attn_v=q4_k ffn_down=q2_k@0-1|iq1_m",
    "iq2_xxs": "iq2_xxs output=q5_k token_embd=q2_k attn_v=q4_k ffn_down=q2_k@0-1|iq2_xxs",
    "iq2_xs": "iq2_xs output=q5_k token_embd=q2_k attn_v=q4_k ffn_down=q2_k@0-1|iq2_xs",
    "iq2_s": "iq2_xs output=q5_k token_embd=iq3_s attn_output=iq3_s attn_v=q4_k ffn_down=iq3_s@0-1|iq2_xs",
    "iq2_m": "iq2_s output=q5_k token_embd=iq3_s attn_output=iq3_s attn_v=q4_k ffn_down=iq3_s@0-1|iq2_s",
    "iq3_xxs": "iq3_xxs output=q5_k token_embd=iq3_s attn_k=iq2_s attn_output=iq3_s attn_q=iq2_s attn_v=q4_k",
    "iq3_xs": "iq3_s output=q6_k attn_k=iq3_xxs attn_q=iq3_xxs attn_v=q4_k ffn_gate=iq3_xxs@2-18|iq3_s ffn_up=iq3_xxs@2-18|iq3_s",
    "iq3_s": "iq3_s output=q6_k attn_v=q4_k",
    "iq3_m": "iq3_s output=q6_k attn_output=q4_k attn_v=q4_k ffn_down=q4_k@0-1|iq3_s",
}
LOW_SMOLLM2 = {  # 576 columns do not divide by 256, the 1536 of ffn_down do
    "q2_0": "q2_0 token_embd=q8_0",
    **{name: f"iq4_nl token_embd=q8_0 attn_v=q4_0 ffn_down=q2_k@0-2|{name}" for name in ("iq1_s", "iq1_m", "iq2_xxs", "iq2_xs")},
    "iq2_s": "iq4_nl token_embd=q8_0 ffn_down=iq3_s@0-2|iq2_xs",
    "iq2_m": "iq4_nl token_embd=q8_0 ffn_down=iq3_s@0-2|iq2_s",
    "iq3_xxs": "iq4_nl token_embd=q8_0 ffn_down=iq3_xxs",
    "iq3_xs": "iq4_nl token_embd=q8_0 ffn_down=iq3_s",
    "iq3_s": "iq4_nl token_embd=q8_0 ffn_down=iq3_s",
    "iq3_m": "iq4_nl token_embd=q8_0 attn_output=q5_0 attn_v=q5_0 ffn_down=q4_k@0-2|iq3_s",
}
_EIGHT_SMALL = "output=q5_k attn_k=q4_k attn_output=q5_k attn_v=q4_k"
_EIGHT = "output=q6_k attn_k=q8_0 attn_output=q5_k attn_v=q8_0"
LOW_EIGHT_EXPERTS = {
    "q2_0": "q2_0 output=q6_k token_embd=q4_k attn_k=q8_0 attn_v=q8_0",
    **{name: f"{name} {_EIGHT_SMALL} token_embd=q2_k ffn_down_exps=q2_k@0-1|{name}" for name in ("iq1_s", "iq1_m", "iq2_xxs", "iq2_xs")},
    "iq2_s": f"iq2_xs {_EIGHT_SMALL} token_embd=iq3_s ffn_down_exps=iq3_s@0-1|iq2_xs",
    "iq2_m": f"iq2_s {_EIGHT_SMALL} token_embd=iq3_s ffn_down_exps=iq3_s@0-1|iq2_s",
    "iq3_xxs": "iq3_xxs output=q5_k token_embd=iq3_s attn_q=iq2_s attn_k=q8_0 attn_output=q5_k attn_v=q8_0",
    "iq3_xs": f"iq3_s {_EIGHT} attn_q=iq3_xxs ffn_gate_exps=iq3_xxs@2-13|iq3_s ffn_up_exps=iq3_xxs@2-13|iq3_s",
    "iq3_s": f"iq3_s {_EIGHT}",
    "iq3_m": f"iq3_s {_EIGHT} ffn_down_exps=iq3_s@2-3,5-6,8-9,11-12|q4_k",
}
QWEN3 = {  # tests/snapshots/qwen3-0.6b.schema of llama.cpp: without an importance matrix, two queries for each key
    "iq1_s": "iq1_s output=q5_k token_embd=q2_k attn_v=q2_k attn_output=iq2_xxs ffn_down=q2_k@0-2|iq1_s",
    "iq1_m": "iq1_m output=q5_k token_embd=q2_k attn_v=q2_k attn_output=iq2_xxs ffn_down=q2_k@0-2|iq1_m",
    "iq2_xxs": "iq2_xxs output=q5_k token_embd=q2_k attn_v=q2_k ffn_down=q2_k@0-2|iq2_xxs",
    "iq2_xs": "iq2_xs output=q5_k token_embd=q2_k attn_v=q2_k ffn_down=q2_k@0-2|iq2_xs",
    "iq2_s": "iq2_xs output=q5_k token_embd=iq3_s attn_v=iq3_s attn_output=iq3_s ffn_down=iq3_s@0-2|iq2_xs",
    "iq2_m": "iq2_s output=q5_k token_embd=iq3_s attn_v=iq3_s attn_output=iq3_s ffn_down=iq3_s@0-2|iq2_s",
    "iq3_xxs": "iq3_s output=q5_k attn_q=iq2_s attn_k=iq2_s ffn_gate=iq3_xxs ffn_up=iq3_xxs ffn_down=q4_k@0-2|q3_k",
    "iq3_xs": "iq3_s output=q6_k attn_q=iq3_xxs attn_k=iq3_xxs ffn_gate=iq3_xxs@3-23|iq3_s ffn_up=iq3_xxs@3-23|iq3_s",
    "iq3_s": "iq3_s output=q6_k",
    "iq3_m": "iq3_s output=q6_k attn_v=q4_k attn_output=q4_k ffn_down=q4_k@0-2|iq3_s",
}

# Whole files in GB as published with the files on the Hugging Face hub
LLAMA_70B_FILES = {  # bartowski, Llama 3.1 70B, with an importance matrix; rounded
    "q8_0": 74.98, "q6_k": 57.89, "q5_k_m": 49.95, "q5_k_s": 48.66, "q4_k_m": 42.52, "q4_k_s": 40.35, "q4_0": 40.12, "iq4_xs": 37.90,
    "q3_k_l": 37.14, "q3_k_m": 34.27, "iq3_m": 31.94, "q3_k_s": 30.91, "iq3_xs": 29.31, "q2_k": 26.38, "iq2_m": 24.12, "iq2_s": 22.24,
    "iq2_xs": 21.14, "iq2_xxs": 19.10, "iq1_m": 16.75,
}  # fmt: skip
# bartowski, Mixtral 8x22B v0.1, without one. The page says neither how it rounds nor what type the routers have: cut off after two digits
# and float16 is the reading under which all agree; with float32 routers, as files have today, each would be 5.5 MB more.
MIXTRAL_FILES = {
    "q5_k_m": 99.96, "q5_k_s": 96.97, "q4_k_m": 85.58, "q4_k_s": 80.47, "iq4_nl": 80.47, "iq4_xs": 76.35, "q3_k_l": 72.57, "q3_k_m": 67.78,
    "iq3_m": 64.49, "iq3_s": 61.49, "q3_k_s": 61.49, "iq3_xs": 58.22, "q2_k": 52.10,
}  # fmt: skip

Model = tuple[list[Weight], Any]


def llama(layers: int, hidden: int, mlp: int, heads: int, kv_heads: int, vocabulary: int, tied: bool, **more: Any) -> Model:
    keys = hidden // heads * kv_heads
    shapes = {
        "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (keys, hidden), "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, hidden), "mlp.gate_proj": (mlp, hidden), "mlp.up_proj": (mlp, hidden), "mlp.down_proj": (hidden, mlp),
    }  # fmt: skip
    weights = [Weight("model.embed_tokens", (vocabulary, hidden), "embedding", "bf16", tied_to="lm_head" if tied else None)]
    for layer in range(layers):
        weights += [Weight(f"model.layers.{layer}.{name}", shape, "other", "bf16") for name, shape in shapes.items()]
    weights += [] if tied else [Weight("lm_head", (vocabulary, hidden), "output", "bf16")]
    settings = {"model_type": "llama", "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    return weights, SimpleNamespace(**(settings | more))


def mixtral(layers: int, hidden: int, mlp: int, heads: int, kv_heads: int, vocabulary: int, experts: int) -> Model:
    """Weights under llama.cpp's own names, experts stacked: pass `names=str` with it."""
    keys = hidden // heads * kv_heads
    shapes = {
        "attn_q": (hidden, hidden), "attn_k": (keys, hidden), "attn_v": (keys, hidden), "attn_output": (hidden, hidden),
        "ffn_gate_inp": (experts, hidden), "ffn_gate_exps": (experts * mlp, hidden), "ffn_up_exps": (experts * mlp, hidden),
        "ffn_down_exps": (experts * hidden, mlp),
    }  # fmt: skip
    weights = [Weight(name, (vocabulary, hidden), "other", "bf16") for name in ("token_embd", "output")]
    weights += [Weight(f"blk.{layer}.{name}", shape, "other", "bf16") for layer in range(layers) for name, shape in shapes.items()]
    settings = {"model_type": "mixtral", "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    return weights, SimpleNamespace(**settings, num_local_experts=experts)


def layers_of(text: str) -> set[int]:
    ends = [part.split("-") for part in text.split(",")]
    return {layer for first, *last in ends for layer in range(int(first), int(last[0] if last else first) + 1)}


def stored_type(row: str, tensor: str) -> str:
    """What a row of the tables above says about `blk.3.attn_v.weight`."""
    everything, *exceptions = row.split()
    block, _, kind = tensor.removesuffix(".weight").rpartition(".")
    for kinds, _, types in (exception.partition("=") for exception in exceptions):
        if kinds == kind:
            for choice in types.split("|"):
                name, _, layers = choice.partition("@")
                if not layers or int(block.removeprefix("blk.")) in layers_of(layers):
                    return name
    return everything


def chosen(name: str, model: Model, **options: Any) -> dict[str, str]:
    """GGUF name -> type."""
    weights, config = model
    rename = options.get("names") or architectures.tensor_names(config)
    found = recipes.recipe(name, weights, config, **options)
    return {rename(weight.parameter): found[weight.name].name for weight in weights}


SMOLLM2_MODEL = llama(30, 576, 1536, 9, 3, 49152, tied=True)
LLAMA_1B_MODEL = llama(22, 2048, 5632, 32, 4, 32000, tied=False)
WITH_EIGHT_EXPERTS = mixtral(16, 512, 1024, 8, 2, 64, experts=8)
QWEN3_MODEL = llama(28, 1024, 3072, 16, 8, 151936, tied=False, model_type="qwen3")


@pytest.mark.parametrize("name", SMOLLM2)
def test_every_tensor_of_smollm2_has_the_type_that_llama_quantize_stored(name: str) -> None:
    found = chosen(name, SMOLLM2_MODEL)
    assert len(found) == 211
    assert found == {tensor: stored_type(SMOLLM2[name], tensor) for tensor in found}


@pytest.mark.parametrize("name", LLAMA_1B)
def test_every_tensor_of_a_llama_has_the_type_that_llama_quantize_would_store(name: str) -> None:
    found = chosen(name, LLAMA_1B_MODEL, imatrix=False)
    assert len(found) == 156
    assert found == {tensor: stored_type(LLAMA_1B[name], tensor) for tensor in found}


@pytest.mark.parametrize(
    ("rows", "model", "options"),
    [
        (LOW_LLAMA_1B, LLAMA_1B_MODEL, {}),
        (LOW_SMOLLM2, SMOLLM2_MODEL, {}),
        (LOW_EIGHT_EXPERTS, WITH_EIGHT_EXPERTS, {"names": str}),
        (QWEN3, QWEN3_MODEL, {"imatrix": False}),
    ],
    ids=["untied, eight queries share keys", "tied, most columns do not divide", "eight experts", "without an importance matrix"],
)
def test_mixes_below_four_bits_are_those_of_llama_cpp(rows: dict[str, str], model: Model, options: dict[str, Any]) -> None:
    for name, row in rows.items():
        found = {tensor: fmt for tensor, fmt in chosen(name, model, **options).items() if "ffn_gate_inp" not in tensor}
        assert found == {tensor: stored_type(row, tensor) for tensor in found}, name


@pytest.mark.parametrize("name", LLAMA_70B_FILES)
def test_a_70b_model_weighs_what_its_published_file_does(name: str) -> None:
    weights, config = llama(80, 8192, 28672, 64, 8, 128256, tied=False)
    norms = (2 * 80 + 1) * 8192 * 4
    tensors = (recipes.nbytes(name, weights, config) + norms) / 1e9
    container = 0.010  # at most: 128,256 tokens and 280,147 merges are 7.8 MB of metadata
    assert LLAMA_70B_FILES[name] - 0.005 - container <= tensors <= LLAMA_70B_FILES[name] + 0.005


@pytest.mark.parametrize("name", MIXTRAL_FILES)
def test_a_model_with_eight_experts_weighs_what_its_published_file_does(name: str) -> None:
    weights, config = mixtral(56, 6144, 16384, 48, 8, 32000, experts=8)
    norms, router_in_float16 = (2 * 56 + 1) * 6144 * 4, 56 * 8 * 6144 * 2
    tensors = (recipes.nbytes(name, weights, config, names=str, imatrix=False) + norms - router_in_float16) / 1e9
    container = 0.001  # 32,000 tokens are 0.7 MB of metadata
    assert MIXTRAL_FILES[name] - container <= tensors < MIXTRAL_FILES[name] + 0.01


def test_an_importance_matrix_changes_only_ffn_down() -> None:
    """In most mixes the first eighth of it. In iq3_xxs all of it; the values too where fewer than four queries share them (see QWEN3)."""
    first_eighth = {f"blk.{layer}.ffn_down.weight" for layer in range(22 // 8)}
    for name in set(recipes.known()) - {"iq3_xxs"}:
        with_it, without = chosen(name, LLAMA_1B_MODEL), chosen(name, LLAMA_1B_MODEL, imatrix=False)
        differing = {tensor for tensor in with_it if with_it[tensor] != without[tensor]}
        assert differing == (first_eighth if name in ("q4_0", "q5_0", "iq4_xs", "iq4_nl") else set()), name


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("q2_k_s", "q2_k output=q6_k attn_v=q4_k ffn_down=q4_k@0-1|q2_k"),
        ("q3_k_s", "q3_k output=q6_k"),
        ("q3_k_l", "q3_k output=q6_k attn_v=q5_k attn_output=q5_k ffn_down=q5_k"),
        ("q4_1", "q4_1 output=q6_k"),
        ("q5_0", "q5_0 output=q6_k ffn_down=q5_1@0-1|q5_0"),
        ("q5_1", "q5_1 output=q6_k"),
        ("q5_k_s", "q5_k output=q6_k"),
        ("q8_0", "q8_0"),
        ("iq4_nl", "iq4_nl output=q6_k attn_v=q5_k"),
        ("tq2_0", "tq2_0 output=q6_k token_embd=q4_k"),
        ("mxfp4_moe", "q8_0"),
    ],
)
def test_the_other_mixes_follow_llama_cpp_as_read(name: str, row: str) -> None:
    found = chosen(name, LLAMA_1B_MODEL)
    assert found == {tensor: stored_type(row, tensor) for tensor in found}


def test_only_experts_are_mxfp4_and_their_router_is_not_quantized() -> None:
    found = chosen("mxfp4_moe", WITH_EIGHT_EXPERTS, names=str)
    assert {found[f"blk.3.ffn_{name}_exps.weight"] for name in ("gate", "up", "down")} == {"mxfp4"}
    assert found["blk.3.ffn_gate_inp.weight"] == "fp32"
    assert found["blk.3.attn_q.weight"] == found["token_embd.weight"] == found["output.weight"] == "q8_0"


def test_layers_decide_where_a_layer_has_more_than_one_second_matrix() -> None:
    """A shared expert beside the others: counting tensors instead of layers would end the favoured first eighth too early."""
    weights, config = WITH_EIGHT_EXPERTS
    shared = [Weight(f"blk.{layer}.ffn_down_shexp", (512, 1024), "other", "bf16") for layer in range(16)]
    found = chosen("q4_k_s", ([*shared, *weights], config), names=str)
    for name in ("ffn_down_shexp", "ffn_down_exps"):
        assert [layer for layer in range(16) if found[f"blk.{layer}.{name}.weight"] == "q5_k"] == [0, 1]


def test_the_smallest_mixes_count_tensors_where_a_layer_has_more_than_one_second_matrix() -> None:
    weights, config = WITH_EIGHT_EXPERTS
    shared = [Weight(f"blk.{layer}.ffn_down_shexp", (512, 1024), "other", "bf16") for layer in range(16)]
    found = chosen("iq2_xxs", ([*shared, *weights], config), names=str)
    assert [name for name, fmt in found.items() if "ffn_down" in name and fmt == "q2_k"] == [
        "blk.0.ffn_down_shexp.weight", "blk.0.ffn_down_exps.weight",  # 16 layers: two tensors, and they are both of the first
    ]  # fmt: skip


def test_experts_that_are_planned_one_by_one_get_the_type_of_their_tensor() -> None:
    weights, config = WITH_EIGHT_EXPERTS
    whole = chosen("q4_k_m", WITH_EIGHT_EXPERTS, names=str)
    apart = [Weight(f"blk.{layer}.ffn_down_exps.{i}", (512, 1024), "mlp", "bf16", expert=i) for layer in range(16) for i in range(8)]
    rest = [weight for weight in weights if "ffn_down" not in weight.name]
    names = lambda parameter: parameter if parameter.endswith(".weight") else f"{parameter}.weight"  # noqa: E731
    found = recipes.recipe("q4_k_m", rest + apart, config, names=names)
    assert all(found[weight.name].name == whole[f"{weight.parameter}.weight"] for weight in apart)
    assert {found[weight.name].name for weight in apart} == {"q4_k", "q6_k"}
    assert recipes.nbytes("q4_k_m", rest + apart, config, names=names) == recipes.nbytes("q4_k_m", weights, config, names=str)


def test_the_order_of_weights_does_not_matter() -> None:
    weights, config = LLAMA_1B_MODEL
    backwards = recipes.recipe("q4_k_m", weights[::-1], config)
    assert backwards == recipes.recipe("q4_k_m", weights, config)


def test_gpt2_keeps_its_positions_and_its_fused_attention_counts_as_values() -> None:
    names = {"wte": (50257, 768), "wpe": (1024, 768)}
    names |= {f"h.{layer}.attn.c_attn": (2304, 768) for layer in range(12)} | {f"h.{layer}.mlp.c_proj": (768, 3072) for layer in range(12)}
    weights = [Weight(f"transformer.{name}", shape, "other", "fp32") for name, shape in names.items()]
    config = SimpleNamespace(model_type="gpt2", num_hidden_layers=12, num_attention_heads=12)
    found = chosen("q4_k_m", (weights, config))
    assert found["position_embd.weight"] == "fp32"
    assert found["token_embd.weight"] == "q6_k"
    more = {0, 3, 6, 9, 10, 11}  # 12 layers: the first, the last (7 * 12 // 8 = 10), every third from 1 + 2
    assert {layer for layer in range(12) if found[f"blk.{layer}.attn_qkv.weight"] == "q6_k"} == more


def test_columns_that_divide_by_nothing_become_float16() -> None:
    odd = llama(2, 100, 172, 4, 4, 64, tied=True)
    for name in ("q4_k_m", "q4_0", "iq2_xs"):
        assert set(chosen(name, odd).values()) == {"fp16"}, name


def test_a_type_that_nothing_stands_in_for_stops_the_recipe() -> None:
    with pytest.raises(InputError, match=r"q1_0 stops at `model.layers.0.self_attn.q_proj`: 576 columns do not divide into blocks of 128"):
        chosen("q1_0", SMOLLM2_MODEL)


def test_a_type_that_stands_in_for_another_is_never_smaller() -> None:
    # three queries share keys in one, two in the other: no rule tells them apart
    narrow, wide = llama(4, 288, 864, 9, 3, 64, tied=True), llama(4, 256, 768, 4, 2, 64, tied=True)
    bits = lambda name: formats.get(name).bits_per_weight((256, 256))  # noqa: E731
    for name in set(recipes.known()) - {"q1_0"}:  # for which nothing stands in
        fitting, falling_back = chosen(name, wide), chosen(name, narrow)
        assert all(bits(falling_back[tensor]) >= bits(fitting[tensor]) for tensor in fitting), name


def test_bytes_are_the_sum_over_tensors() -> None:
    weights, config = SMOLLM2_MODEL
    tensors = recipes.recipe("q4_k_m", weights, config)
    bits = sum(tensors[w.name].bits_per_weight(w.shape) * w.shape[0] * w.shape[1] for w in weights)
    assert recipes.nbytes("Q4_K_M", weights, config) * 8 == bits


def test_names_are_taken_in_any_case_and_as_llama_quantize_takes_them() -> None:
    assert recipes.check("Q4_K_M") == recipes.check("q4_k") == "q4_k_m"
    assert all(recipes.check(name) == name for name in recipes.known())
    with pytest.raises(InputError, match="q4_k_n") as wrong:
        recipes.check("q4_k_n")
    assert "`q4_k_m`" in wrong.value.hint
    with pytest.raises(InputError) as strange:
        recipes.check("zzz")
    assert "iq4_xs" in strange.value.hint


def test_recipes_budgets_and_hardware_load_no_torch() -> None:
    code = "import sys, fewbits.planning.footprint, fewbits.planning.budgets, fewbits.planning.recipes; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
