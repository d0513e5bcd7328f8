"""The KV caches that `fewbits fit` counts: fewbits' own formats, and llama.cpp's types (`-ctk`, `-ctv`), 32 channels under a scale."""

from __future__ import annotations

import difflib

from fewbits.errors import InputError
from fewbits.formats.runtime import kv
from fewbits.formats.runtime.kv import KVFormat
from fewbits.planning import footprint


def _blocks(name: str, bits: int, minimum: bool = False) -> KVFormat:
    levels = tuple(float(code) for code in range(1 << bits))
    return KVFormat(name=name, about="llama.cpp's", bits=bits, levels=levels, minimum=minimum, largest=levels[-1], channels=32)


_LLAMA_CPP = {each.name: each for each in (
    _blocks("q8_0", 8), _blocks("q5_1", 5, minimum=True), _blocks("q5_0", 5), _blocks("q4_1", 4, minimum=True), _blocks("q4_0", 4),
    _blocks("iq4_nl", 4),
)}  # fmt: skip
_SIXTEEN_BITS = ("f16", "fp16", "bf16", "float16")
SMALLER = {footprint.LLAMA_CPP: ("q8_0", "q4_0"), footprint.FEWBITS: ("int8", "int4")}  # worth offering, the least felt first


def get(name: str) -> KVFormat:
    lower = name.lower()
    known = kv.all() | _LLAMA_CPP
    if lower in _SIXTEEN_BITS:
        return kv.get("float")
    if lower in known:
        return known[lower]
    near = difflib.get_close_matches(lower, known, n=1)
    hint = f"did you mean `{near[0]}`?" if near else f"known formats: {', '.join(known)}"
    raise InputError(f"no KV cache format is named `{name}`", hint)


def check(cache: KVFormat, runtime: str) -> None:
    if runtime == footprint.FEWBITS and cache.name in _LLAMA_CPP:
        raise InputError(f"`--kv {cache.name}` is llama.cpp's", f"fewbits' own runtime has {', '.join(kv.all())}")
