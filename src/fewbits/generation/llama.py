"""Decoders of the Llama family with fewbits' kernels: a prompt through products of many rows, then one native call per token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from fewbits import formats, kernels
from fewbits.errors import InputError
from fewbits.generation.caches import HalfCache, PackedCaches, packs
from fewbits.generation.matrices import Matrix, Piece, matrices

if TYPE_CHECKING:
    from torch import Tensor

    from fewbits.artifact import Artifact
    from fewbits.model import Weight
    from fewbits.progress import Progress

_FAMILY = ("llama", "mistral", "qwen2", "qwen3")
_PIECE = 512  # tokens of a prompt at once
_QKV, _MLP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")


def unsupported(artifact: Artifact, kv: str, context: int) -> str | None:
    """Why this model is not decoded here; None if it is. transformers runs it then, with the same kernels."""
    config = artifact.config
    if config.model_type not in _FAMILY:
        return f"`{config.model_type}` is none of {', '.join(_FAMILY)}"
    if kernels.native_missing():
        return kernels.native_missing()
    if config.hidden_act not in ("silu", "swish"):
        return f"its activation is {config.hidden_act}"
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if window and context > window:
        return f"its attention slides over {window} tokens"
    rope = config.rope_parameters
    if rope.get("rope_type", "default") in ("dynamic", "longrope") or rope.get("partial_rotary_factor", 1.0) != 1.0:
        return "its rotary positions depend on the length of the text, or turn only a part of a head"
    if _width(config) % 8:
        return f"its heads have {_width(config)} channels, no multiple of 8"
    if any(artifact.plan[weight.name].activation for weight in artifact.weights):
        return "its plan rounds activations in its own way"
    return packs(kv)


class LlamaDecoder:
    """A loaded model and one text: `prompt` and `step` give logits, and remember."""

    def __init__(self, artifact: Artifact, kv: str, context: int, progress: Progress[Any]) -> None:
        if reason := unsupported(artifact, kv, context):
            raise InputError(f"`{artifact.path.name}` cannot be decoded natively: {reason}", "leave the choice to `fewbits run`")
        config = artifact.config
        self.config, self.context, self.position = config, context, 0
        self._artifact, self._weights = artifact, {weight.name: weight for weight in artifact.weights}
        self._heads = int(config.num_attention_heads)
        self._kv_heads, self._width = int(getattr(config, "num_key_value_heads", None) or self._heads), _width(config)
        self._cosine, self._sine = _angles(config, context)
        layers = range(int(config.num_hidden_layers))
        self._cache: HalfCache | PackedCaches = (
            HalfCache(len(layers), self._kv_heads, self._width, context)
            if kv == "float"
            else PackedCaches(kv, len(layers), self._kv_heads, self._width)
        )
        self._native = kernels.native().Decoder(
            int(config.hidden_size), self._heads, self._kv_heads, self._width, int(config.intermediate_size), float(config.rms_norm_eps)
        )
        self._norms: dict[str, Tensor] = {}
        self._products: list[dict[str, list[Matrix]]] = [self._layer(i) for i in progress(layers, len(layers), "loading")]
        head = self._weights.get("lm_head") or next(weight for weight in artifact.weights if weight.tied_to == "lm_head")
        self._head = matrices([self._piece(head)])
        self._embedding = self._weights["model.embed_tokens"]
        self._embedding_parts = artifact.parts(self._embedding)
        norm = self._norm("model.norm")
        self._native.set_head(norm.numpy(), [matrix.native() for matrix in self._head], head.shape[0])
        self._logits = torch.empty(head.shape[0])

    @property
    def nbytes(self) -> int:
        """Of weights, as they are kept."""
        rest = sum(matrix.nbytes for layer in self._products for group in layer.values() for matrix in group)
        return rest + sum(matrix.nbytes for matrix in self._head) + sum(norm.nbytes for norm in self._norms.values())

    @property
    def cache_bytes(self) -> int:
        return self._cache.nbytes

    def kernels_used(self) -> list[str]:
        every = [matrix for layer in self._products for group in layer.values() for matrix in group] + self._head
        return sorted({f"{matrix.format}: {matrix.runs_on}" for matrix in every})

    def prompt(self, tokens: list[int], every: bool = True) -> Tensor:  # -> (tokens, vocabulary)
        """Logits at every position, or at the last of each piece alone."""
        return torch.cat([self._many(piece, every) for piece in self._pieces(tokens)])

    def forget(self) -> None:
        """Another text may begin."""
        self.position = 0
        self._cache.forget()

    def step(self, token: int) -> Tensor:  # -> (vocabulary,), good until the next step
        self._check(1)
        hidden = self._embedded([token])[0].contiguous()
        at, threads = self.position, torch.get_num_threads()
        angles = self._cosine[at].numpy(), self._sine[at].numpy()
        if isinstance(self._cache, HalfCache):
            self._native.step(hidden.numpy(), *angles, at, *self._cache.native, self._logits.numpy(), threads)
        else:
            self._step_over_packed(self._cache, hidden, angles, threads)
        self.position += 1
        return self._logits

    def _step_over_packed(self, cache: PackedCaches, hidden: Tensor, angles: tuple[Any, Any], threads: int) -> None:
        heads, kv_heads, width = self._heads, self._kv_heads, self._width
        qkv = torch.empty((heads + 2 * kv_heads) * width)
        for i, layer in enumerate(cache.layers):
            self._native.before(i, hidden.numpy(), *angles, qkv.numpy(), threads)
            q, k, v = qkv.view(1, -1, 1, width).split([heads, kv_heads, kv_heads], dim=1)
            layer.append(k, v)
            self._native.after(i, layer.attend(q).flatten().numpy(), hidden.numpy(), threads)
        self._native.logits(hidden.numpy(), self._logits.numpy(), threads)

    def _pieces(self, tokens: list[int]) -> list[list[int]]:
        if isinstance(self._cache, PackedCaches):  # a group is rounded when it is complete, and not before
            if self.position:
                return [[token] for token in tokens]
            return self._cache.format.pieces(tokens)
        return [tokens[i : i + _PIECE] for i in range(0, len(tokens), _PIECE)]

    def _many(self, tokens: list[int], every: bool) -> Tensor:
        self._check(len(tokens))
        x, first, eps = self._embedded(tokens), self.position, float(self.config.rms_norm_eps)
        for i, products in enumerate(self._products):
            prefix = f"model.layers.{i}"
            q, k, v = self._projected(i, _rms_norm(x, self._norms[f"{prefix}.input_layernorm"], eps), first)
            attended = self._attended(i, q, k, v)
            x = x + _times(products["o"], attended.transpose(0, 1).flatten(1))
            gate, up = _times(products["gate_up"], _rms_norm(x, self._norms[f"{prefix}.post_attention_layernorm"], eps)).chunk(2, dim=-1)
            x = x + _times(products["down"], F.silu(gate) * up)
        self.position += len(tokens)
        return _times(self._head, _rms_norm(x if every else x[-1:], self._norms["model.norm"], eps))

    def _projected(self, layer: int, x: Tensor, first: int) -> tuple[Tensor, Tensor, Tensor]:  # -> (heads, tokens, width) each
        heads, kv_heads, prefix = self._heads, self._kv_heads, f"model.layers.{layer}.self_attn"
        qkv = _times(self._products[layer]["qkv"], x).unflatten(1, (-1, self._width)).transpose(0, 1)
        q, k, v = qkv.split([heads, kv_heads, kv_heads])
        eps = float(self.config.rms_norm_eps)
        if f"{prefix}.q_norm" in self._norms:
            q, k = _rms_norm(q, self._norms[f"{prefix}.q_norm"], eps), _rms_norm(k, self._norms[f"{prefix}.k_norm"], eps)
        angles = self._cosine[first : first + len(x)], self._sine[first : first + len(x)]
        return _rotated(q, *angles), _rotated(k, *angles), v

    def _attended(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # (heads, tokens, width)
        first, count = self.position, q.shape[1]
        if isinstance(self._cache, HalfCache):
            self._cache.append(layer, first, k, v)
            keys, values = self._cache.read(layer, first + count)
        else:
            packed = self._cache.layers[layer]
            before = [past[0] for past in packed.unpacked()] if packed.tokens else [k[:, :0], v[:, :0]]
            packed.append(k[None], v[None])
            keys, values = torch.cat([before[0], k], dim=1), torch.cat([before[1], v], dim=1)
        mask = torch.ones(count, first + count, dtype=torch.bool).tril(first)
        found = F.scaled_dot_product_attention(q[None], keys[None], values[None], attn_mask=mask[None, None], enable_gqa=True)
        return found[0]

    def _layer(self, i: int) -> dict[str, list[Matrix]]:
        prefix = f"model.layers.{i}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        products = {
            "qkv": matrices([self._piece(self._weights[f"{attention}.{name}"]) for name in _QKV]),
            "o": matrices([self._piece(self._weights[f"{attention}.o_proj"])]),
            "gate_up": matrices([self._piece(self._weights[f"{mlp}.{name}"]) for name in _MLP]),
            "down": matrices([self._piece(self._weights[f"{mlp}.down_proj"])]),
        }
        inside = [self._norm(f"{attention}.{name}").numpy() if self.config.model_type == "qwen3" else None for name in ("q_norm", "k_norm")]
        given = {name: [matrix.native() for matrix in group] for name, group in products.items()}
        before, after = self._norm(f"{prefix}.input_layernorm"), self._norm(f"{prefix}.post_attention_layernorm")
        self._native.add_layer(before.numpy(), *inside, given["qkv"], given["o"], after.numpy(), given["gate_up"], given["down"])
        return products

    def _piece(self, weight: Weight) -> Piece:
        bias = f"{weight.name}.bias"
        own = self._artifact.tensor(bias) if bias in self._artifact.rest else None
        return Piece(self._artifact.plan[weight.name].format, self._artifact.parts(weight), weight.shape, own)

    def _norm(self, name: str) -> Tensor:
        self._norms[name] = self._artifact.tensor(f"{name}.weight").float().contiguous()
        return self._norms[name]

    def _embedded(self, tokens: list[int]) -> Tensor:  # -> (tokens, hidden) float32
        rows, cols = self._embedding.shape
        if bad := [token for token in tokens if not 0 <= token < rows]:
            raise InputError(f"the model has no token {bad[0]}", f"its vocabulary has {rows}")
        ids = torch.tensor(tokens)
        stored = self._embedding_parts
        some = {name: part if len(part) != rows else part.view(torch.uint8)[ids].view(part.dtype) for name, part in stored.items()}
        fmt = formats.get(self._artifact.plan[self._embedding.name].format)
        return kernels.decode(fmt, some, (len(tokens), cols)).float()

    def _check(self, count: int) -> None:
        if self.position + count > self.context:
            raise InputError(f"the text has outgrown the context of {self.context} tokens", "give a larger `--context`")


def _width(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _angles(config: Any, context: int) -> tuple[Tensor, Tensor]:  # (context, width / 2) each
    """As transformers computes them, whatever the scaling."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rotary = LlamaRotaryEmbedding(config)
    cosine, sine = rotary(torch.empty(0), torch.arange(context)[None])
    half = _width(config) // 2
    return cosine[0, :, :half].float().contiguous(), sine[0, :, :half].float().contiguous()


def _rotated(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:  # (heads, tokens, width)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cosine - b * sine, b * cosine + a * sine], dim=-1)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


def _times(products: list[Matrix], x: Tensor) -> Tensor:
    found = [matrix.matmul(x.contiguous()) for matrix in products]
    return found[0] if len(found) == 1 else torch.cat(found, dim=1)
