"""The memory that a model takes while it runs, from its config alone: weights, KV cache, activations and the runtime itself.

`fewbits fit` and `--fits` both count with it; the devices and their memory are in devices/devices.csv.

**llama.cpp.** It reserves activations when it opens a context: one buffer for the graph of a whole prompt batch. The peak is in one of
three places, each beside the residual stream and the attention mask: the logits of every token of the batch, the MLP (gate, up and their
product), or the scores of one layer's attention, which flash attention never stores. How many rows exist at once was found by varying one
width at a time; tests/devices/test_footprint.py has what llama.cpp reported. In 176 combinations of widths, batches and contexts the count
is never below the report by more than the log rounds. It is at most 8 % above it where queries are as wide as the residual stream (28 %
seen where they are half as wide), with one exception: once the mask is as large as the logits (a context of twice the vocabulary),
llama.cpp reuses the mask's memory for them, and the count is too high by as much. The logits of a whole batch are reserved even where
only those of the last token are wanted: a GPU's memory is then taken, a CPU's pages are never touched (`Use.reserved`).

Not counted: the copy of some weights (mostly of 4 bits) that llama.cpp rearranges for a CPU. The system may then drop the pages of the
mapped file.

**fewbits' own runtime** holds the weights in tiles that are as large as the file; here too the system may drop the pages of the mapped
file. Its cache has no more tokens than the context. A piece of a prompt takes gate, up, their product, input and output; attention converts
the cached keys and values to float32, for as many heads as there are queries, and makes a mask. Measured on SmolLM2's shape: contexts of
1024 and 4096 add 25 and 47 MB, 23 and 45 are counted. Its tokenizer is transformers', which takes twice the memory of llama.cpp's.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from typing import Any

from fewbits.errors import InputError
from fewbits.formats.runtime import kv
from fewbits.formats.runtime.kv import KVFormat

_FLOAT = 4  # bytes: activations are float32
_FLOAT_CACHE = kv.get("float")
_CELLS = 256  # llama.cpp rounds the tokens of a cache up to a multiple of this
_INPUT_BYTES = 48  # per token of a batch: token, position, its cells in the cache, whether its logits are wanted
LLAMA_CPP, FEWBITS = RUNTIMES = "llama.cpp", "fewbits"
_PROCESS = {
    LLAMA_CPP: 8 << 20,
    FEWBITS: 4 << 20,
}  # heap and graph: 6 to 9 MiB beyond Python on the embedded model; an artifact's objects
# bytes for one token of the vocabulary: text, merges and tables. SmolLM2's 49,152: 23.8 MiB in llama.cpp, 45 MiB in tokenizers
_VOCABULARY_ENTRY = {LLAMA_CPP: 512, FEWBITS: 960}
_PIECE, _LANES = 512, 16  # of inference/: tokens of a prompt at once, tokens whose keys are stored together

# families whose MLP has two matrices; all others have three (gate, up and down)
_TWO_MATRICES = ("gpt2", "gpt_neox", "phi", "starcoder2", "nemotron")


@dataclass(frozen=True)
class Use:
    """How a model is run."""

    context: int  # tokens of one sequence, prompt and answer together
    sequences: int = 1  # at the same time, each with its own cache
    kv: KVFormat = _FLOAT_CACHE
    prompt_batch: int = 512  # tokens of a prompt computed at once
    flash_attention: bool = True  # llama.cpp's choice where the backend can, and its CPU can
    runtime: str = LLAMA_CPP
    devices: int = 1  # that share the layers
    reserved: bool = True  # count whole buffers, as on a GPU; else only what is touched while text is generated

    @property
    def batch(self) -> int:
        return min(self.prompt_batch, self.context)


@dataclass(frozen=True)
class Memory:
    """In bytes."""

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
    shared: int  # width of the experts that every token goes through; 0: there are none
    shared_gate: bool  # Qwen has one more row, which weighs the shared expert
    layers: tuple[bool, ...]  # which layers have experts


@dataclass(frozen=True)
class Shape:
    """The sizes in a config."""

    hidden: int
    heads: int
    kv_heads: int
    width: int  # channels of a head
    vocabulary: int
    tied: bool  # the output is the embedding
    windows: tuple[int | None, ...]  # per layer: how many tokens back its attention reaches; None: all
    mlp: int  # width in a dense layer
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
    """How many numbers the matrices have (norms and biases are a thousandth of a model and not counted)."""

    total: int
    active: int  # read for one token: without experts that are not chosen, and without tables that are only looked up


def experts(config: Any) -> int:
    """How many a layer has; 0 for a dense model. Configs have three names for it."""
    return _first(config, "num_local_experts", "num_experts", "n_routed_experts")


def shape(config: Any) -> Shape:
    tied = bool(getattr(config, "tie_word_embeddings", False))
    config = kv.text_config(config)
    if getattr(config, "kv_lora_rank", None):
        raise InputError(f"{config.model_type} keeps a latent instead of keys and values, which is not counted here yet", "give a size")
    if why_not := kv.unsupported(config):
        raise InputError(f"{why_not}: what they keep is not counted here yet", "give a size")
    hidden, heads = int(config.hidden_size), kv.largest(config, "num_attention_heads")
    if not heads:
        raise InputError(f"{config.model_type} has no attention heads: what it keeps is not counted here yet", "give a size")
    learned = config.model_type == "gpt2"
    return Shape(
        hidden=hidden,
        heads=heads,
        kv_heads=_first(config, "num_key_value_heads") or heads,
        width=_first(config, "head_dim") or hidden // heads,
        vocabulary=int(config.vocab_size),
        tied=bool(getattr(config, "tie_word_embeddings", tied)),
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
    """`weights`: bytes of all tensors in the file."""
    check(use)
    work = _own_activations(shape, use) if use.runtime == FEWBITS else compute_buffer(shape, use) + _rounded_inputs(shape, use)
    return Memory(
        weights=weights,
        kv_cache=kv_bytes(shape, use),
        activations=use.devices * work + use.sequences * shape.vocabulary * _FLOAT,
        overhead=_PROCESS[use.runtime] + shape.vocabulary * _VOCABULARY_ENTRY[use.runtime] + _unused(shape, weights, use),
    )


def _unused(shape: Shape, weights: int, use: Use) -> int:
    """Layers are not divided: each further device may have room left for a part of one."""
    return (use.devices - 1) * -(-weights // max(1, len(shape.windows)))


def weight_bytes_left(shape: Shape, available: int, use: Use) -> int:
    """The bytes that the tensors may take so that everything fits."""
    rest = memory(shape, 0, use)
    left = available - rest.total
    if left <= 0:
        shares = f"KV cache {rest.kv_cache:,}, activations {rest.activations:,}, overhead {rest.overhead:,}"
        raise InputError(
            f"{available:,} bytes leave nothing for the weights at a context of {use.context:,}: {shares}",
            "shorten `--context`, or choose a smaller `--kv`",
        )
    layers = max(1, len(shape.windows))
    return left if use.devices == 1 else left * layers // (layers + use.devices - 1) - use.devices


def largest_context(shape: Shape, weights: int, available: int, use: Use, limit: int) -> int:
    """The longest context up to `limit` that fits; 0 if none does. The context of `use` is ignored."""
    too_much = lambda context: not memory(shape, weights, replace(use, context=context)).fits(available)  # noqa: E731
    return bisect_left(range(1, limit + 1), True, key=too_much)


def kv_bytes(shape: Shape, use: Use) -> int:
    """The most that the caches take while the context fills. Formats that round a group of tokens at once shrink whenever a group is
    complete. The count is for a whole number of cells, just before that, so that no shorter context takes more (a test tries them all)."""
    # fewbits' own cache holds tokens that are not rounded yet in float32, not in 16 bits
    more = 2 * shape.width * 2 * (use.kv.sink + use.kv.group) if use.runtime == FEWBITS and use.kv.levels else 0
    return use.sequences * shape.kv_heads * sum(more + use.kv.head_bytes(shape.width, _cached(window, use)) for window in shape.windows)


def compute_buffer(shape: Shape, use: Use) -> int:
    """As llama.cpp calls it: everything between the embedding and the logits of one prompt batch."""
    queries, keys = shape.heads * shape.width, shape.kv_heads * shape.width
    cached = {_cached(window, use) for window in shape.windows}
    scores = 0 if use.flash_attention else shape.heads * max(cached)
    stream = 6 * shape.hidden if use.flash_attention else 3 * shape.hidden + 3 * max(shape.hidden, queries) + 2 * keys
    logits = shape.vocabulary if use.reserved else 0
    peak = max(logits, shape.mlp_matrices * shape.mlp_at_once, scores)
    mask = sum(cached) * (2 if use.flash_attention else _FLOAT)  # one for each kind of layer
    return use.batch * (_FLOAT * (stream + peak) + mask + _INPUT_BYTES)


def _rounded_inputs(shape: Shape, use: Use) -> int:
    """On a CPU llama.cpp rounds the input of a matmul to the type that its kernel multiplies: at most 16 bits. Without flash attention
    the scores are such an input too, of the matmul with the values."""
    scores = 0 if use.flash_attention else shape.heads * max(_cached(window, use) for window in shape.windows)
    return use.batch * 2 * max(shape.hidden, shape.heads * shape.width, shape.mlp_at_once, scores)


def _own_activations(shape: Shape, use: Use) -> int:
    """For fewbits' own runtime: a piece of the prompt in an MLP, and attention over the whole context."""
    piece = min(use.context, _PIECE if use.kv.group == 1 else use.kv.sink + use.kv.group)  # a quantized cache takes a group at a time
    attention = use.context * (2 * _FLOAT * shape.heads * shape.width + piece * (_FLOAT + 1))  # the mask exists as bytes and as floats
    return piece * _FLOAT * (4 * shape.mlp_at_once + 3 * shape.hidden) + attention


