from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fewbits.devices import units
from fewbits.errors import InputError
from fewbits.formats.runtime import kv
from fewbits.planning import footprint
from fewbits.planning.footprint import Shape, Use
from fewbits.verification.runtimes import llamacpp

MIB = 1 << 20
LOG_STEP = 0.005 * MIB  # llama.cpp reports MiB with two digits


def llama(hidden: int, heads: int, kv_heads: int, mlp: int, vocabulary: int, layers: int = 2, width: int = 0, **more: Any) -> Shape:
    config = {
        "model_type": "llama", "hidden_size": hidden, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "head_dim": width or hidden // heads, "intermediate_size": mlp, "vocab_size": vocabulary, "num_hidden_layers": layers,
        "tie_word_embeddings": True,
    }  # fmt: skip
    return footprint.shape(SimpleNamespace(**(config | more)))


EMBEDDED = llama(256, 4, 2, 768, 2048, layers=4)
SMOLLM2 = llama(576, 9, 3, 1536, 49152, layers=30)
LLAMA_1B = llama(2048, 32, 4, 5632, 32000)
WIDE_MLP = llama(256, 4, 2, 2048, 64)
UNEVEN = llama(384, 3, 1, 3000, 5000)

# (shape, prompt batch, context, flash attention, MiB that llama.cpp in xllamacpp 2026.10.11549 reports for the CPU's compute buffer)
MEASURED = [
    (EMBEDDED, 512, 256, False, 4.01), (EMBEDDED, 512, 512, False, 8.52), (EMBEDDED, 128, 2048, False, 5.88),
    (EMBEDDED, 512, 8192, False, 83.52), (EMBEDDED, 512, 512, True, 7.52), (EMBEDDED, 32, 8192, True, 0.94),
    (SMOLLM2, 512, 512, False, 104.52), (SMOLLM2, 512, 8192, False, 167.52), (SMOLLM2, 128, 8192, False, 41.88),
    (SMOLLM2, 512, 512, True, 102.14), (SMOLLM2, 512, 2048, True, 104.77), (SMOLLM2, 512, 8192, True, 109.64),
    (LLAMA_1B, 512, 1024, False, 91.02), (LLAMA_1B, 512, 16384, False, 1081.02), (LLAMA_1B, 512, 1024, True, 83.52),
    (LLAMA_1B, 512, 16384, True, 102.52), (LLAMA_1B, 64, 4096, True, 11.31), (WIDE_MLP, 512, 1024, False, 17.02),
    (WIDE_MLP, 512, 4096, True, 18.52), (UNEVEN, 512, 1024, True, 22.35), (UNEVEN, 64, 16384, False, 16.63),
]  # fmt: skip

uses = st.builds(
    Use,
    context=st.integers(1, 20_000),
    sequences=st.integers(1, 4),
    kv=st.sampled_from(kv.FORMATS),
    prompt_batch=st.sampled_from([1, 64, 512]),
    flash_attention=st.booleans(),
)
windowed = llama(512, 8, 2, 1024, 1000, layers=3, layer_types=["sliding_attention"] * 2 + ["full_attention"], sliding_window=1000)
shapes = st.sampled_from([EMBEDDED, SMOLLM2, windowed])


@pytest.mark.parametrize(("shape", "batch", "context", "flash", "mib"), MEASURED)
def test_the_compute_buffer_is_what_llama_cpp_reported(shape: Shape, batch: int, context: int, flash: bool, mib: float) -> None:
    counted = footprint.compute_buffer(shape, Use(context, prompt_batch=batch, flash_attention=flash))
    assert mib * MIB - LOG_STEP <= counted <= 1.08 * mib * MIB + LOG_STEP  # what the module says of itself


