"""The weights of a model, from its config alone: what a GGUF file of it will hold.

One function per kind of layer gives the names that transformers has for the weights, and their sizes; a test compares every family with
the module itself. For an architecture that is not in llama.cpp's table the weights are those of a Llama of the same sizes: near, not exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fewbits.model.gguf import architectures
from fewbits.model.weights import Weight
from fewbits.planning import footprint
from fewbits.planning.footprint import Shape

_STORED = "fp16"  # the dtype that `Weight` asks for; sizes do not depend on it


@dataclass(frozen=True)
class OutlineWeight:
    """One parameter of the model: a weight, or `count` experts of the same shape."""

    weight: Weight
    count: int = 1
    read: float = 1.0  # the share that one token reads: of experts those that are chosen, of an embedding nothing

    @property
    def numbers(self) -> int:
        return self.count * self.weight.shape[0] * self.weight.shape[1]


@dataclass(frozen=True)
class Outline:
    matrices: tuple[OutlineWeight, ...]
    kept: int  # numbers that stay in float32: norms, biases, rotary factors
    exact: bool = True  # no tensor of the file is missing
    named_by_transformers: bool = True  # else by llama.cpp, as in a GGUF

    @property
    def numbers(self) -> int:
        return sum(matrix.numbers for matrix in self.matrices)


def outline(config: Any) -> Outline:
    shape = footprint.shape(config)
    kind = config.model_type
    if kind == "gpt2":
        return _gpt2(shape)
    exact = kind in {row.model_type for row in architectures.KNOWN} and kind != "bert"
    matrices = [*_tables(shape)]
    kept = shape.hidden  # the last norm
    for layer in range(len(shape.windows)):
        matrices += _attention(shape, layer, fused=kind == "phi3")
        matrices += _mlp(config, shape, layer)
        kept += _beside(config, shape, layer)
    return Outline(tuple(matrices), kept + _factors(config, shape), exact)


def _tables(shape: Shape) -> Iterator[OutlineWeight]:
    table = (shape.vocabulary, shape.hidden)
    if shape.tied:
        yield OutlineWeight(Weight("model.embed_tokens", table, "embedding", _STORED, tied_to="lm_head"))
        return
    yield OutlineWeight(Weight("model.embed_tokens", table, "embedding", _STORED), read=0.0)
    yield OutlineWeight(Weight("lm_head", table, "output", _STORED))


def _attention(shape: Shape, layer: int, fused: bool) -> Iterator[OutlineWeight]:
    queries, keys = shape.heads * shape.width, shape.kv_heads * shape.width
    rows = {"qkv_proj": queries + 2 * keys} if fused else {"q_proj": queries, "k_proj": keys, "v_proj": keys}
    for name, size in rows.items():
        yield OutlineWeight(Weight(f"model.layers.{layer}.self_attn.{name}", (size, shape.hidden), "attention", _STORED))
    yield OutlineWeight(Weight(f"model.layers.{layer}.self_attn.o_proj", (shape.hidden, queries), "attention", _STORED))


def _mlp(config: Any, shape: Shape, layer: int) -> Iterator[OutlineWeight]:
    prefix, mixture = f"model.layers.{layer}.mlp", shape.experts
    if mixture is None or not mixture.layers[layer]:
        yield from _dense(prefix, shape, shape.mlp, fused=config.model_type == "phi3")
        return
    share = mixture.active / mixture.count
    for name, size in (("gate_up_proj", (2 * mixture.width, shape.hidden)), ("down_proj", (shape.hidden, mixture.width))):
        experts = f"{prefix}.experts.{name}"
        yield OutlineWeight(Weight(f"{experts}.0", size, "mlp", _STORED, together=experts, expert=0), mixture.count, share)
    if mixture.shared:
        yield from _dense(f"{prefix}.shared_expert", shape, mixture.shared)
    if mixture.shared_gate:
        yield OutlineWeight(Weight(f"{prefix}.shared_expert_gate", (1, shape.hidden), "mlp", _STORED))


def _dense(prefix: str, shape: Shape, width: int, fused: bool = False) -> Iterator[OutlineWeight]:
    first = {"gate_up_proj": 2 * width} if fused else {"gate_proj": width, "up_proj": width}
    if shape.mlp_matrices == 2:
        first = {"up_proj": width}
    for name, rows in first.items():
        yield OutlineWeight(Weight(f"{prefix}.{name}", (rows, shape.hidden), "mlp", _STORED))
    yield OutlineWeight(Weight(f"{prefix}.down_proj", (shape.hidden, width), "mlp", _STORED))


def _beside(config: Any, shape: Shape, layer: int) -> int:
    """Numbers in the norms, biases and router of a layer."""
    kind, width = config.model_type, shape.width
    queries, keys = shape.heads * width, shape.kv_heads * width
    count = (4 if kind in ("gemma2", "gemma3_text") else 2) * shape.hidden
    if kind in ("qwen3", "qwen3_moe", "gemma3_text"):
        count += 2 * width
    if kind == "qwen2" or (kind == "qwen2_moe" and config.qkv_bias):
        count += queries + 2 * keys
    if kind == "llama" and config.attention_bias:
        count += queries + 2 * keys + shape.hidden
    if kind == "llama" and config.mlp_bias:
        count += 2 * shape.mlp + shape.hidden
    if shape.experts and shape.experts.layers[layer]:
        count += shape.experts.count * shape.hidden  # the router has a row for each expert
    return count


def _factors(config: Any, shape: Shape) -> int:
    """Rotary factors that a file stores: Llama 3's, and Phi-3's two lists."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kind = rope.get("rope_type") or rope.get("type") if isinstance(rope, dict) else None
    if kind == "llama3":
        return shape.width // 2
    if config.model_type == "phi3" and kind in ("longrope", "su"):
        return len(rope["long_factor"]) + len(rope["short_factor"])
    return 0


def _gpt2(shape: Shape) -> Outline:
    hidden, inner, table = shape.hidden, shape.mlp, (shape.vocabulary, shape.hidden)
    matrices = [
        OutlineWeight(
            Weight("transformer.wte", table, "embedding", _STORED, tied_to="lm_head" if shape.tied else None), 1, float(shape.tied)
        ),
        OutlineWeight(Weight("transformer.wpe", (shape.positions, hidden), "embedding", _STORED), read=0.0),
    ]
    for layer in range(len(shape.windows)):
        prefix = f"transformer.h.{layer}"
        sizes = {
            "attn.c_attn": (3 * hidden, hidden),
            "attn.c_proj": (hidden, hidden),
            "mlp.c_fc": (inner, hidden),
            "mlp.c_proj": (hidden, inner),
        }
        for name, size in sizes.items():
            kind = "attention" if name.startswith("attn") else "mlp"
            matrices.append(OutlineWeight(Weight(f"{prefix}.{name}", size, kind, _STORED, transposed=True)))
    if not shape.tied:
        matrices.append(OutlineWeight(Weight("lm_head", (shape.vocabulary, hidden), "output", _STORED)))
    biases = 3 * hidden + hidden + inner + hidden
    return Outline(tuple(matrices), len(shape.windows) * (4 * hidden + biases) + 2 * hidden)
