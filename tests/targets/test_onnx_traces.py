"""Architectures that torch.onnx traces in an unusual way, or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, FalconConfig, Gemma3Config, Mamba2Config, MixtralConfig

from fewbits import artifact, formats, model, planning, progress, targets
from fewbits.artifact.draft import Draft
from fewbits.errors import InputError
from fewbits.targets.onnx import Onnx
from fewbits.verification import runtimes
from fewbits.verification.runtimes.torch import of_module

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

TOKENS = [1, 2, 3, 4, 5, 99, 100]
STATEFUL = Mamba2Config(
    vocab_size=160, hidden_size=32, num_hidden_layers=2, num_heads=4, head_dim=16, state_size=8, n_groups=2, chunk_size=32,
    architectures=["Mamba2ForCausalLM"], bos_token_id=0, eos_token_id=0, pad_token_id=0,
)  # fmt: skip


def saved(config: Any, folder: Path) -> model.Model:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return model.open(folder)


@pytest.mark.parametrize(
    ("config", "word"),
    [
        (STATEFUL, "state"),
        (MixtralConfig(architectures=["MixtralForCausalLM"]), "experts"),
        (Gemma3Config(architectures=["Gemma3ForConditionalGeneration"]), "text"),
    ],
)
def test_what_cannot_be_traced_is_refused_before_any_work(config: Any, word: str) -> None:
    assert word in (targets.get("onnx").supports(config, None) or "")


def test_a_trace_that_fixed_the_length_is_refused(tmp_path: Path) -> None:
    """To the 7 of the example, without a word of torch.onnx: the two layers pad and cut the sequence."""
    source, target = saved(STATEFUL, tmp_path), targets.get("onnx")
    with pytest.raises(InputError, match="fixed `input_ids` to batch x 7"):
        target.overhead(Draft(source, planning.unquantized(source.weights, target)))


def test_a_layer_that_multiplies_by_itself_reads_packed_weights_too(tmp_path: Path) -> None:
    """Falcon's layers are Linear, and multiply with `weight` in a forward of their own."""
    config = FalconConfig(
        vocab_size=160, hidden_size=64, num_hidden_layers=1, num_attention_heads=4, initializer_range=0.3, bias=True, bos_token_id=0
    )
    source, exact = saved(config, tmp_path / "source"), Onnx(accuracy_level=0)
    plan = planning.uniform(source.weights, exact, formats.get("int4_g32"))
    made = artifact.quantize(source, plan, tmp_path / "artifact", progress.silent)
    exact.write(made, tmp_path / "model.onnx", progress.silent)
    got = runtimes.get("onnxruntime").open(tmp_path / "model.onnx", 16).logits(TOKENS)
    module = made.module()
    single = of_module(module).logits(TOKENS)
    with torch.inference_mode():
        double = module.double()(torch.tensor([TOKENS]), use_cache=False).logits[0]
    assert {entry.format for entry in made.plan.entries} == {"int4_g32"}
    # 8 times what torch's own float32 is off: another order of summation
    assert (got - double).abs().max() <= 8 * (single - double).abs().max() + torch.finfo(torch.float32).eps * double.abs().max()
