"""Which type llama-quantize gives each tensor in its named mixes (Q4_K_M, IQ2_M and the like), and how many bytes that takes.

mixes.py has the tables. A mix has one type for most tensors and better ones for a few: values and the second MLP matrix of some layers,
the attention's output, the embedding, the output. A tensor whose columns do not divide into the blocks of its type gets another type,
which is never smaller.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from fewbits import formats
from fewbits.errors import InputError
from fewbits.formats.runtime import kv
from fewbits.model.gguf import architectures
from fewbits.planning.footprint import experts
from fewbits.planning.mixes import BLOCKS_OF_32, MIXES, OTHER_NAMES, Mix, Place, Step

if TYPE_CHECKING:
    from fewbits.formats import Format
    from fewbits.model.weights import Weight


_KINDS = {  # of a tensor, by a part of its name
    "values": re.compile(r"attn_(v|qkv|kv_b)\.weight"),
    "keys": re.compile(r"attn_k\.weight"),
    "queries": re.compile(r"attn_q\.weight"),
    "attention output": re.compile(r"attn_output\.weight"),
    "up": re.compile(r"ffn_up"),
    "gate": re.compile(r"ffn_gate"),
    "down": re.compile(r"ffn_down"),
}
_OF_AN_MLP = ("up", "gate", "down")
_NEVER_QUANTIZED = re.compile(r"^position_embd\.|^token_types\.|ffn_gate_inp\.|_norm\.weight$")  # float32 in the files it is given
_EMBEDDINGS = ("token_embd.weight", "per_layer_token_embd.weight")
_OUTPUT = "output.weight"
_SMALLEST_BLOCK = 32  # a type of such blocks has none to fall back on but float16


def known() -> tuple[str, ...]:
    """The mixes, roughly from small to large."""
    return tuple(MIXES)


def check(name: str) -> str:
    """The canonical name of a mix; an error with the nearest names if there is none."""
    lower = name.lower()
    if lower in MIXES or lower in OTHER_NAMES:
        return OTHER_NAMES.get(lower, lower)
    near = difflib.get_close_matches(lower, MIXES, n=3)
    hint = f"did you mean {' or '.join(f'`{one}`' for one in near)}?" if near else f"known ones: {', '.join(MIXES)}"
    raise InputError(f"llama.cpp has no recipe `{name}` of types that fewbits has", hint)


def recipe(
    name: str, weights: Iterable[Weight], config: Any, names: Callable[[str], str] | None = None, imatrix: bool = True
) -> dict[str, Format]:
    """The format of every weight, by its name, as llama-quantize would choose it.

    `names` gives the GGUF name of `weight.parameter`; by default llama.cpp's table. The experts of one parameter are one tensor there.
    `imatrix`: whether llama-quantize is given one, as is usual; a few types depend on it.
    """
    mix, config, weights = MIXES[check(name)], kv.text_config(config), list(weights)
    laid_out = any(f"{weight.name}.weight" in _EMBEDDINGS for weight in weights)  # they have llama.cpp's names already
    rename = names or (str if laid_out else architectures.tensor_names(config))
    tensors = [(rename(weight.parameter), weight) for weight in weights]
    stored = {tensor for tensor, _ in tensors}
    tied = _OUTPUT not in stored
    places = _places(stored, config, imatrix)
    chosen: dict[str, Format] = {}
    for tensor, weight in tensors:
        if _NEVER_QUANTIZED.search(tensor):
            chosen[weight.name] = formats.get("fp32")
            continue
        if tensor == _OUTPUT or (tied and tensor in _EMBEDDINGS):
            wanted = _output_type(mix, weight)
        elif tensor in _EMBEDDINGS:
            wanted = mix.embedding or mix.plain
        else:
            wanted = _layer_type(mix, tensor, places.get(tensor), config)
        chosen[weight.name] = _that_divides(wanted, weight, name)
    return chosen


def nbytes(name: str, weights: Iterable[Weight], config: Any, names: Callable[[str], str] | None = None, imatrix: bool = True) -> int:
    """Tensor bytes of these weights in llama.cpp's file."""
    weights = list(weights)
    chosen = recipe(name, weights, config, names, imatrix)
    return sum(chosen[weight.name].nbytes(weight.shape) for weight in weights)


