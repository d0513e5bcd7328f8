"""ggml's matrix product: a graph of one node on its CPU backend, by the symbols that the xllamacpp wheel exports.

Weights lie in the buffer type that llama.cpp would choose, the one that interleaves rows for the processor (CPU_REPACK), where ggml has
kernels for it, and in a plain one. Both are contenders: which is faster depends on the rows of x.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import version as installed_version
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fewbits.benchmarks.contenders import Multiplier, Product, copies
from fewbits.benchmarks.peers import ggml
from fewbits.benchmarks.shapes import Packed
from fewbits.errors import MissingError

_F32 = 0
_FEATURES = ("avx", "avx2", "fma", "f16c", "avx_vnni", "avx512", "avx512_vbmi", "avx512_vnni", "avx512_bf16", "amx_int8", "neon", "dotprod")
_POINTER, _INT, _LONG, _SIZE = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_size_t


class _InitParams(ctypes.Structure):
    _fields_ = [("mem_size", _SIZE), ("mem_buffer", _POINTER), ("no_alloc", ctypes.c_bool)]


_Log = ctypes.CFUNCTYPE(None, _INT, ctypes.c_char_p, _POINTER)
_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {  # name -> (result, arguments)
    "ggml_init": (_POINTER, [_InitParams]),
    "ggml_free": (None, [_POINTER]),
    "ggml_tensor_overhead": (_SIZE, []),
    "ggml_graph_overhead_custom": (_SIZE, [_SIZE, ctypes.c_bool]),
    "ggml_new_tensor_2d": (_POINTER, [_POINTER, _INT, _LONG, _LONG]),
    "ggml_mul_mat": (_POINTER, [_POINTER, _POINTER, _POINTER]),
    "ggml_new_graph_custom": (_POINTER, [_POINTER, _SIZE, ctypes.c_bool]),
    "ggml_build_forward_expand": (None, [_POINTER, _POINTER]),
    "ggml_get_data": (_POINTER, [_POINTER]),
    "ggml_backend_cpu_init": (_POINTER, []),
    "ggml_backend_cpu_set_n_threads": (None, [_POINTER, _INT]),
    "ggml_backend_cpu_buffer_type": (_POINTER, []),
    "ggml_backend_free": (None, [_POINTER]),
    "ggml_backend_get_device": (_POINTER, [_POINTER]),
    "ggml_backend_dev_supports_op": (ctypes.c_bool, [_POINTER, _POINTER]),
    "ggml_backend_buft_alloc_buffer": (_POINTER, [_POINTER, _SIZE]),
    "ggml_backend_alloc_ctx_tensors_from_buft": (_POINTER, [_POINTER, _POINTER]),
    "ggml_backend_buffer_get_base": (_POINTER, [_POINTER]),
    "ggml_backend_buffer_free": (None, [_POINTER]),
    "ggml_backend_tensor_alloc": (_INT, [_POINTER, _POINTER, _POINTER]),
    "ggml_backend_tensor_set": (None, [_POINTER, _POINTER, _SIZE, _SIZE]),
    "ggml_backend_graph_compute": (_INT, [_POINTER, _POINTER]),
    "ggml_log_get": (None, [ctypes.POINTER(_POINTER), ctypes.POINTER(_POINTER)]),
    "ggml_log_set": (None, [_POINTER, _POINTER]),
    "ggml_version": (ctypes.c_char_p, []),
    "_Z35ggml_backend_cpu_repack_buffer_typev": (_POINTER, []),
}


class GgmlMatmul(Multiplier):
    def __init__(self, weight: Packed, threads: int, cold: int, repacked: bool) -> None:
        self._lib, self._source, self._closed = library(), weight, False
        rows, cols = weight.shape
        name = ggml.SPELLED[weight.fmt.name]
        self.name = f"ggml {weight.fmt.name}{' repacked' if repacked else ''}"
        self.setting = f"{version()}, {'CPU_REPACK' if repacked else 'CPU'} buffer, {features()}"
        self.nbytes = weight.nbytes
        lib, count = self._lib, copies(weight.nbytes, cold)
        self._backend = lib.ggml_backend_cpu_init()
        lib.ggml_backend_cpu_set_n_threads(self._backend, threads)
        self._context = _context((count + 1) * lib.ggml_tensor_overhead())
        self._weights = [lib.ggml_new_tensor_2d(self._context, ggml.TYPES[name].number, cols, rows) for _ in range(count)]
        with _quiet(lib):
            self._buffer = lib.ggml_backend_alloc_ctx_tensors_from_buft(self._context, _buffer_type(lib, repacked))
            if not self._buffer:
                raise MissingError(f"ggml cannot make room for {count} weights of {weight.nbytes} bytes", "choose a smaller `--shape`")
            stored = np.ascontiguousarray(weight.parts["blocks"].numpy())
            assert stored.nbytes == weight.nbytes
            for tensor in self._weights:
                lib.ggml_backend_tensor_set(tensor, stored.ctypes.data, 0, stored.nbytes)
        self._bound: list[tuple[int, int]] = []  # (context, buffer) of each x

    def bind(self, x: Tensor) -> Product:
        lib, count = self._lib, len(self._weights)
        rows, cols = self._source.shape
        graph_bytes = lib.ggml_graph_overhead_custom(4, False)
        context = _context((2 * count + 3) * lib.ggml_tensor_overhead() + count * (graph_bytes + 64))
        given = lib.ggml_new_tensor_2d(context, _F32, cols, len(x))
        out_bytes = len(x) * rows * 4
        start = -(-x.nbytes // 64) * 64
        buffer = lib.ggml_backend_buft_alloc_buffer(lib.ggml_backend_cpu_buffer_type(), start + out_bytes)
        self._bound.append((context, buffer))
        base = lib.ggml_backend_buffer_get_base(buffer)
        lib.ggml_backend_tensor_alloc(buffer, given, base)
        lib.ggml_backend_tensor_set(given, x.contiguous().data_ptr(), 0, x.nbytes)
        graphs = []
        for weight in self._weights:  # all write to the same place, as the nodes of a model do
            node = lib.ggml_mul_mat(context, weight, given)
            lib.ggml_backend_tensor_alloc(buffer, node, base + start)
            graph = lib.ggml_new_graph_custom(context, 4, False)
            lib.ggml_build_forward_expand(graph, node)
            graphs.append(graph)
        compute, backend = lib.ggml_backend_graph_compute, self._backend

        def run(number: int) -> None:
            status = compute(backend, graphs[number % count])
            assert status == 0, f"ggml failed with {status}"

        def output() -> Tensor:
            values = np.ctypeslib.as_array((ctypes.c_float * (len(x) * rows)).from_address(base + start))
            return torch.from_numpy(values.reshape(len(x), rows).copy())

        return Product(run, output)

    def decoded(self, rows: Tensor) -> Tensor:
        return self._source.decoded(rows)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for context, buffer in self._bound:
            self._lib.ggml_backend_buffer_free(buffer)
            self._lib.ggml_free(context)
        self._lib.ggml_backend_buffer_free(self._buffer)
        self._lib.ggml_free(self._context)
        self._lib.ggml_backend_free(self._backend)


def repacks(name: str, shape: tuple[int, int]) -> bool:
    """Whether ggml has kernels for interleaved rows of this type (our name) and shape (N, K) on this processor, by asking it."""
    lib = library()
    if (kind := _buffer_type(lib, True)) is None:
        return False
    context = _context(8 * lib.ggml_tensor_overhead())
    backend = lib.ggml_backend_cpu_init()
    weight = lib.ggml_new_tensor_2d(context, ggml.QUANTIZED[name].number, shape[1], shape[0])
    buffer = lib.ggml_backend_alloc_ctx_tensors_from_buft(context, kind)
    product = lib.ggml_mul_mat(context, weight, lib.ggml_new_tensor_2d(context, _F32, shape[1], 1))
    supported = bool(lib.ggml_backend_dev_supports_op(lib.ggml_backend_get_device(backend), product))
    lib.ggml_backend_buffer_free(buffer)
    lib.ggml_backend_free(backend)
    lib.ggml_free(context)
    return supported


def version() -> str:
    return f"ggml {library().ggml_version().decode()} (xllamacpp {installed_version('xllamacpp')})"


def features() -> str:
    """The instruction sets that this build of ggml was compiled for, and so uses; the processor may have more."""
    lib = ggml.library()
    named = [name for name in _FEATURES if hasattr(lib, f"ggml_cpu_has_{name}") and getattr(lib, f"ggml_cpu_has_{name}")()]
    return " ".join(named) or "no vectors"


@cache
def library() -> Any:
    try:
        lib = ggml.library()
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(lib, name)
            function.restype, function.argtypes = result, arguments
    except (ImportError, OSError, AttributeError, AssertionError) as failure:
        raise MissingError(f"ggml cannot be reached: {failure}", "pip install 'fewbits[llamacpp]'") from failure
    lib.ggml_cpu_init()
    return lib


def _buffer_type(lib: Any, repacked: bool) -> Any:
    return lib._Z35ggml_backend_cpu_repack_buffer_typev() if repacked else lib.ggml_backend_cpu_buffer_type()


def _context(nbytes: int) -> Any:
    return library().ggml_init(_InitParams(nbytes + 4096, None, True))


_ignore = _Log(lambda *_: None)  # held here because ctypes does not keep a callback alive


@contextmanager
def _quiet(lib: Any) -> Iterator[None]:
    """ggml says on stderr that it repacks, once for each tensor."""
    before, data = _POINTER(), _POINTER()
    lib.ggml_log_get(ctypes.byref(before), ctypes.byref(data))
    lib.ggml_log_set(ctypes.cast(_ignore, _POINTER), None)
    try:
        yield
    finally:
        lib.ggml_log_set(before, data)
