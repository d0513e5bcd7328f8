"""Which type llama-quantize gives each tensor in its named mixes (Q4_K_M and the like), and how many bytes that takes.

The tables below are llama.cpp's rules as of 2026. A mix has one type for most tensors and better ones for a few: values and the second
MLP matrix of some layers, the attention's output, the embedding, the output. A tensor whose columns do not divide into the blocks of its
type gets another type, which is never smaller.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fewbits import formats
from fewbits.errors import InputError
from fewbits.formats.runtime import kv
from fewbits.model.gguf import architectures
from fewbits.planning.footprint import experts

if TYPE_CHECKING:
    from fewbits.formats import Format
    from fewbits.model.weights import Weight


@dataclass(frozen=True)
class Place:
    """What the type of a tensor may depend on."""

    index: int  # of the tensor among those of its kind
    count: int
    sharing: int  # query heads that share one head of keys and values
    imatrix: bool


Step = tuple[Callable[[Place], bool], str]  # a condition, and the type where it holds; of several steps the first that applies


def _always(_: Place) -> bool:
    return True


def _shared(place: Place) -> bool:
    return place.sharing >= 4  # few values for many queries: they take few bytes, and each error is read often


def _favoured(place: Place) -> bool:
    """The first eighth, the last eighth, and every third layer between them."""
    eighth = place.count // 8
    return place.index < eighth or place.index >= 7 * place.count // 8 or (place.index - eighth) % 3 == 2


def _first(number: int) -> Callable[[Place], bool]:
    return lambda place: place.index < number


def _first_part(part: int) -> Callable[[Place], bool]:
    return lambda place: place.index < place.count // part


def _first_eighth_with(imatrix: bool) -> Callable[[Place], bool]:
    return lambda place: place.imatrix == imatrix and place.index < place.count // 8


@dataclass(frozen=True, kw_only=True)
class Mix:
    plain: str  # the type of all tensors that no other field names
    values: tuple[Step, ...] = ()  # attn_v, or the fused matrix that holds it
    down: tuple[Step, ...] = ()  # ffn_down
    attention_output: str | None = None
    with_eight_experts: str | None = None  # attn_output of a model with 8 experts, instead of the above
    embedding: str | None = None  # where the output is not tied to it
    experts: str | None = None  # MLPs of a mixture


_FOUR_BIT_CURVE: dict[str, Any] = {
    "values": ((_shared, "q5_k"),),
    "down": ((_first_eighth_with(imatrix=False), "q5_k"),),
    "with_eight_experts": "q5_k",
}
_MORE_BITS: Step = (_favoured, "q6_k")

_MIXES = {
    "tq1_0": Mix(plain="tq1_0", embedding="q4_k"),
    "tq2_0": Mix(plain="tq2_0", embedding="q4_k"),
    "q2_k_s": Mix(plain="q2_k", values=((_shared, "q4_k"),), down=((_first_part(8), "q4_k"),)),
    "q2_k": Mix(
        plain="q2_k",
        values=((_shared, "q4_k"), (_always, "q3_k")),
        down=((_always, "q3_k"),),
        attention_output="q3_k",
        with_eight_experts="q5_k",
    ),
    "q3_k_s": Mix(plain="q3_k", with_eight_experts="q5_k"),
    "q3_k_m": Mix(
        plain="q3_k",
        values=((_first(2), "q5_k"), (_always, "q4_k")),
        down=((_first_part(16), "q5_k"), (_always, "q4_k")),
        attention_output="q4_k",
        with_eight_experts="q5_k",
    ),
    "q3_k_l": Mix(plain="q3_k", values=((_always, "q5_k"),), down=((_always, "q5_k"),), attention_output="q5_k"),
    "iq4_xs": Mix(plain="iq4_xs", **_FOUR_BIT_CURVE),
    "iq4_nl": Mix(plain="iq4_nl", **_FOUR_BIT_CURVE),
    "q4_0": Mix(plain="q4_0", down=((_first_eighth_with(imatrix=True), "q4_1"),)),
    "q4_k_s": Mix(plain="q4_k", values=((_first(4), "q5_k"),), down=((_first_part(8), "q5_k"),), with_eight_experts="q5_k"),
    "q4_k_m": Mix(plain="q4_k", values=(_MORE_BITS,), down=(_MORE_BITS,), with_eight_experts="q5_k"),
    "q4_1": Mix(plain="q4_1"),
    "q5_0": Mix(plain="q5_0", down=((_first_eighth_with(imatrix=True), "q5_1"),)),
    "q5_k_s": Mix(plain="q5_k"),
    "q5_k_m": Mix(plain="q5_k", values=(_MORE_BITS,), down=(_MORE_BITS,)),
    "q5_1": Mix(plain="q5_1"),
    "q6_k": Mix(plain="q6_k"),
    "q8_0": Mix(plain="q8_0"),
    "mxfp4_moe": Mix(plain="q8_0", experts="mxfp4"),  # a dense model gets Q8_0 throughout
}
_OTHER_NAMES = {"q3_k": "q3_k_m", "q4_k": "q4_k_m", "q5_k": "q5_k_m"}  # as llama-quantize takes them

# the type where columns do not divide by 256; where they do not divide by 32 either, it is float16
_BLOCKS_OF_32 = {
    "tq1_0": "q4_0", "tq2_0": "q4_0", "q2_k": "q4_0", "q3_k": "q4_0", "iq4_xs": "iq4_nl", "q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0",
}  # fmt: skip

_VALUES = re.compile(r"attn_(v|qkv|kv_b)\.weight$")
_DOWN = re.compile(r"ffn_down")
_NEVER_QUANTIZED = re.compile(r"^position_embd\.|^token_types\.|ffn_gate_inp\.|_norm\.weight$")  # float32 in the files it is given
_EMBEDDINGS = ("token_embd.weight", "per_layer_token_embd.weight")
_OUTPUT = "output.weight"


def known() -> tuple[str, ...]:
    """The mixes, roughly from small to large."""
    return tuple(_MIXES)


def check(name: str) -> str:
    """The canonical name of a mix; an error with the nearest names if there is none."""
    lower = name.lower()
    if lower in _MIXES or lower in _OTHER_NAMES:
        return _OTHER_NAMES.get(lower, lower)
    near = difflib.get_close_matches(lower, _MIXES, n=3)
    hint = f"did you mean {' or '.join(f'`{one}`' for one in near)}?" if near else f"known ones: {', '.join(_MIXES)}"
    raise InputError(f"llama.cpp has no recipe `{name}` of types that fewbits has", hint)


def recipe(
    name: str, weights: Iterable[Weight], config: Any, names: Callable[[str], str] | None = None, imatrix: bool = True
) -> dict[str, Format]:
    """The format of every weight, by its name, as llama-quantize would choose it.

    `names` gives the GGUF name of `weight.parameter`; by default llama.cpp's table. The experts of one parameter are one tensor there.
    `imatrix`: whether llama-quantize is given one, as is usual; a few types depend on it.
    """
    mix, config, weights = _MIXES[check(name)], kv.text_config(config), list(weights)
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
    """For the tensors whose type depends on their layer. llama.cpp counts the tensors of a kind in the order of layers; for the second MLP
    matrix of a mixture it takes the number of the layer instead, because one layer may have several."""
    heads = kv.largest(config, "num_attention_heads") or 1  # a state-space model has none
    sharing = heads // (kv.largest(config, "num_key_value_heads") or heads)
    in_order = sorted(tensors, key=_layer)
    values = [tensor for tensor in in_order if _VALUES.search(tensor)]
    downs = [tensor for tensor in in_order if _DOWN.search(tensor)]
    layers = int(config.num_hidden_layers)
    places = {tensor: Place(index, len(values), sharing, imatrix) for index, tensor in enumerate(values)}
    for index, tensor in enumerate(downs):
        places[tensor] = Place(_layer(tensor) if experts(config) > 1 else index, layers, sharing, imatrix)
    return places


def _layer(tensor: str) -> int:
    match = re.match(r"blk\.(\d+)\.", tensor)
    return int(match[1]) if match else -1


def _layer_type(mix: Mix, tensor: str, place: Place | None, config: Any) -> str:
    eight_experts = experts(config) == 8  # Mixtral: attention is a small part of the model, so better keys and values cost little
    if mix.experts and tensor.endswith("_exps.weight"):
        return mix.experts
    if _VALUES.search(tensor) and place:
        wanted = _first_step(mix.values, place) or mix.plain
        if _is_70b(config) and wanted in ("q3_k", "q4_k"):
            wanted = "q5_k"
        return "q8_0" if eight_experts else wanted
    if tensor.endswith("attn_k.weight") and eight_experts:
        return "q8_0"
    if _DOWN.search(tensor) and place:
        return _first_step(mix.down, place) or mix.plain
    if tensor.endswith("attn_output.weight"):
        return (mix.with_eight_experts if eight_experts else mix.attention_output) or mix.plain
    return mix.plain


def _first_step(steps: tuple[Step, ...], place: Place) -> str | None:
    return next((fmt for applies, fmt in steps if applies(place)), None)


def _output_type(mix: Mix, weight: Weight) -> str:
    divides = weight.shape[1] % formats.get(mix.plain).block == 0
    return "q6_k" if divides and mix.plain != "q8_0" else "q8_0"


def _that_divides(wanted: str, weight: Weight, recipe_name: str) -> Format:
    columns = weight.shape[1]
    fmt = formats.get(wanted)
    if columns % fmt.block == 0:
        return fmt
    if wanted not in _BLOCKS_OF_32:  # llama-quantize stops here as well
        raise InputError(
            f"llama.cpp's {recipe_name} stops at `{weight.name}`: {columns} columns do not divide into blocks of {fmt.block}",
            "name a size in bits per weight or in bytes",
        )
    other = formats.get(_BLOCKS_OF_32[wanted])
    return other if columns % other.block == 0 else formats.get("fp16")


def _is_70b(config: Any) -> bool:
    """llama.cpp recognises it by 80 layers, and for Llama by fewer heads of keys and values than of queries (Llama 1 had 80 layers too)."""
    heads = kv.largest(config, "num_attention_heads")
    shared = (kv.largest(config, "num_key_value_heads") or heads) != heads
    kind = getattr(config, "model_type", None)
    return int(config.num_hidden_layers) == 80 and (kind == "qwen2" or (kind in ("llama", "mistral") and shared and not experts(config)))
