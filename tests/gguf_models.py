"""Tiny random models of every architecture that goes into GGUF, and how far llama.cpp may be from transformers on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers

from fewbits import artifact, formats, model, planning, targets
from fewbits.artifact import Artifact
from fewbits.model.experts import Products
from fewbits.model.gguf.types import BY_NAME
from fewbits.progress import silent
from fewbits.targets.gguf import layout
from fewbits.verification import runtimes

GGUF = targets.get("gguf")
LLAMA_CPP = runtimes.get("llama.cpp")
needs_llama_cpp = pytest.mark.skipif(LLAMA_CPP.missing() is not None, reason=f"llama.cpp: {LLAMA_CPP.missing()}")

TINY: dict[str, Any] = {
    **{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 320},
    **{"num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 0, "eos_token_id": 1, "initializer_range": 0.2},
    "pad_token_id": None,
}
ROPE = {"rope_theta": 10000.0}
GEMMA = {**TINY, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 24}
PHI = {**ROPE, "rope_type": "longrope", "short_factor": [1 + 0.1 * i for i in range(8)], "long_factor": [1.5 + 0.4 * i for i in range(8)]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**TINY, tie_word_embeddings=True),
    "llama, untied, with biases": lambda: transformers.LlamaConfig(**TINY, attention_bias=True, mlp_bias=True, tie_word_embeddings=False),
    "llama, head_dim of its own": lambda: transformers.LlamaConfig(**TINY, head_dim=32),
    "llama, linear scaling": lambda: transformers.LlamaConfig(**TINY, rope_parameters={**ROPE, "rope_type": "linear", "factor": 4.0}),
    "llama, yarn scaling": lambda: transformers.LlamaConfig(
        **TINY, rope_parameters={**ROPE, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    ),
    "llama 3 scaling": lambda: transformers.LlamaConfig(
        **{**TINY, "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32768},
        rope_parameters={
            **{"rope_theta": 500000.0, "rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192},
            **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
        },
    ),
    "llama 3 scaling of a short context": lambda: transformers.LlamaConfig(
        **{**TINY, "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 8192},
        rope_parameters={
            **{"rope_theta": 500000.0, "rope_type": "llama3", "factor": 4.0, "original_max_position_embeddings": 2048},
            **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
        },
    ),
    "mistral, a width that its heads do not divide": lambda: transformers.MistralConfig(
        **{**TINY, "num_attention_heads": 6}, head_dim=16, sliding_window=None
    ),
    "mistral": lambda: transformers.MistralConfig(**TINY, sliding_window=None),
    "qwen2": lambda: transformers.Qwen2Config(**TINY),
    "qwen3": lambda: transformers.Qwen3Config(**TINY, head_dim=32),
    "smollm3": lambda: transformers.SmolLM3Config(**{**TINY, "num_hidden_layers": 4}),
    "gemma 2": lambda: transformers.Gemma2Config(**GEMMA, attn_logit_softcapping=2.0, final_logit_softcapping=4.0),
    "gemma 3": lambda: transformers.Gemma3TextConfig(**{**GEMMA, "num_hidden_layers": 6}),
    "gemma 3, scaled and capped": lambda: transformers.Gemma3TextConfig(
        **{**GEMMA, "num_hidden_layers": 6},
        final_logit_softcapping=4.0,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
        },
    ),
    "phi 3": lambda: transformers.Phi3Config(**TINY),
    # llama.cpp chooses by the context that it makes room for, at least 256 tokens; transformers by the length of the text
    "phi 3, long": lambda: transformers.Phi3Config(**TINY, original_max_position_embeddings=64, rope_parameters=dict(PHI)),
    "phi 3, short": lambda: transformers.Phi3Config(
        **{**TINY, "max_position_embeddings": 1024}, original_max_position_embeddings=256, rope_parameters=dict(PHI)
    ),
    "phi 3, a part of each head": lambda: transformers.Phi3Config(**TINY, rope_parameters={**ROPE, "partial_rotary_factor": 0.5}),
    "mixtral": lambda: transformers.MixtralConfig(**TINY, num_local_experts=4, num_experts_per_tok=2),
    "qwen2 moe, without biases": lambda: transformers.Qwen2MoeConfig(**TINY, **EXPERTS, shared_expert_intermediate_size=64, qkv_bias=False),
    "qwen2 moe": lambda: transformers.Qwen2MoeConfig(**TINY, **EXPERTS, shared_expert_intermediate_size=64),
    "qwen3 moe": lambda: transformers.Qwen3MoeConfig(**TINY, **EXPERTS, head_dim=16, norm_topk_prob=True),
    "gpt2": lambda: transformers.GPT2Config(
        n_embd=64, n_layer=2, n_head=4, n_positions=128, vocab_size=320, bos_token_id=0, eos_token_id=1, initializer_range=0.2
    ),
    "gpt2, untied": lambda: transformers.GPT2Config(
        n_embd=64, n_layer=2, n_head=4, n_positions=128, vocab_size=320, n_inner=96, tie_word_embeddings=False, initializer_range=0.2
    ),
}
TEXT = "Return a copy of the list with each item lower-cased. If x is None, raise ValueError('no x').\n\nNew in version 3.12.\n"


def save_random(config: Any, folder: Path) -> Path:
    """A model whose every parameter counts: initial zeros and ones would hide a bias or a norm that is left out."""
    torch.manual_seed(0)
    made = transformers.AutoModelForCausalLM.from_config(config)
    unit = 0.0 if config.model_type.startswith("gemma") else 1.0  # Gemma adds one to them by itself
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if parameter.ndim == 1:
                norm = unit * ("norm" in name or "ln_" in name) * name.endswith("weight")
                parameter.copy_(torch.randn_like(parameter) * 0.3 + norm)
    made.save_pretrained(folder)
    small_tokenizer().save_pretrained(folder)
    return folder


@cache
def small_tokenizer() -> Any:
    """Byte-level BPE with few merges: gguf's own reader takes its time over each."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    learner = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|bos|>", "<|eos|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([TEXT], learner)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<|bos|>", eos_token="<|eos|>")


