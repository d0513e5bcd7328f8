"""What a model takes in memory while it runs, from its config alone: weights, KV cache, activations and what the runtime itself needs.

`fewbits fit` and `--fits` count with it alike; the devices that have the memory are in capacity/devices.csv.

**llama.cpp.** The activations are what it reserves when it opens a context: one buffer for the graph of a whole prompt batch. Its peak is
in one of three places, each with the residual stream and the attention mask alive beside it: the logits of every token of the batch, the
MLP (gate, up and their product), or the scores of one layer's attention, which flash attention never stores. How many rows are alive was
found by varying one width at a time; tests/test_hardware.py has what llama.cpp reported. In 176 combinations of widths, batches and
contexts the count is never below it by more than its log rounds. It is at most 8 % above where queries are as wide as the residual stream
(28 % seen where they are half as wide), with one exception: once the mask is as large as the logits (a context of twice the
vocabulary), llama.cpp puts these into its place, and the count is high by as much. The logits of a whole batch are reserved even where
only the last token's are wanted: a GPU's memory is then taken, a CPU's pages are never touched (`Use.reserved`).

Not counted: the copy of some weights (of 4 bits, mostly) that llama.cpp rearranges for a CPU, beside the mapped file, whose own pages
the system may then drop.

**fewbits' own runtime** has the weights in tiles as large as the file's, with the file mapped beside them, whose pages the system may drop
likewise. Its cache has no more tokens than the context. A piece of a prompt keeps gate and up, the product of both, and what goes in and
out; attention makes float32 of the cached keys and values, for as many heads as there are queries, and a mask. Found by measuring SmolLM2's
shape: contexts of 1024 and 4096 add 25 and 47 MB, 23 and 45 are counted. Its tokenizer is transformers', twice llama.cpp's in memory.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction
from typing import Any

from fewbits import kv
from fewbits.errors import InputError
from fewbits.kv import KVFormat

_FLOAT = 4  # bytes: activations are float32
_FLOAT_CACHE = kv.get("float")
_CELLS = 256  # llama.cpp rounds the tokens of a cache up to a multiple of this
_INPUT_BYTES = 48  # per token of a batch: token, position, its cells in the cache, whether its logits are wanted
LLAMA_CPP, FEWBITS = RUNTIMES = "llama.cpp", "fewbits"
_PROCESS = {LLAMA_CPP: 8 << 20, FEWBITS: 4 << 20}  # heap and graph: 6 to 9 MiB beyond Python on the embedded model; objects of an artifact
# text, merges and tables of a token. SmolLM2's 49,152: 23.8 MiB in llama.cpp, 45 MiB in tokenizers
_VOCABULARY_ENTRY = {LLAMA_CPP: 512, FEWBITS: 960}
_PIECE, _LANES = 512, 16  # generation/llama.py, generation/caches.py: tokens of a prompt at once, tokens whose keys lie together

_UNITS: dict[str, int] = {"": 1, "B": 1} | {
    f"{letter}{binary}B": (1024 if binary else 1000) ** power for power, letter in enumerate("KMGT", start=1) for binary in ("", "I")
}
_EXAMPLES = "for example `8GB`, `900MiB` or `8000000000`"
# the MLP of all others has three matrices, two of them multiplied with each other
_TWO_MATRICES = ("gpt2", "gpt_neox", "phi", "starcoder2", "nemotron")


def parse_memory(text: str, option: str = "--fits", hint: str = _EXAMPLES) -> int:
    """Bytes from `8GB` (10^9), `512MiB` (2^20) or `8000000000`. A part of a byte is dropped: a budget is never exceeded."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+) *([KMGT]?i?B|)", text.strip(), re.IGNORECASE | re.ASCII)
    if not found:
        raise InputError(f"`{option} {text}` is not a number of bytes", hint)
    number = Fraction(Decimal(found[1]))
    if number == 0:
        raise InputError(f"`{option} {text}` is nothing", hint)
    if not found[2] and (number < 1000 or number.denominator != 1):
        raise InputError(f"`{option} {text}` has no unit", f"did you mean `{found[1]}GB`?")
    nbytes = math.floor(number * _UNITS[found[2].upper()])
    if nbytes == 0:
        raise InputError(f"`{option} {text}` is less than a byte", hint)
    return nbytes


@dataclass(frozen=True)
class Use:
    """How a model is run."""

    context: int  # tokens of one sequence, prompt and answer together
    sequences: int = 1  # at the same time, each with a cache of its own
    kv: KVFormat = _FLOAT_CACHE
    prompt_batch: int = 512  # tokens of a prompt computed at once
    flash_attention: bool = True  # llama.cpp's choice where the backend can, and its CPU can
    runtime: str = LLAMA_CPP
    reserved: bool = True  # buffers count as large as they are, as on a GPU; else what is touched of them while a text is generated

    @property
    def batch(self) -> int:
        return min(self.prompt_batch, self.context)


@dataclass(frozen=True)
class Memory:
    """Bytes, by what they are for."""

    weights: int
    kv_cache: int
    activations: int
    overhead: int

    @property
    def total(self) -> int:
        return self.weights + self.kv_cache + self.activations + self.overhead

    def fits(self, available: int) -> bool:
        return self.total <= available


