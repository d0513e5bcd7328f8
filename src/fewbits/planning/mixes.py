"""llama.cpp's named mixes (Q4_K_M, IQ2_M and the like) as tables, as of 2026: one type for most tensors, and better ones for a few.

recipes.py reads them. Where the type depends on the layer or on the model, a field is a sequence of steps: the first that applies counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Place:
    """What the type of a tensor may depend on."""

    index: int  # of the tensor among those of its kind
    layer: int  # the same, but the number of the layer for MLPs of a mixture, where one layer may have several such tensors
    count: int
    sharing: int  # query heads that share one head of keys and values
    experts: int  # of a layer; 0: the model is dense
    imatrix: bool


Applies = Callable[[Place], bool]
Step = tuple[Applies, str]  # a condition, and the type where it holds


@dataclass(frozen=True, kw_only=True)
class Mix:
    plain: str  # the type of all tensors that no other field names
    values: tuple[Step, ...] = ()  # attn_v, or the fused matrix that holds it
    queries_and_keys: str | None = None
    attention_output: str | None = None
    with_eight_experts: str | None = None  # attn_output of a model with 8 experts, instead of the above
    down: tuple[Step, ...] = ()  # ffn_down
    gate_and_up: tuple[Step, ...] = ()  # ffn_gate, ffn_up
    embedding: str | None = None  # where the output is not tied to it
    output: str = "q6_k"
    experts: str | None = None  # MLPs of a mixture
    spares: bool = True  # values of a 70B model and attention of one with 8 experts get more: they are a small part of the model


def _always(_: Place) -> bool:
    return True


def _shared(place: Place) -> bool:
    return place.sharing >= 4  # few values for many queries: they take few bytes, and each error is read often


def _shared_or_mixture(place: Place) -> bool:
    return _shared(place) or place.experts >= 4


def _favoured(place: Place) -> bool:
    """The first eighth, the last eighth, and every third layer between them."""
    eighth = place.count // 8
    return place.layer < eighth or place.layer >= 7 * place.count // 8 or (place.layer - eighth) % 3 == 2


def _favoured_of_eight_experts(place: Place) -> bool:
    return place.experts == 8 and _favoured(place)


def _middle(place: Place) -> bool:
    return place.count // 8 <= place.layer < 7 * place.count // 8


def _first(number: int) -> Applies:
    return lambda place: place.layer < number


def _first_part(part: int) -> Applies:
    return lambda place: place.layer < place.count // part


def _first_tensors(place: Place) -> bool:
    """As many tensors as an eighth of the layers: in a mixture that may be fewer layers than an eighth."""
    return place.index < place.count // 8


def _with_imatrix(place: Place) -> bool:
    return place.imatrix


def _without_imatrix(place: Place) -> bool:
    return not place.imatrix


def _both(one: Applies, other: Applies) -> Applies:
    return lambda place: one(place) and other(place)


def _codebook(plain: str, better: str, attention_output: str | None, embedding: str) -> Mix:
    """The mixes of 1 and 2 bits. `better`: for the values and the first matrices of ffn_down."""
    return Mix(
        plain=plain,
        values=((_shared_or_mixture, "q4_k"), (_always, better)),
        attention_output=attention_output,
        with_eight_experts="q5_k",
        down=((_first_tensors, better),),
        embedding=embedding,
        output="q5_k",
        spares=False,
    )


_FOUR_BIT_CURVE: dict[str, Any] = {
    "values": ((_shared, "q5_k"),),
    "down": ((_both(_without_imatrix, _first_part(8)), "q5_k"),),
    "with_eight_experts": "q5_k",
}
_MORE_BITS: Step = (_favoured, "q6_k")
_FIRST_EIGHTH_WITH_IMATRIX = _both(_with_imatrix, _first_part(8))

MIXES = {  # roughly from small to large
    "q1_0": Mix(plain="q1_0"),
    "iq1_s": _codebook("iq1_s", "q2_k", "iq2_xxs", "q2_k"),
    "tq1_0": Mix(plain="tq1_0", embedding="q4_k"),
    "iq1_m": _codebook("iq1_m", "q2_k", "iq2_xxs", "q2_k"),
    "tq2_0": Mix(plain="tq2_0", embedding="q4_k"),
    "iq2_xxs": _codebook("iq2_xxs", "q2_k", None, "q2_k"),
    "q2_0": Mix(plain="q2_0", embedding="q4_k"),
    "iq2_xs": _codebook("iq2_xs", "q2_k", None, "q2_k"),
    "iq2_s": _codebook("iq2_xs", "iq3_s", "iq3_s", "iq3_s"),  # mostly iq2_xs, as its name does not say
    "iq2_m": _codebook("iq2_s", "iq3_s", "iq3_s", "iq3_s"),
    "q2_k_s": Mix(plain="q2_k", values=((_shared, "q4_k"),), down=((_first_part(8), "q4_k"),)),
    "q2_k": Mix(
        plain="q2_k",
        values=((_shared, "q4_k"), (_always, "q3_k")),
        down=((_always, "q3_k"),),
        attention_output="q3_k",
        with_eight_experts="q5_k",
    ),
    "iq3_xxs": Mix(
        plain="iq3_xxs",
        values=((_shared, "q4_k"), (_without_imatrix, "iq3_s")),
        queries_and_keys="iq2_s",
        attention_output="iq3_s",
        with_eight_experts="q5_k",
        down=((_both(_without_imatrix, _first_part(8)), "q4_k"), (_without_imatrix, "q3_k")),
        embedding="iq3_s",
        output="q5_k",
    ),
    "iq3_xs": Mix(
        plain="iq3_s",
        values=((_shared, "q4_k"),),
        queries_and_keys="iq3_xxs",
        with_eight_experts="q5_k",
        gate_and_up=((_middle, "iq3_xxs"),),
    ),
    "q3_k_s": Mix(plain="q3_k", with_eight_experts="q5_k"),
    "iq3_s": Mix(plain="iq3_s", values=((_shared, "q4_k"),), with_eight_experts="q5_k"),
    "iq3_m": Mix(
        plain="iq3_s",
        values=((_always, "q4_k"),),
        attention_output="q4_k",
        with_eight_experts="q5_k",
        down=((_first_part(8), "q4_k"), (_favoured_of_eight_experts, "q4_k")),
    ),
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
    "q4_0": Mix(plain="q4_0", down=((_FIRST_EIGHTH_WITH_IMATRIX, "q4_1"),)),
    "q4_k_s": Mix(plain="q4_k", values=((_first(4), "q5_k"),), down=((_first_part(8), "q5_k"),), with_eight_experts="q5_k"),
    "q4_k_m": Mix(plain="q4_k", values=(_MORE_BITS,), down=(_MORE_BITS,), with_eight_experts="q5_k"),
    "q4_1": Mix(plain="q4_1"),
    "q5_0": Mix(plain="q5_0", down=((_FIRST_EIGHTH_WITH_IMATRIX, "q5_1"),)),
    "q5_k_s": Mix(plain="q5_k"),
    "q5_k_m": Mix(plain="q5_k", values=(_MORE_BITS,), down=(_MORE_BITS,)),
    "q5_1": Mix(plain="q5_1"),
    "q6_k": Mix(plain="q6_k"),
    "q8_0": Mix(plain="q8_0", output="q8_0"),
    "mxfp4_moe": Mix(plain="q8_0", output="q8_0", experts="mxfp4"),  # a dense model gets Q8_0 throughout
}
OTHER_NAMES = {"q3_k": "q3_k_m", "q4_k": "q4_k_m", "q5_k": "q5_k_m"}  # as llama-quantize takes them

# the type where columns do not divide into super-blocks (q2_0: into 64); where they do not divide by 32 either, it is float16
BLOCKS_OF_32 = {
    **dict.fromkeys(("iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s", "iq4_xs"), "iq4_nl"),
    **dict.fromkeys(("tq1_0", "tq2_0", "q2_0", "q2_k", "q3_k"), "q4_0"),
    "q4_k": "q5_0",
    "q5_k": "q5_1",
    "q6_k": "q8_0",
}
