"""ggml's own quantizer and decoders, called through the shared object inside the xllamacpp wheel, which exports its C functions."""

from __future__ import annotations

import ctypes
import importlib.util
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

# (id, weights per block, bytes per block) by ggml's own spelling
TYPES = {
    "q4_0": (2, 32, 18),
    "q4_1": (3, 32, 20),
    "q5_0": (6, 32, 22),
    "q5_1": (7, 32, 24),
    "q8_0": (8, 32, 34),
    "q2_K": (10, 256, 84),
    "q3_K": (11, 256, 110),
    "q4_K": (12, 256, 144),
    "q5_K": (13, 256, 176),
    "q6_K": (14, 256, 210),
    "iq2_xxs": (16, 256, 66),
    "iq2_xs": (17, 256, 74),
    "iq3_xxs": (18, 256, 98),
    "iq1_s": (19, 256, 50),
    "iq4_nl": (20, 32, 18),
    "iq3_s": (21, 256, 110),
    "iq2_s": (22, 256, 82),
    "iq4_xs": (23, 256, 136),
    "iq1_m": (29, 256, 56),
    "tq1_0": (34, 256, 54),
    "tq2_0": (35, 256, 66),
    "mxfp4": (39, 32, 17),
    "nvfp4": (40, 64, 36),
    "q1_0": (41, 128, 18),
    "q2_0": (42, 64, 18),
}
SPELLED = {name.lower(): name for name in TYPES}  # our names -> ggml's


def dequantize(type_name: str, stored: Bytes, n: int) -> Floats:
    """The first n weights of these bytes, in order."""
    _, block, block_bytes = TYPES[type_name]
    if n % block or stored.size < n // block * block_bytes:
        raise ValueError(f"{n} weights of {type_name} are {n // block} blocks of {block_bytes} bytes; {stored.size} bytes were given")
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
    number, block, block_bytes = TYPES[type_name]
    rows, cols = weights.shape
    if cols % block or (importance is not None and importance.shape != (cols,)):
        raise ValueError(f"{cols} columns, blocks of {block}, importance {None if importance is None else importance.shape}")
    weights = np.ascontiguousarray(weights, np.float32)
    if importance is not None:
        importance = np.ascontiguousarray(importance, np.float32)
    out = np.empty((rows, cols // block * block_bytes), np.uint8)
    wrote = library().ggml_quantize_chunk(
        number, weights.ctypes.data, out.ctypes.data, 0, rows, cols, None if importance is None else importance.ctypes.data
    )
    assert wrote == out.size, f"ggml wrote {wrote} bytes, {out.size} were expected"
    return out


def needs_importance(type_name: str) -> bool:
    """Whether ggml rounds to this type only with an importance: without one it ends the process."""
    lib = library()
    lib.ggml_quantize_requires_imatrix.restype, lib.ggml_quantize_requires_imatrix.argtypes = ctypes.c_bool, [ctypes.c_int]
    return bool(lib.ggml_quantize_requires_imatrix(TYPES[type_name][0]))


@cache
def library() -> ctypes.CDLL:
    spec = importlib.util.find_spec("xllamacpp")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("xllamacpp is not installed: `pip install fewbits[llamacpp]`")
    lib = ctypes.CDLL(str(next(Path(spec.submodule_search_locations[0]).glob("*.so"))))
    lib.ggml_type_size.restype, lib.ggml_type_size.argtypes = ctypes.c_size_t, [ctypes.c_int]
    lib.ggml_blck_size.restype, lib.ggml_blck_size.argtypes = ctypes.c_int64, [ctypes.c_int]
    for name, (number, block, block_bytes) in TYPES.items():  # fails on a version that numbers or lays out types differently
        assert (lib.ggml_blck_size(number), lib.ggml_type_size(number)) == (block, block_bytes), name
    lib.ggml_quantize_chunk.restype = ctypes.c_size_t
    pointer, count = ctypes.c_void_p, ctypes.c_int64
    lib.ggml_quantize_chunk.argtypes = [ctypes.c_int, pointer, pointer, count, count, count, pointer]
    return lib
