"""Decoders of the Llama family with fewbits' kernels.

The forward pass exists twice, for speed: here for the many tokens of a prompt, where torch and products of many rows are fastest, and in
native/decoder/decoder.cc for one token, which is a single native call. Both use the same matrices and the same cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from fewbits import formats, kernels
from fewbits.devices import processor
from fewbits.errors import InputError
from fewbits.inference.decode_kv_caches import HalfCache, PackedCaches, unsupported_cache
from fewbits.inference.decode_matrices import DecodeMatrix, StoredWeight, decode_matrices, rows_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from fewbits.artifact import Artifact
    from fewbits.model.weights import Weight
    from fewbits.progress import Progress

_FAMILY = ("llama", "mistral", "qwen2", "qwen3")
_CHUNK = 512  # tokens of a prompt that are run at once


def unsupported(artifact: Artifact, kv: str, context: int) -> str | None:
    """Why this model is not decoded natively (transformers then runs it, with the same kernels); None if it is."""
    config = artifact.config
    if config.model_type not in _FAMILY:
        return f"`{config.model_type}` is none of {', '.join(_FAMILY)}"
    if processor.native_missing():
        return processor.native_missing()
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
    return unsupported_cache(kv)


@dataclass(frozen=True)
class _Layer:
    """The weights of one layer: RMS norms, and the matrices of its four products."""

    input_norm: Tensor
    q_norm: Tensor | None  # qwen3's
    k_norm: Tensor | None
    mlp_norm: Tensor
    qkv: list[DecodeMatrix]
    o: list[DecodeMatrix]
    gate_up: list[DecodeMatrix]
    down: list[DecodeMatrix]

    @property
    def matrices(self) -> list[DecodeMatrix]:
        return [*self.qkv, *self.o, *self.gate_up, *self.down]


class LlamaDecoder:
    """A loaded model and the KV cache of one text: `prompt` and `step` append to it and return logits."""

    def __init__(self, artifact: Artifact, kv: str, context: int, progress: Progress[Any]) -> None:
        if reason := unsupported(artifact, kv, context):
            raise InputError(f"`{artifact.path.name}` cannot be decoded natively: {reason}", "leave the choice to `fewbits run`")
        config = artifact.config
        self.config, self.context, self.position = config, context, 0
        self._artifact, self._weights = artifact, {weight.name: weight for weight in artifact.weights}
        self._heads, self._eps = int(config.num_attention_heads), float(config.rms_norm_eps)
        self._kv_heads, self._width = int(getattr(config, "num_key_value_heads", None) or self._heads), _width(config)
        self._cosine, self._sine = _angles(config, context)
        layers = range(int(config.num_hidden_layers))
        self._cache: HalfCache | PackedCaches = (
            HalfCache(len(layers), self._kv_heads, self._width, context)
            if kv == "float"
            else PackedCaches(kv, len(layers), self._kv_heads, self._width)
        )
        self._native = processor.native().Decoder(
            int(config.hidden_size), self._heads, self._kv_heads, self._width, int(config.intermediate_size), self._eps
        )
        self._norms: list[Tensor] = []
        self._layers = [self._layer(i) for i in progress(layers, len(layers), "loading")]
        head = self._weights.get("lm_head") or next(weight for weight in artifact.weights if weight.tied_to == "lm_head")
        self._head = decode_matrices([self._stored(head)])
        self._embedding = self._stored(self._weights["model.embed_tokens"])
        self._native.set_head(self._norm("model.norm").numpy(), [matrix.native() for matrix in self._head], head.shape[0])
        self._logits = torch.empty(head.shape[0])

    @property
    def nbytes(self) -> int:
        """Of the weights that one token reads: all but an untied embedding."""
        return sum(matrix.nbytes for matrix in self._matrices) + sum(norm.nbytes for norm in self._norms)

    @property
    def cache_bytes(self) -> int:
        return self._cache.nbytes

    @property
    def _matrices(self) -> list[DecodeMatrix]:
        return [*(matrix for layer in self._layers for matrix in layer.matrices), *self._head]

    def kernels_used(self) -> list[str]:
        return sorted({f"{matrix.format}: {matrix.runs_on}" for matrix in self._matrices})

    def prompt(self, tokens: list[int], every: bool = True, between: Callable[[], None] | None = None) -> Tensor:
        """Logits at every position (tokens, vocabulary), or only at the last of each chunk. `between` is called before each chunk."""
        found = []
        for chunk in self._chunks(tokens):
            if between:
                between()
            found.append(self._run_chunk(chunk, every))
        return torch.cat(found)

    def rewind(self, tokens: int) -> int:
        """Keeps the first `tokens` of the text; none of a packed cache, which closes groups of tokens as they come."""
        if tokens < self.position and isinstance(self._cache, HalfCache):
            self.position = tokens
        elif tokens < self.position or tokens == 0:  # also when nothing was read to its end
            self.forget()
        return self.position

    def forget(self) -> None:
        """Empties the cache, for another text."""
        self.position = 0
        self._cache.forget()

    def step(self, token: int) -> Tensor:  # -> (vocabulary,), overwritten by the next step
        self._check_room(1)
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

    def _chunks(self, tokens: list[int]) -> list[list[int]]:
        if isinstance(self._cache, PackedCaches):  # no chunk may complete a group of the cache before its last token
            return [[token] for token in tokens] if self.position else self._cache.format.pieces(tokens)
        return [tokens[i : i + _CHUNK] for i in range(0, len(tokens), _CHUNK)]

    def _run_chunk(self, tokens: list[int], every: bool) -> Tensor:
        self._check_room(len(tokens))
        x, here = self._embedded(tokens), slice(self.position, self.position + len(tokens))
        for i, layer in enumerate(self._layers):
            qkv = _product(layer.qkv, self._rms_norm(x, layer.input_norm)).unflatten(1, (-1, self._width)).transpose(0, 1)
            q, k, v = qkv.split([self._heads, self._kv_heads, self._kv_heads])  # (heads, tokens, width) each
            if layer.q_norm is not None and layer.k_norm is not None:
                q, k = self._rms_norm(q, layer.q_norm), self._rms_norm(k, layer.k_norm)
            q, k = (_rotated(each, self._cosine[here], self._sine[here]) for each in (q, k))
            x = x + _product(layer.o, self._attended(i, q, k, v).transpose(0, 1).flatten(1))
            gate, up = _product(layer.gate_up, self._rms_norm(x, layer.mlp_norm)).chunk(2, dim=-1)
            x = x + _product(layer.down, F.silu(gate) * up)
        self.position = here.stop
        return _product(self._head, self._rms_norm(x if every else x[-1:], self._norms[-1]))

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
        return F.scaled_dot_product_attention(q[None], keys[None], values[None], attn_mask=mask[None, None], enable_gqa=True)[0]

    def _rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self._eps)

    def _layer(self, i: int) -> _Layer:
        prefix = f"model.layers.{i}"

        def product(*names: str) -> list[DecodeMatrix]:
            return decode_matrices([self._stored(self._weights[f"{prefix}.{name}_proj"]) for name in names])

        has_head_norms = self.config.model_type == "qwen3"
        q_norm, k_norm = (self._norm(f"{prefix}.self_attn.{name}_norm") if has_head_norms else None for name in "qk")
        layer = _Layer(
            self._norm(f"{prefix}.input_layernorm"),
            q_norm,
            k_norm,
            self._norm(f"{prefix}.post_attention_layernorm"),
            product("self_attn.q", "self_attn.k", "self_attn.v"),
            product("self_attn.o"),
            product("mlp.gate", "mlp.up"),
            product("mlp.down"),
        )
        qkv, o, gate_up, down = ([matrix.native() for matrix in group] for group in (layer.qkv, layer.o, layer.gate_up, layer.down))
        head_norms = [None if norm is None else norm.numpy() for norm in (q_norm, k_norm)]
        self._native.add_layer(layer.input_norm.numpy(), *head_norms, qkv, o, layer.mlp_norm.numpy(), gate_up, down)
        return layer

    def _stored(self, weight: Weight) -> StoredWeight:
        name, artifact = f"{weight.name}.bias", self._artifact
        bias = artifact.tensor(name) if name in artifact.rest else None
        return StoredWeight(artifact.plan[weight.name].format, artifact.parts(weight), weight.shape, bias)

    def _norm(self, name: str) -> Tensor:
        self._norms.append(self._artifact.tensor(f"{name}.weight").float().contiguous())
        return self._norms[-1]

    def _embedded(self, tokens: list[int]) -> Tensor:  # -> (tokens, hidden) float32
        rows, cols = self._embedding.shape
        if bad := [token for token in tokens if not 0 <= token < rows]:
            raise InputError(f"the model has no token {bad[0]}", f"its vocabulary has {rows}")
        parts = rows_of(self._embedding.parts, rows, torch.tensor(tokens))
        return kernels.decode(formats.get(self._embedding.format), parts, (len(tokens), cols)).float()

    def _check_room(self, count: int) -> None:
        if self.position + count > self.context:
            raise InputError(f"the text has outgrown the context of {self.context} tokens", "give a larger `--context`")


def _width(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _angles(config: Any, context: int) -> tuple[Tensor, Tensor]:  # (context, width / 2) each
    """By transformers' own code, which knows every kind of scaling."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rotary = LlamaRotaryEmbedding(config)
    cosine, sine = rotary(torch.empty(0), torch.arange(context)[None])
    half = _width(config) // 2
    return cosine[0, :, :half].float().contiguous(), sine[0, :, :half].float().contiguous()


def _rotated(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:  # (heads, tokens, width)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cosine - b * sine, b * cosine + a * sine], dim=-1)


def _product(matrices: list[DecodeMatrix], x: Tensor) -> Tensor:
    outputs = [matrix.matmul(x.contiguous()) for matrix in matrices]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)
