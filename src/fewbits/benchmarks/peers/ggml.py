"""ggml's own quantizer and decoders, called through the shared object inside the xllamacpp wheel, which exports its C functions."""

from __future__ import annotations

import ctypes
import importlib.util
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fewbits.model.gguf import types

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

QUANTIZED = {name.lower(): each for name, each in types.BY_NAME.items() if each.block > 1}
SPELLED = {name: name.replace("_k", "_K") for name in QUANTIZED}  # our names -> ggml's
TYPES = {SPELLED[name]: each for name, each in QUANTIZED.items()}


def dequantize(type_name: str, stored: Bytes, n: int) -> Floats:
    """The first n weights of these bytes, in order."""
    kind = TYPES[type_name]
    if n % kind.block or stored.size < n // kind.block * kind.nbytes:
        raise ValueError(f"{n} weights of {type_name} are {n // kind.block} blocks of {kind.nbytes} bytes; {stored.size} bytes were given")
    stored, out = np.ascontiguousarray(stored, np.uint8), np.empty(n, np.float32)
    function = getattr(library(), f"dequantize_row_{type_name}")
    function.restype, function.argtypes = None, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    function(stored.ctypes.data, out.ctypes.data, n)
    return out


class _Traits(ctypes.Structure):
    """The head of ggml_type_traits: enough to find the decoder of a type by its number."""

    _fields_ = (
        ("type_name", ctypes.c_char_p),
        ("block", ctypes.c_int64),
        ("block_interleaved", ctypes.c_int64),
        ("block_bytes", ctypes.c_size_t),
        ("is_quantized", ctypes.c_bool),
        ("to_float", ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)),
    )


def dequantize_any(number: int, stored: Bytes, n: int) -> Floats:
    """The first n weights of these bytes, of any type that ggml can decode."""
    lookup = library().ggml_get_type_traits
    lookup.restype, lookup.argtypes = ctypes.POINTER(_Traits), [ctypes.c_int]
    traits = lookup(number).contents
    assert (traits.block, traits.block_bytes) == (library().ggml_blck_size(number), library().ggml_type_size(number))
    stored, out = np.ascontiguousarray(stored, np.uint8), np.empty(n, np.float32)
    assert stored.size >= n // traits.block * traits.block_bytes
    traits.to_float(stored.ctypes.data, out.ctypes.data, n)
    return out


def quantize(type_name: str, weights: Floats, importance: Floats | None = None) -> Bytes:
    """weights (rows, cols), importance (cols,) -> (rows, bytes), as llama.cpp's own quantizer stores them."""
    kind = TYPES[type_name]
    rows, cols = weights.shape
    if cols % kind.block or (importance is not None and importance.shape != (cols,)):
        raise ValueError(f"{cols} columns, blocks of {kind.block}, importance {None if importance is None else importance.shape}")
    weights = np.ascontiguousarray(weights, np.float32)
    if importance is not None:
        importance = np.ascontiguousarray(importance, np.float32)
    out = np.empty((rows, cols // kind.block * kind.nbytes), np.uint8)
    wrote = library().ggml_quantize_chunk(
        kind.number, weights.ctypes.data, out.ctypes.data, 0, rows, cols, None if importance is None else importance.ctypes.data
    )
    assert wrote == out.size, f"ggml wrote {wrote} bytes, {out.size} were expected"
    return out


def needs_importance(type_name: str) -> bool:
    """Whether ggml rounds to this type only with an importance: without one it ends the process."""
    lib = library()
    lib.ggml_quantize_requires_imatrix.restype, lib.ggml_quantize_requires_imatrix.argtypes = ctypes.c_bool, [ctypes.c_int]
    return bool(lib.ggml_quantize_requires_imatrix(TYPES[type_name].number))


@cache
def library() -> ctypes.CDLL:
    spec = importlib.util.find_spec("xllamacpp")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("xllamacpp is not installed: `pip install fewbits[llamacpp]`")
    lib = ctypes.CDLL(str(next(Path(spec.submodule_search_locations[0]).glob("*.so"))))
    lib.ggml_type_size.restype, lib.ggml_type_size.argtypes = ctypes.c_size_t, [ctypes.c_int]
    lib.ggml_blck_size.restype, lib.ggml_blck_size.argtypes = ctypes.c_int64, [ctypes.c_int]
    for each in types.BY_NAME.values():  # fails on a version that numbers or lays out types differently
        assert (lib.ggml_blck_size(each.number), lib.ggml_type_size(each.number)) == (each.block, each.nbytes), each.name
    lib.ggml_quantize_chunk.restype = ctypes.c_size_t
    pointer, count = ctypes.c_void_p, ctypes.c_int64
    lib.ggml_quantize_chunk.argtypes = [ctypes.c_int, pointer, pointer, count, count, count, pointer]
    return lib