def _cached(window: int | None, use: Use) -> int:
    """In one layer. With a window, the cache also holds the tokens of the batch that is being computed."""
    tokens = use.context if window is None else min(use.context, window + use.batch)
    step = _LANES if use.runtime == FEWBITS and use.kv.levels is None else _CELLS
    return -(-tokens // step) * step


def _mlp_parameters(shape: Shape, layer: int) -> tuple[int, int]:
    """(all, read for one token)"""
    per_width = shape.mlp_matrices * shape.hidden
    mixture = shape.experts
    if mixture is None or not mixture.layers[layer]:
        return per_width * shape.mlp, per_width * shape.mlp
    always = shape.hidden * (mixture.count + mixture.shared_gate) + per_width * mixture.shared  # the router has a row for each expert
    return always + per_width * mixture.width * mixture.count, always + per_width * mixture.width * mixture.active


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
    """The first of these sizes that the config has; 0 if it has none."""
    return kv.largest(config, *names)


def runtime(name: str) -> str:
    """The canonical name of a runtime whose memory is known."""
    match = next((known for known in RUNTIMES if known.replace(".", "") == name.lower().replace(".", "")), None)
    if match is None:
        raise InputError(f"the memory of `{name}` is not known here", f"known: {', '.join(RUNTIMES)}")
    return match


def check(use: Use) -> None:
    for name, value in (("context", use.context), ("batch", use.sequences), ("prompt batch", use.prompt_batch)):
        if value < 1:
            raise InputError(f"a {name} of {value} is not possible", "give a number from 1 up")
