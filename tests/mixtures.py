"""Small random mixtures of experts, in the layouts in which they are saved and published."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from fewbits import embedded
from fewbits.calibration.text.samples import Samples
from fewbits.model import Model
from fewbits.model.weights import Weight

EPS = torch.finfo(torch.float32).eps
TOKENS = torch.tensor([[0, 5, 100, 7, 900, 33, 12]])
SIZES: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2,
    "vocab_size": 2048, "max_position_embeddings": 128, "bos_token_id": 0, "eos_token_id": 1, "initializer_range": 0.1,
}  # fmt: skip
MIXTURES: dict[str, tuple[Any, Any]] = {
    "mixtral": (MixtralForCausalLM, MixtralConfig(intermediate_size=96, num_local_experts=4, **SIZES)),
    "qwen3_moe": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig(intermediate_size=96, moe_intermediate_size=32, num_experts=4, head_dim=16, norm_topk_prob=True, **SIZES),
    ),
    # stored as (cols, rows), and square: only how it is multiplied tells rows from columns
    "gpt_oss": (GptOssForCausalLM, GptOssConfig(intermediate_size=64, num_local_experts=4, head_dim=16, **SIZES)),
}
NEVER = "model.layers.0.mlp.experts.{}.3"  # the expert of gpt_oss that no token is given to
CHOSEN = "model.layers.1.mlp.experts.{}.1"


def with_tokenizer(folder: Path) -> Path:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(embedded.MODEL / name, folder / name)
    return folder


def save_all(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each mixture as transformers holds it; `NAME, published`: a tensor for every expert's matrix, as most are published."""
    found = {}
    for name, (cls, config) in MIXTURES.items():
        torch.manual_seed(0)
        theirs = cls(config)
        if name == "gpt_oss":
            with torch.no_grad():
                theirs.model.layers[0].mlp.router.bias[3] = -1e4
                for layer in theirs.model.layers:
                    nn.init.normal_(layer.mlp.experts.gate_up_proj_bias)
        for layout, original in ((name, False), (f"{name}, published", True)):
            found[layout] = tmp_path_factory.mktemp(name)
            theirs.save_pretrained(found[layout], save_original_format=original)
            with_tokenizer(found[layout])
    return found


def samples_of(ids: list[list[int]]) -> Samples:
    return Samples(tuple(map(tuple, ids)), ("test",) * len(ids), 0, hashlib.sha256(str(ids).encode()).hexdigest(), 1)


def theirs_of(source: Model) -> Any:
    return AutoModelForCausalLM.from_pretrained(source.path, dtype=torch.float32).eval()


def logits(module: nn.Module) -> Tensor:
    with torch.inference_mode():
        found: Tensor = module(TOKENS).logits
    return found


def experts_of(source: Model) -> list[Weight]:
    return [weight for weight in source.weights if weight.expert is not None]