@dataclass(frozen=True)
class Experts:
    """The MLP of a mixture-of-experts layer."""

    count: int
    active: int  # chosen for each token
    width: int
    shared: int  # width of what every token goes through; 0: nothing
    shared_gate: bool  # Qwen weighs it by one more row
    layers: tuple[bool, ...]  # which layers have experts


@dataclass(frozen=True)
class Shape:
    """What a config says about sizes."""

    hidden: int
    heads: int
    kv_heads: int
    width: int  # channels of a head
    vocabulary: int
    tied: bool  # the output is the embedding
    windows: tuple[int | None, ...]  # per layer: the tokens that its attention reaches back; None: all
    mlp: int  # width of a dense layer's
    mlp_matrices: int
    positions: int = 0  # rows of a learned table of positions
    experts: Experts | None = None

    @property
    def mlp_at_once(self) -> int:
        """Numbers per token in the widest MLP."""
        dense = self.experts is None or not all(self.experts.layers)
        mixed = self.experts.active * self.experts.width + self.experts.shared if self.experts else 0
        return max(self.mlp if dense else 0, mixed)


@dataclass(frozen=True)
class Parameters:
    """Numbers in matrices (norms and biases are a thousandth of a model and not counted)."""

    total: int
    active: int  # read to make one token: without the experts not chosen, and without tables that are only looked up in


def experts(config: Any) -> int:
    """In each layer; 0 for a dense model. Configs have three names for it."""
    return _first(config, "num_local_experts", "num_experts", "n_routed_experts")


def shape(config: Any) -> Shape:
    config = getattr(config, "text_config", None) or config
    if getattr(config, "kv_lora_rank", None):
        raise InputError(f"{config.model_type} keeps a latent instead of keys and values, which is not counted here yet", "give a size")
    if why_not := kv.unsupported(config):
        raise InputError(f"{why_not}: what they keep is not counted here yet", "give a size")
    hidden, heads = int(config.hidden_size), int(config.num_attention_heads)
    learned = config.model_type == "gpt2"
    return Shape(
        hidden=hidden,
        heads=heads,
        kv_heads=_first(config, "num_key_value_heads") or heads,
        width=_first(config, "head_dim") or hidden // heads,
        vocabulary=int(config.vocab_size),
        tied=bool(config.tie_word_embeddings),
        windows=_windows(config),
        mlp=_first(config, "intermediate_size", "n_inner") or 4 * hidden,
        mlp_matrices=2 if config.model_type in _TWO_MATRICES else 3,
        positions=int(config.max_position_embeddings) if learned else 0,
        experts=_experts(config),
    )


def parameters(shape: Shape) -> Parameters:
    queries, keys = shape.heads * shape.width, shape.kv_heads * shape.width
    attention = shape.hidden * (2 * queries + 2 * keys)
    table = shape.vocabulary * shape.hidden
    total = active = 0
    for layer in range(len(shape.windows)):
        mlp, mlp_active = _mlp_parameters(shape, layer)
        total += attention + mlp
        active += attention + mlp_active
    looked_up = shape.positions * shape.hidden
    return Parameters(total + looked_up + table * (1 if shape.tied else 2), active + table)


def memory(shape: Shape, weights: int, use: Use) -> Memory:
    """`weights`: bytes of all tensors, as they lie in the file."""
    check(use)
    work = _own_activations(shape, use) if use.runtime == FEWBITS else compute_buffer(shape, use) + _rounded_inputs(shape, use)
    return Memory(
        weights=weights,
        kv_cache=kv_bytes(shape, use),
        activations=work + use.sequences * shape.vocabulary * _FLOAT,
        overhead=_PROCESS[use.runtime] + shape.vocabulary * _VOCABULARY_ENTRY[use.runtime],
    )


def weight_bytes_left(shape: Shape, available: int, use: Use) -> int:
    """What the tensors may take so that the rest still fits."""
    rest = memory(shape, 0, use)
    left = available - rest.total
    if left <= 0:
        shares = f"KV cache {rest.kv_cache:,}, activations {rest.activations:,}, overhead {rest.overhead:,}"
        raise InputError(
            f"{available:,} bytes leave nothing for the weights at a context of {use.context:,}: {shares}",
            "shorten `--context`, or choose a smaller `--kv`",
        )
    return left


def largest_context(shape: Shape, weights: int, available: int, use: Use, limit: int) -> int:
    """The longest context up to `limit` that fits, and every shorter one with it; 0 if none does. The context of `use` is not looked at."""
    too_much = lambda context: not memory(shape, weights, replace(use, context=context)).fits(available)  # noqa: E731
    return bisect_left(range(1, limit + 1), True, key=too_much)