def _places(tensors: Iterable[str], config: Any, imatrix: bool) -> dict[str, Place]:
    """For the tensors whose type depends on their layer. llama.cpp counts the tensors of a kind by layers, then by names; for the MLPs of a
    mixture most mixes take the number of the layer instead, because one layer may have several."""
    heads = kv.largest(config, "num_attention_heads") or 1  # a state-space model has none
    sharing = heads // (kv.largest(config, "num_key_value_heads") or heads)
    mixture, layers = experts(config), int(config.num_hidden_layers)
    in_order = sorted((tensor for tensor in tensors if not _NEVER_QUANTIZED.search(tensor)), key=lambda name: (_layer(name), name))
    places = {}
    for kind in ("values", *_OF_AN_MLP):
        same = [tensor for tensor in in_order if _kind(tensor) == kind]
        for index, tensor in enumerate(same):
            by_layer = mixture > 1 and kind in _OF_AN_MLP
            count = layers if kind in _OF_AN_MLP else len(same)
            places[tensor] = Place(index, _layer(tensor) if by_layer else index, count, sharing, mixture, imatrix)
    return places


def _kind(tensor: str) -> str | None:
    return next((kind for kind, pattern in _KINDS.items() if pattern.search(tensor)), None)


def _layer(tensor: str) -> int:
    match = re.match(r"blk\.(\d+)\.", tensor)
    return int(match[1]) if match else -1


def _layer_type(mix: Mix, tensor: str, place: Place | None, config: Any) -> str:
    kind, eight_experts = _kind(tensor), experts(config) == 8  # Mixtral: attention is a small part of the model, so it costs little
    if mix.experts and tensor.endswith("_exps.weight"):
        return mix.experts
    if kind == "values" and place:
        wanted = _first_step(mix.values, place) or mix.plain
        if not mix.spares:
            return wanted
        if _is_70b(config) and wanted in ("q3_k", "q4_k"):
            wanted = "q5_k"
        return "q8_0" if eight_experts else wanted
    if kind == "keys" and eight_experts:
        return "q8_0" if mix.spares else "q4_k"
    if kind in ("keys", "queries"):
        return mix.queries_and_keys or mix.plain
    if kind in _OF_AN_MLP and place:
        return _first_step(mix.down if kind == "down" else mix.gate_and_up, place) or mix.plain
    if kind == "attention output":
        return (mix.with_eight_experts if eight_experts else mix.attention_output) or mix.plain
    return mix.plain


def _first_step(steps: tuple[Step, ...], place: Place) -> str | None:
    return next((fmt for applies, fmt in steps if applies(place)), None)


def _output_type(mix: Mix, weight: Weight) -> str:
    return mix.output if weight.shape[1] % formats.get(mix.plain).block == 0 else "q8_0"


def _that_divides(wanted: str, weight: Weight, recipe_name: str) -> Format:
    columns = weight.shape[1]
    fmt = formats.get(wanted)
    if columns % fmt.block == 0:
        return fmt
    if wanted not in BLOCKS_OF_32 and fmt.block > _SMALLEST_BLOCK:  # q1_0: llama-quantize stops here as well
        raise InputError(
            f"llama.cpp's {recipe_name} stops at `{weight.name}`: {columns} columns do not divide into blocks of {fmt.block}",
            "name a size in bits per weight or in bytes",
        )
    other = formats.get(BLOCKS_OF_32.get(wanted, wanted))
    return other if columns % other.block == 0 else formats.get("fp16")


def _is_70b(config: Any) -> bool:
    """llama.cpp recognises it by 80 layers, and for Llama by fewer heads of keys and values than of queries (Llama 1 had 80 layers too)."""
    heads = kv.largest(config, "num_attention_heads")
    shared = (kv.largest(config, "num_key_value_heads") or heads) != heads
    kind = getattr(config, "model_type", None)
    return int(config.num_hidden_layers) == 80 and (kind == "qwen2" or (kind in ("llama", "mistral") and shared and not experts(config)))
