"""Llamas of random weights, of any size and never whole in memory: packed ones in the place of an artifact, and checkpoints on disk."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fewbits import embedded, formats, methods, planning
from fewbits.artifact import Provenance
from fewbits.model.weights import Weight
from fewbits.store.files import remove
from fewbits.targets import Target

if TYPE_CHECKING:
    from torch import Tensor

    from fewbits.formats import Parts
    from fewbits.planning import Plan


class SyntheticLlama:
    """Has what readers of an `Artifact` use. Weights of one shape share their codes in memory; a file made of it holds them all."""

    path = Path("synthetic-llama")
    layout = None  # its weights are named as in transformers
    metadata_file = None  # and it was no GGUF

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
            w = torch.randn((rows, weight.shape[1]), generator=torch.Generator().manual_seed(rows)) / weight.shape[1] ** 0.5
            repeated = torch.arange(weight.shape[0]) % rows
            self._made[weight.shape] = {name: part[repeated] for name, part in methods.get("rtn").quantize(w, fmt).parts.items()}
        return self._made[weight.shape]

    def tensor(self, name: str) -> Tensor:
        assert name in self.rest
        return torch.ones(int(self.config.hidden_size))

    def _listed(self) -> list[Weight]:
        c = self.config
        heads, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        hidden, inner = c.hidden_size, c.intermediate_size
        weights = [Weight("model.embed_tokens", (c.vocab_size, hidden), "embedding", "fp16")]
        for i in range(c.num_hidden_layers):
            attention, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
            weights += [
                Weight(f"{attention}.q_proj", (heads, hidden), "attention", "fp16"),
                Weight(f"{attention}.k_proj", (kv, hidden), "attention", "fp16"),
                Weight(f"{attention}.v_proj", (kv, hidden), "attention", "fp16"),
                Weight(f"{attention}.o_proj", (hidden, heads), "attention", "fp16"),
                Weight(f"{mlp}.gate_proj", (inner, hidden), "mlp", "fp16"),
                Weight(f"{mlp}.up_proj", (inner, hidden), "mlp", "fp16"),
                Weight(f"{mlp}.down_proj", (hidden, inner), "mlp", "fp16"),
            ]
        return [*weights, Weight("lm_head", (c.vocab_size, hidden), "output", "fp16")]

    def _norms(self) -> list[str]:
        inside = ("input_layernorm", "post_attention_layernorm")
        layers = [f"model.layers.{i}.{name}.weight" for i in range(self.config.num_hidden_layers) for name in inside]
        return [*layers, "model.norm.weight"]


@dataclass(frozen=True)
class Shape:
    """A Llama whose output is tied to its embedding. By default 42 million weights in a block, 66 million in the embedding. With `experts`
    a Qwen3 mixture, `chosen` of them for a token."""

    blocks: int
    hidden: int = 2048
    inner: int = 4096
    vocabulary: int = 32000
    experts: int = 0
    chosen: int = 8

    @property
    def block(self) -> int:
        return 4 * self.hidden**2 + 3 * self.hidden * self.inner * max(1, self.experts)  # routers stay as they are

    @property
    def weights(self) -> int:
        return self.blocks * self.block + self.vocabulary * self.hidden

    @classmethod
    def of(cls, billions: float, hidden: int = 2048) -> Shape:
        """As near to this many weights as whole blocks come."""
        return cls(1, hidden, 2 * hidden)._deep(billions)

    @classmethod
    def mixture(cls, billions: float, experts: int, hidden: int = 1024) -> Shape:
        """The same of experts half as wide as the model."""
        return cls(1, hidden, hidden // 2, experts=experts, chosen=min(8, experts))._deep(billions)

    def _deep(self, billions: float) -> Shape:
        return replace(self, blocks=max(1, round((billions * 1e9 - self.vocabulary * self.hidden) / self.block)))


def write_checkpoint(folder: Path, shape: Shape) -> None:
    """In 16 bits, a shard for each block, one of which is in memory at a time. A layer's output is about as large as its input."""
    from safetensors.torch import save_file

    remove(folder)
    folder.mkdir(parents=True)
    config = _config(shape)
    config.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):  # which knows fewer tokens than the vocabulary has: the rest never occurs
        shutil.copyfile(embedded.MODEL / name, folder / name)
    generator, shards = torch.Generator().manual_seed(shape.blocks), _shards(shape)
    shard_of: dict[str, str] = {}
    for number, tensors in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        made = {
            name: (torch.randn(sides, generator=generator) / sides[-1] ** 0.5 if len(sides) == 2 else torch.ones(sides)).half()
            for name, sides in tensors.items()
        }
        save_file(made, folder / file, metadata={"format": "pt"})
        shard_of |= dict.fromkeys(tensors, file)
    index = {"metadata": {"total_size": 2 * shape.weights}, "weight_map": shard_of}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _config(shape: Shape) -> Any:
    from transformers import LlamaConfig, Qwen3MoeConfig

    heads = max(1, shape.hidden // 64)
    sizes: dict[str, Any] = {
        "hidden_size": shape.hidden, "num_hidden_layers": shape.blocks, "num_attention_heads": heads, "num_key_value_heads": heads,
        "vocab_size": shape.vocabulary, "max_position_embeddings": 2048, "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 1,
        "dtype": "float16",
    }  # fmt: skip
    if not shape.experts:
        return LlamaConfig(intermediate_size=shape.inner, architectures=["LlamaForCausalLM"], **sizes)
    return Qwen3MoeConfig(
        intermediate_size=shape.inner, moe_intermediate_size=shape.inner, num_experts=shape.experts, num_experts_per_tok=shape.chosen,
        head_dim=shape.hidden // heads, norm_topk_prob=True, architectures=["Qwen3MoeForCausalLM"], **sizes,
    )  # fmt: skip


def _shards(shape: Shape) -> list[dict[str, tuple[int, ...]]]:
    hidden, inner = shape.hidden, shape.inner
    inside: dict[str, tuple[int, ...]] = {f"self_attn.{name}_proj": (hidden, hidden) for name in "qkvo"}
    for module in [f"mlp.experts.{expert}" for expert in range(shape.experts)] or ["mlp"]:
        inside |= {f"{module}.gate_proj": (inner, hidden), f"{module}.up_proj": (inner, hidden), f"{module}.down_proj": (hidden, inner)}
    inside |= {"input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}
    if shape.experts:
        each = hidden // max(1, hidden // 64)
        inside |= {"mlp.gate": (shape.experts, hidden), "self_attn.q_norm": (each,), "self_attn.k_norm": (each,)}
    ends: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocabulary, hidden), "model.norm.weight": (hidden,)}
    return [ends, *({f"model.layers.{i}.{name}.weight": sides for name, sides in inside.items()} for i in range(shape.blocks))]
