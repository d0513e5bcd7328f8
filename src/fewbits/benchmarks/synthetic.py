"""A model of random weights in its packed form, as large as asked for, made without ever being whole in float: for timing alone."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fewbits import formats, methods, planning
from fewbits.artifact import Provenance
from fewbits.model import Weight
from fewbits.targets import Target

if TYPE_CHECKING:
    from torch import Tensor

    from fewbits.formats import Parts
    from fewbits.planning import Plan


class SyntheticLlama:
    """What an `Artifact` gives to whoever reads one. Weights of one shape share their codes: memory holds them once, a file not."""

    path = Path("synthetic-llama")

    def __init__(self, format: str, target: Target, tokenizer: Any, **shape: Any) -> None:
        from transformers import LlamaConfig

        self.config = LlamaConfig(architectures=["LlamaForCausalLM"], **shape)
        self.tokenizer = tokenizer
        self.weights = tuple(self._listed())
        self.rest = tuple(self._norms())
        self._fmt, self._target = formats.get(format), target
        self.provenance = Provenance(source=str(self.path), sha256="0" * 64, fewbits="0")
        self._made: dict[tuple[int, int], Parts] = {}

    @cached_property
    def plan(self) -> Plan:
        return planning.uniform(self.weights, self._target, self._fmt, (), "rtn", None, None)

    def parts(self, weight: Weight) -> Parts:
        if weight.shape not in self._made:
            fmt = formats.get(self.plan[weight.name].format)
            rows = min(weight.shape[0], 256)
            own = torch.randn((rows, weight.shape[1]), generator=torch.Generator().manual_seed(rows)) / weight.shape[1] ** 0.5
            repeated = torch.arange(weight.shape[0]) % rows
            self._made[weight.shape] = {name: part[repeated] for name, part in methods.get("rtn").quantize(own, fmt).parts.items()}
        return self._made[weight.shape]

    def tensor(self, name: str) -> Tensor:
        assert name in self.rest
        return torch.ones(int(self.config.hidden_size))

    def _listed(self) -> list[Weight]:
        c = self.config
        heads, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        hidden, inner = c.hidden_size, c.intermediate_size
        found = [Weight("model.embed_tokens", (c.vocab_size, hidden), "embedding", "fp16")]
        for i in range(c.num_hidden_layers):
            own, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
            found += [
                Weight(f"{own}.q_proj", (heads, hidden), "attention", "fp16"),
                Weight(f"{own}.k_proj", (kv, hidden), "attention", "fp16"),
                Weight(f"{own}.v_proj", (kv, hidden), "attention", "fp16"),
                Weight(f"{own}.o_proj", (hidden, heads), "attention", "fp16"),
                Weight(f"{mlp}.gate_proj", (inner, hidden), "mlp", "fp16"),
                Weight(f"{mlp}.up_proj", (inner, hidden), "mlp", "fp16"),
                Weight(f"{mlp}.down_proj", (hidden, inner), "mlp", "fp16"),
            ]
        return [*found, Weight("lm_head", (c.vocab_size, hidden), "output", "fp16")]

    def _norms(self) -> list[str]:
        inside = ("input_layernorm", "post_attention_layernorm")
        layers = [f"model.layers.{i}.{name}.weight" for i in range(self.config.num_hidden_layers) for name in inside]
        return [*layers, "model.norm.weight"]
