"""Tiny random models of many architectures as folders for mlx-lm: in float and quantized, MLX computes what torch does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from zoo.models import build

from fewbits import artifact, formats, model, planning, progress
from fewbits.artifact.draft import Draft
from fewbits.errors import InputError
from fewbits.targets.export import check_target, written
from fewbits.targets.mlx import TARGET
from fewbits.verification import runtimes
from fewbits.verification.runtimes.torch import of_module

pytest.importorskip("mlx.core")
pytest.importorskip("mlx_lm")

TOKENS = [(37 * i) % 2000 for i in range(48)]
IN_MAKE_TEST = ("qwen3", "gpt_oss_published")
EXACT = 1e-9  # KL: 1e-12 is usual for two orders of summation in float32
# Where mlx-lm itself rounds: constants to the type of the file (Gemma's factor), or a state that transformers keeps in float32.
ROUNDED = {"starcoder2": 1e-6, "gemma": 1e-6, "qwen3_next": 1e-5, "jamba": 1e-3, "qwen3_5": 1e-3, "qwen3_5_moe": 1e-5}
NAMES = (
    *(
        "llama",
        "mistral",
        "ministral3",
        "qwen2",
        "qwen3",
        "smollm3",
        "seed_oss",
        "granite",
        "olmo2",
        "olmo3",
        "exaone4",
        "glm4",
        "ernie4_5",
    ),
    *("hunyuan", "cohere", "cohere2", "starcoder2", "stablelm", "nemotron", "phi", "phi3", "gemma", "gpt2"),
    *("mixtral", "qwen3_moe", "olmoe", "phimoe", "deepseek_v3", "deepseek_v3_fp8", "glm4_moe", "glm4_moe_lite", "dots1", "afmoe"),
    *(
        "gpt_oss",
        "gpt_oss_published",
        "qwen3_next",
        "lfm2_moe",
        "nemotron_h",
        "nemotron_h_moe",
        "jamba",
        "qwen3_5",
        "qwen3_5_moe",
        "gemma3",
        "mistral3",
        "llava",
        "llama4",
    ),
)


def kl(reference: torch.Tensor, other: torch.Tensor) -> float:
    p, q = reference.double().log_softmax(-1), other.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


def by_mlx(path: Path) -> torch.Tensor:
    return runtimes.get("mlx").open(path, len(TOKENS)).logits(TOKENS)


@pytest.mark.parametrize("name", [name if name in IN_MAKE_TEST else pytest.param(name, marks=pytest.mark.slow) for name in NAMES])
def test_mlx_computes_what_torch_does(name: str, tmp_path: Path) -> None:
    source = model.open(build(name, tmp_path / name))
    check_target(TARGET, source.path, source.config, source.tokenizer)
    limit = ROUNDED.get(name, EXACT)
    TARGET.write_draft(Draft(source, planning.unquantized(source.weights, TARGET)), tmp_path / "float", progress.silent)
    assert kl(of_module(source.module()).logits(TOKENS), by_mlx(tmp_path / "float")) < limit
    plan = planning.uniform(source.weights, TARGET, formats.get("affine4_g32"))
    made = artifact.quantize(source, plan, tmp_path / "artifact", progress.silent)
    path = written(made, tmp_path / "m.mlx", to="mlx")
    assert kl(of_module(made.module()).logits(TOKENS), by_mlx(path)) < limit
    assert sum(file.stat().st_size for file in path.iterdir()) == plan.nbytes + TARGET.overhead(Draft(source, plan))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["falcon_h1", "bloom"])
def test_what_mlx_lm_does_not_take_is_refused_before_any_work(name: str, tmp_path: Path) -> None:
    source = model.open(build(name, tmp_path / name))
    with pytest.raises(InputError, match="mlx cannot hold"):
        check_target(TARGET, source.path, source.config, source.tokenizer)
