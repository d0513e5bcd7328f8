"""`fewbits bench dequantize`: packed weights back to float32, in billions per second, against ggml's own functions on as many threads."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fewbits import kernels
from fewbits.benchmarks.peers import ggml, ggml_matmul
from fewbits.benchmarks.shapes import Packed, formats_of, packed
from fewbits.benchmarks.timing import ROUNDS, Contender, Spread, interleaved, on_threads, speedup, spread, within
from fewbits.errors import InputError
from fewbits.progress import Progress, silent

FORMATS = ("q2_k", "q3_k", "q4_0", "q4_1", "q4_k", "iq4_nl", "iq4_xs", "mxfp4", "q5_0", "q5_1", "q5_k", "q6_k", "q8_0")
SHAPE = (4096, 4096)  # K, N: more than the caches hold, as a real weight is


@dataclass(frozen=True)
class DecoderRow:
    format: str
    kernel: str
    billion_weights_per_second: Spread
    ggml_billion_weights_per_second: Spread | None  # None: without --peers, or ggml has no such type
    speedup: Spread | None


@dataclass(frozen=True)
class DequantizeBench:
    k: int
    n: int
    threads: int
    peer: str | None
    rows: tuple[DecoderRow, ...]

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


def bench_dequantize(
    names: Sequence[str] = FORMATS,
    shape: tuple[int, int] = SHAPE,
    threads: int | None = None,
    peers: bool = False,
    rounds: int = 2 * ROUNDS + 1,
    progress: Progress[Any] = silent,
) -> DequantizeBench:
    fmts = formats_of(names, shape)
    peer = f"{ggml_matmul.version()}, {ggml_matmul.features()}" if peers else None
    with on_threads(threads) as count:
        steps = progress(fmts, len(fmts), "timing decoders")
        rows = tuple(_row(packed(fmt, (shape[1], shape[0])), count, peers, rounds) for fmt in steps)
    return DequantizeBench(*shape, count, peer, rows)


class GgmlDecoder:
    """ggml's dequantize_row, on rows split among threads, into memory that is there already."""

    def __init__(self, weight: Packed, threads: int) -> None:
        rows, cols = weight.shape
        self._stored = np.ascontiguousarray(weight.parts["blocks"].numpy())
        self.out = torch.empty(weight.shape)
        self._decode = getattr(ggml.library(), f"dequantize_row_{ggml.SPELLED[weight.fmt.name]}")
        self._decode.restype, self._decode.argtypes = None, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
        shares = np.array_split(np.arange(rows), min(threads, rows))
        row_bytes = self._stored.nbytes // rows
        self._calls = [
            (self._stored.ctypes.data + int(share[0]) * row_bytes, self.out.data_ptr() + int(share[0]) * cols * 4, len(share) * cols)
            for share in shares
        ]
        self._pool = ThreadPoolExecutor(threads - 1) if threads > 1 else None

    def __call__(self, _: int) -> Tensor:
        others = [self._pool.submit(self._decode, *call) for call in self._calls[1:]] if self._pool else []
        self._decode(*self._calls[0])
        for other in others:
            other.result()
        return self.out

    def close(self) -> None:
        if self._pool:
            self._pool.shutdown()


def _row(weight: Packed, threads: int, peers: bool, rounds: int) -> DecoderRow:
    kernel = kernels.bind(weight.fmt, weight.shape)
    wanted = weight.decoded(torch.arange(weight.shape[0])).float()
    if not torch.equal(kernel.decode(weight.parts, weight.shape), wanted):
        raise InputError(f"{kernel.backend} decodes {weight.fmt.name} to other values than the reference", "report this: it is a bug")
    out = torch.empty(weight.shape)  # memory that is there already, as ggml has it
    contenders = [Contender("fewbits", lambda _: kernel.decode(weight.parts, weight.shape, out=out))]
    peer = GgmlDecoder(weight, threads) if peers and weight.fmt.name in ggml.SPELLED else None
    if peer:
        contenders.append(Contender("ggml", peer))
        assert torch.allclose(peer(0), wanted, rtol=2.0**-22, atol=0.0), weight.fmt.name  # it rounds a product twice at most
    timed = interleaved(contenders, rounds, threads)
    if peer:
        peer.close()
    weights = weight.shape[0] * weight.shape[1]
    speeds = [spread(within([weights / seconds / 1e9 for seconds in each.rounds], each.quiet)) for each in timed]
    return DecoderRow(
        weight.fmt.name, kernel.backend, speeds[0], speeds[1] if peer else None, speedup(timed[0], timed[1]) if peer else None
    )  # fmt: skip
