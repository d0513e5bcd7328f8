"""Small models in the layout of compressed-tensors, and how far transformers may be from their decoded weights."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig

from fewbits import artifact, embedded, formats, model, planning, progress
from fewbits.artifact import Artifact
from fewbits.formats.runtime.activations import Activation
from fewbits.model.weights import Weight
from fewbits.planning import Plan
from fewbits.targets.compressed_tensors import TARGET
from fewbits.verification.runtimes.torch import of_module

SMALL: dict[str, Any] = {
    "vocab_size": 160, "initializer_range": 0.3, "bos_token_id": 0, "eos_token_id": 0, "max_position_embeddings": 128,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
WIDE = Weight("any", (256, 256), "mlp", "fp32")
TOKENS = [1, 2, 3, 4, 5, 99, 100]


@dataclass(frozen=True)
class Written:
    source: model.Model
    artifact: Artifact
    path: Path

    @property
    def quantized(self) -> list[Weight]:
        return [w for w in self.artifact.weights if formats.get(self.artifact.plan[w.name].format).levels]

    @property
    def config(self) -> Any:
        return json.loads((self.path / "config.json").read_text())["quantization_config"]

    def tensors(self) -> dict[str, Tensor]:
        from safetensors.torch import load_file

        return {name: tensor for file in sorted(self.path.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def source_of(config: Any, folder: Path) -> model.Model:
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(config)
    for name, parameter in made.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.3)  # zero as made: a lost bias would not show
    made.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(embedded.MODEL / name, folder / name)
    return model.open(folder)


def small_llama(folder: Path) -> model.Model:
    """Untied; 24 rows of keys and values fill no whole words of zero points, 40 columns no whole words of 3, 5 and 6 bits."""
    config = LlamaConfig(**SMALL, hidden_size=40, intermediate_size=96, head_dim=12, num_hidden_layers=2, tie_word_embeddings=False)
    return source_of(config, folder)


def write(source: model.Model, plan: Plan, folder: Path) -> Written:
    made = artifact.quantize(source, plan, folder / "artifact", progress.silent)
    TARGET.write(made, folder / "model.ct", progress.silent)
    return Written(source, made, folder / "model.ct")


def uniform(source: model.Model, fmt: str, overrides: tuple[str, ...] = (), activation: Activation | None = None) -> Plan:
    return planning.uniform(source.weights, TARGET, formats.get(fmt), overrides, activation=activation)


def assert_as_good_as_float32(got: Tensor, written: Written) -> None:
    """No further from float64 than another order of summation explains: 8 times what torch's own float32 is off."""
    module = written.artifact.module()
    single = of_module(module).logits(TOKENS)
    module.set_experts_implementation("eager")  # the fused products of experts know no float64
    with torch.inference_mode():
        exact = module.double()(torch.tensor([TOKENS]), use_cache=False).logits[0]
    assert (got - exact).abs().max() <= 8 * (single - exact).abs().max() + torch.finfo(torch.float32).eps * exact.abs().max()