def write_llama(path: Path, shape: Shape) -> None:
    """A GGUF of zeros without a vocabulary: llama.cpp opens it and makes its buffers."""
    import gguf
    import numpy as np

    queries, keys = shape.heads * shape.width, shape.kv_heads * shape.width
    matrices = {
        "attn_q": (queries, shape.hidden), "attn_k": (keys, shape.hidden), "attn_v": (keys, shape.hidden),
        "attn_output": (shape.hidden, queries), "ffn_gate": (shape.mlp, shape.hidden), "ffn_up": (shape.mlp, shape.hidden),
        "ffn_down": (shape.hidden, shape.mlp),
    }  # fmt: skip
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(65536)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(len(shape.windows))
    writer.add_feed_forward_length(shape.mlp)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.width)
    writer.add_value_length(shape.width)
    writer.add_rope_dimension_count(shape.width)
    writer.add_vocab_size(shape.vocabulary)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("no_vocab")
    writer.add_tensor("token_embd.weight", np.zeros((shape.vocabulary, shape.hidden), np.float16))
    writer.add_tensor("output_norm.weight", np.ones(shape.hidden, np.float32))
    for layer in range(len(shape.windows)):
        for name, size in matrices.items():
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.zeros(size, np.float16))
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(shape.hidden, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.skipif(llamacpp.RUNTIME.missing() is not None, reason="llama.cpp is not installed")
@pytest.mark.parametrize("shape", [EMBEDDED, UNEVEN, llama(320, 5, 5, 640, 3000, layers=3)])
@pytest.mark.parametrize("context", [200, 1000, 3000])
def test_llama_cpp_reserves_what_is_counted(shape: Shape, context: int, tmp_path: Path) -> None:
    write_llama(tmp_path / "zeros.gguf", shape)
    session = llamacpp.RUNTIME.open(tmp_path / "zeros.gguf", context)
    found = [re.search(r"(KV|compute|output) buffer size = +([\d.]+) MiB", line) for _, line in llamacpp._log]
    reported = {line[1]: float(line[2]) * MIB for line in found if line}
    session.close()
    use = Use(context)
    assert abs(footprint.kv_bytes(shape, use) - reported["KV"]) <= LOG_STEP
    counted = footprint.compute_buffer(shape, use)
    assert reported["compute"] - LOG_STEP <= counted <= 1.08 * reported["compute"] + LOG_STEP


@given(shapes, uses)
@settings(deadline=None)
def test_the_kv_cache_is_the_most_over_all_lengths_on_the_way(shape: Shape, use: Use) -> None:
    use = replace(use, context=use.context % 2000 + 1)
    total = 0
    for window in shape.windows:
        tokens = use.context if window is None else min(use.context, window + min(use.prompt_batch, use.context))
        cells = (tokens + 255) // 256 * 256
        total += shape.kv_heads * max(use.kv.head_bytes(shape.width, length) for length in range(cells + 1))
    assert footprint.kv_bytes(shape, use) == use.sequences * total


def test_the_cache_of_a_known_model_is_what_everybody_says() -> None:
    """Llama 3 8B at 8,192 tokens in 16 bits: 1 GiB. With a window on half of the layers, those stop growing."""
    llama3 = llama(4096, 32, 8, 14336, 128256, layers=32)
    assert footprint.kv_bytes(llama3, Use(8192)) == 1 << 30
    half = replace(llama3, windows=(512, None) * 16)
    assert footprint.kv_bytes(half, Use(8192)) == (1 << 29) + (1 << 29) * 1024 // 8192  # 512 behind, 512 of the batch


@given(shapes, uses, st.integers(1, 5000))
@settings(deadline=None)
def test_more_context_never_takes_less(shape: Shape, use: Use, more: int) -> None:
    before, after = footprint.memory(shape, 10**8, use), footprint.memory(shape, 10**8, replace(use, context=use.context + more))
    assert after.kv_cache >= before.kv_cache
    assert after.activations >= before.activations
    assert after.total >= before.total


@given(shapes, uses, st.integers(10**7, 10**9))
@settings(deadline=None)
def test_weights_that_take_what_is_left_just_fit(shape: Shape, use: Use, available: int) -> None:
    if footprint.memory(shape, 1, use).total > available:
        with pytest.raises(InputError, match="leave nothing for the weights"):
            footprint.weight_bytes_left(shape, available, use)
        return
    left = footprint.weight_bytes_left(shape, available, use)
    assert footprint.memory(shape, left, use).total == available
    assert not footprint.memory(shape, left + 1, use).fits(available)


@given(shapes, uses, st.integers(0, 10**9))
@settings(max_examples=50, deadline=None)
def test_the_largest_context_fits_and_the_next_does_not(shape: Shape, use: Use, available: int) -> None:
    limit = 10_000
    found = footprint.largest_context(shape, 10**7, available, use, limit)
    fits = lambda context: footprint.memory(shape, 10**7, replace(use, context=context)).fits(available)  # noqa: E731
    assert 0 <= found <= limit
    assert found == 0 or fits(found)
    assert found == limit or not fits(found + 1)


def test_shares_add_up_and_a_smaller_cache_format_leaves_more() -> None:
    memory = footprint.memory(SMOLLM2, 103_527_936, Use(8192))
    # 30 layers, keys and values of 3 heads of 64 channels, 2 bytes each, for every token
    assert (memory.weights, memory.kv_cache) == (103_527_936, 30 * 2 * 3 * 64 * 2 * 8192)
    assert memory.total == 103_527_936 + memory.kv_cache + memory.activations + memory.overhead
    assert memory.fits(memory.total)
    assert not memory.fits(memory.total - 1)
    left = [footprint.weight_bytes_left(SMOLLM2, 10**9, Use(8192, kv=kv.get(name))) for name in ("float", "int8", "int4")]
    assert left == sorted(left)
    assert left[0] < left[2]


TINY = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 96, "intermediate_size": 80}
MODELS: list[tuple[str, dict[str, Any]]] = [
    ("Llama", {"num_key_value_heads": 2, "tie_word_embeddings": False}),
    ("Llama", {"num_key_value_heads": 1, "head_dim": 32, "tie_word_embeddings": True}),
    ("Qwen2", {"num_key_value_heads": 2}),
    ("Qwen3", {"num_key_value_heads": 2, "head_dim": 24}),
    ("Mistral", {"num_key_value_heads": 2}),
    ("Gemma2", {"num_key_value_heads": 2, "head_dim": 24}),
    ("GPT2", {"intermediate_size": None, "max_position_embeddings": 50}),
    ("Starcoder2", {"num_key_value_heads": 2}),
    ("Phi", {"num_key_value_heads": 2}),
    ("Nemotron", {"num_key_value_heads": 2}),
    ("GPTNeoX", {}),
    ("Mixtral", {"num_key_value_heads": 2, "num_local_experts": 4}),
    (
        "Qwen3Moe",
        {"num_key_value_heads": 2, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "mlp_only_layers": [1]},
    ),
    ("Qwen2Moe", {"num_key_value_heads": 2, "num_experts": 6, "moe_intermediate_size": 40, "shared_expert_intermediate_size": 48}),
    ("Glm4Moe", {"num_key_value_heads": 2, "n_routed_experts": 6, "n_shared_experts": 2, "moe_intermediate_size": 40, "head_dim": 16}),
]