def write(source: model.Model, name: str, overrides: list[str], folder: Path) -> tuple[Artifact, Path]:
    plan = planning.uniform(source.weights, GGUF, formats.get(name), overrides)
    made = artifact.quantize(source, plan, folder / "artifact", silent)
    GGUF.write(made, folder / "model.gguf", silent)
    return made, folder / "model.gguf"


def rms(x: torch.Tensor) -> float:
    return float(x.double().square().mean().sqrt())


def median_rms(x: torch.Tensor) -> float:
    return float(x.double().square().mean(-1).sqrt().median())


def rounded(x: torch.Tensor, kind: str) -> torch.Tensor:
    """As llama.cpp rounds what it multiplies with a weight of this type: in its super-blocks, or in 32 columns."""
    if kind == "F32":
        return x
    if kind in {"F16", "BF16"}:
        return x.to(torch.float16 if kind == "F16" else torch.bfloat16).float()
    run = 256 if BY_NAME[kind].block == 256 else 32
    blocks = x.reshape(*x.shape[:-1], -1, run)
    step = blocks.abs().amax(-1, keepdim=True) / 127
    return (blocks / step.clamp_min(1e-30)).round().mul(step).reshape(x.shape)


@contextmanager
def rounding_like_llama_cpp(module: Any, made: Artifact) -> Iterator[None]:
    """The module, rounding where llama.cpp rounds: the input of every product to the type that its weight is multiplied in,
    queries, keys and values to float16, a gelu to float16 (it is a table)."""
    kinds = {weight.name: layout(formats.get(made.plan[weight.name].format)).type for weight in made.weights}
    kinds |= {weight.tied_to: kinds[weight.name] for weight in made.weights if weight.tied_to}
    stacks = {weight.parameter: module.get_parameter(weight.parameter) for weight in made.weights if weight.expert is not None}

    def to_half(_module: Any, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output.half().float()

    def before(kind: str) -> Callable[[Any, Any], Any]:
        return lambda _module, inputs: (rounded(inputs[0], kind),)

    halves = ["q_proj", "k_proj", "v_proj", "qkv_proj", "c_attn", "self.query", "self.key", "self.value", "mlp.act", "intermediate_act_fn"]
    if made.config.model_type.startswith("gemma"):
        halves.append("act_fn")
    hooks = []
    for name, part in module.named_modules():
        if name in kinds and kinds[name] != "F32" and not isinstance(part, torch.nn.Embedding):
            hooks.append(part.register_forward_pre_hook(before(kinds[name])))
        if name.endswith(tuple(halves)):
            hooks.append(part.register_forward_hook(to_half))
    with Products(stacks, change=lambda name, expert, x: rounded(x, kinds[f"{name}.{expert}"])):
        yield
    for hook in hooks:
        hook.remove()


def check_against_llama_cpp(made: Artifact, file: Path) -> None:
    """llama.cpp's logits at every position are those of the decoded weights, to within its own roundings."""
    tokens = made.tokenizer.encode(TEXT * 2)[:100]
    module = made.module()
    session = LLAMA_CPP.open(file, 128)
    with torch.no_grad():
        expected = module(torch.tensor([tokens])).logits[0]
        with rounding_like_llama_cpp(module, made):
            explained = module(torch.tensor([tokens])).logits[0] - expected
    found = session.logits(tokens)
    session.close()
    assert found.shape == expected.shape
    # where a rounding gives a token to another expert the error is of another size: of a mixture the median position is judged
    error_of = median_rms if any(weight.expert is not None for weight in made.weights) else rms
    ratio = error_of(found - expected) / error_of(explained)
    assert ratio < 1.5, f"llama.cpp is {ratio:.2f} times as far from the decoded weights as its roundings explain"