def kv_bytes(shape: Shape, use: Use) -> int:
    """The most that the caches take on the way to a full context. Formats that round a group of tokens at once shrink whenever a group is
    complete; a whole number of cells is just before that, so that no shorter context takes more (a test tries them all)."""
    # fewbits' own cache keeps what is not rounded yet in float32, not in 16 bits
    more = 2 * shape.width * 2 * (use.kv.sink + use.kv.group) if use.runtime == FEWBITS and use.kv.levels else 0
    return use.sequences * shape.kv_heads * sum(more + use.kv.head_bytes(shape.width, _kept(window, use)) for window in shape.windows)


def compute_buffer(shape: Shape, use: Use) -> int:
    """What llama.cpp calls so: everything between the embedding and the logits of one prompt batch."""
    queries, keys = shape.heads * shape.width, shape.kv_heads * shape.width
    kept = {_kept(window, use) for window in shape.windows}
    scores = 0 if use.flash_attention else shape.heads * max(kept)
    stream = 6 * shape.hidden if use.flash_attention else 3 * shape.hidden + 3 * max(shape.hidden, queries) + 2 * keys
    logits = shape.vocabulary if use.reserved else 0
    peak = max(logits, shape.mlp_matrices * shape.mlp_at_once, scores)
    mask = sum(kept) * (2 if use.flash_attention else _FLOAT)  # one for each kind of layer
    return use.batch * (_FLOAT * (stream + peak) + mask + _INPUT_BYTES)


def _rounded_inputs(shape: Shape, use: Use) -> int:
    """A CPU rounds the input of a matmul, for all tokens, to the type that its kernel multiplies with: 16 bits at most. Scores that are
    stored are an input too, of the matmul with the values."""
    scores = 0 if use.flash_attention else shape.heads * max(_kept(window, use) for window in shape.windows)
    return use.batch * 2 * max(shape.hidden, shape.heads * shape.width, shape.mlp_at_once, scores)


def _own_activations(shape: Shape, use: Use) -> int:
    """Of fewbits' own runtime: a piece of the prompt through an MLP, and attention over the whole context."""
    piece = min(use.context, _PIECE if use.kv.group == 1 else use.kv.sink + use.kv.group)  # a packed cache takes one group at a time
    attention = use.context * (2 * _FLOAT * shape.heads * shape.width + piece * (_FLOAT + 1))  # the mask is there as bytes and as floats
    return piece * _FLOAT * (4 * shape.mlp_at_once + 3 * shape.hidden) + attention


def _kept(window: int | None, use: Use) -> int:
    """Tokens in the cache of a layer. With a window, those of a batch still to be computed stand beside those it reaches back to."""
    tokens = use.context if window is None else min(use.context, window + use.batch)
    step = _LANES if use.runtime == FEWBITS and use.kv.levels is None else _CELLS
    return -(-tokens // step) * step


def _mlp_parameters(shape: Shape, layer: int) -> tuple[int, int]:
    """(all, read for one token)"""
    per_width = shape.mlp_matrices * shape.hidden
    own = shape.experts
    if own is None or not own.layers[layer]:
        return per_width * shape.mlp, per_width * shape.mlp
    always = shape.hidden * (own.count + own.shared_gate) + per_width * own.shared  # the router is a row for each expert
    return always + per_width * own.width * own.count, always + per_width * own.width * own.active


def _windows(config: Any) -> tuple[int | None, ...]:
    layers = int(config.num_hidden_layers)
    reach = {"full_attention": None, "sliding_attention": _first(config, "sliding_window") or None}
    reach["chunked_attention"] = _first(config, "attention_chunk_size") or None
    kinds = getattr(config, "layer_types", None)
    if kinds:
        return tuple(reach[str(kind)] for kind in kinds)
    slides = getattr(config, "use_sliding_window", True)
    return (reach["sliding_attention"] if slides else None,) * layers


def _experts(config: Any) -> Experts | None:
    count = experts(config)
    if not count:
        return None
    width = _first(config, "moe_intermediate_size", "intermediate_size")
    several_shared = _first(config, "n_shared_experts") * width
    one_shared = _first(config, "shared_expert_intermediate_size")
    dense_first, every = _first(config, "first_k_dense_replace"), _first(config, "decoder_sparse_step") or 1
    dense = set(getattr(config, "mlp_only_layers", None) or ()) | set(range(dense_first))
    layers = tuple(layer not in dense and (layer + 1) % every == 0 for layer in range(int(config.num_hidden_layers)))
    return Experts(count, _first(config, "num_experts_per_tok"), width, several_shared or one_shared, bool(one_shared), layers)


def _first(config: Any, *names: str) -> int:
    """The first of these attributes that the config has; 0 if it has none."""
    return next((int(value) for name in names if (value := getattr(config, name, None))), 0)


def runtime(name: str) -> str:
    """The one spelling of a runtime whose memory is known."""
    found = next((known for known in RUNTIMES if known.replace(".", "") == name.lower().replace(".", "")), None)
    if found is None:
        raise InputError(f"the memory of `{name}` is not known here", f"known: {', '.join(RUNTIMES)}")
    return found


def check(use: Use) -> None:
    for name, value in (("context", use.context), ("batch", use.sequences), ("prompt batch", use.prompt_batch)):
        if value < 1:
            raise InputError(f"a {name} of {value} is not possible", "give a number from 1 up")