@pytest.mark.parametrize(("family", "changes"), MODELS, ids=[family for family, _ in MODELS])
def test_parameters_are_those_of_the_transformers_module(family: str, changes: dict[str, Any]) -> None:
    import torch
    import transformers

    config = getattr(transformers, f"{family}Config")(**{**TINY, "pad_token_id": None, **changes})
    with torch.device("meta"):
        module = getattr(transformers, f"{family}LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM")(config)
    module.tie_weights()
    counted = footprint.parameters(footprint.shape(config))
    matrices = {name: p.numel() for name, p in module.named_parameters() if p.dim() >= 2}
    assert counted.total == sum(matrices.values())
    experts = sum(size for name, size in matrices.items() if ".experts." in name)
    looked_up = 0 if config.tie_word_embeddings else module.get_input_embeddings().weight.numel()
    looked_up += matrices.get("transformer.wpe.weight", 0)
    idle = experts * (1 - config.num_experts_per_tok / footprint.experts(config)) if experts else 0
    assert counted.active == counted.total - looked_up - round(idle)


def test_windows_are_read_from_the_config() -> None:
    assert windowed.windows == (1000, 1000, None)
    assert llama(64, 4, 4, 64, 64, sliding_window=4096).windows == (4096, 4096)  # Mistral
    assert llama(64, 4, 4, 64, 64, sliding_window=4096, use_sliding_window=False).windows == (None, None)  # Qwen2
    chunked = llama(64, 4, 4, 64, 64, layer_types=["chunked_attention", "full_attention"], attention_chunk_size=8192)
    assert chunked.windows == (8192, None)


def test_what_is_not_counted_is_refused_not_guessed() -> None:
    with pytest.raises(InputError, match="latent"):
        llama(64, 4, 4, 64, 64, kv_lora_rank=512)
    with pytest.raises(InputError, match="linear_attention"):
        llama(64, 4, 4, 64, 64, layer_types=["linear_attention", "full_attention"])
    with pytest.raises(InputError, match="a context of 0"):
        footprint.memory(EMBEDDED, 1, Use(0))
    with pytest.raises(InputError, match="a batch of 0"):
        footprint.memory(EMBEDDED, 1, Use(8, sequences=0))


def test_memory_is_read_in_decimal_and_binary_units() -> None:
    assert units.parse_memory("8GB") == 8 * 10**9
    assert units.parse_memory("8 GiB") == 8 << 30
    assert units.parse_memory("8000000000") == 8 * 10**9
    for text, hint in (("8", "`8GB`"), ("eight", "8GB"), ("-8GB", "8GB"), ("0GB", "8GB"), ("1.5", "`1.5GB`")):
        with pytest.raises(InputError) as wrong:
            units.parse_memory(text)
        assert hint in wrong.value.hint
