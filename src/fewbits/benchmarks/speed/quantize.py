"""`fewbits bench quantize`: weights per second and weighted error of our rounding, against ggml's own on as many threads."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fewbits import kernels
from fewbits.benchmarks.peers import ggml, ggml_matmul
from fewbits.benchmarks.shapes import formats_of
from fewbits.benchmarks.timing import Contender, Spread, interleaved, on_threads, speedup, spread, within
from fewbits.methods import rtn
from fewbits.progress import Progress, silent

if TYPE_CHECKING:
    from fewbits.formats import Format, Parts

FORMATS = ("q4_0", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_nl", "iq4_xs")
SHAPE = (4096, 256)  # K, N: a million weights
ROUNDS = 5


@dataclass(frozen=True)
class QuantizerRow:
    format: str
    importance: bool
    kernel: str  # that packs; the search of scales uses the same instruction set
    million_weights_per_second: Spread
    ggml_million_weights_per_second: Spread | None  # None: without --peers, or ggml has no such type
    speedup: Spread | None
    error: float  # squared, weighted by the importance, over the same of the weights themselves
    error_ratio: float | None  # to ggml's: below 1 is better


@dataclass(frozen=True)
class QuantizeBench:
    k: int
    n: int
    threads: int
    peer: str | None
    rows: tuple[QuantizerRow, ...]

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


def bench_quantize(
    names: Sequence[str] = FORMATS,
    shape: tuple[int, int] = SHAPE,
    threads: int | None = None,
    peers: bool = False,
    rounds: int = ROUNDS,
    progress: Progress[Any] = silent,
) -> QuantizeBench:
    fmts = formats_of(names, shape)
    peer = f"{ggml_matmul.version()}, {ggml_matmul.features()}" if peers else None
    with on_threads(threads) as count:
        w, importance = weights(shape)
        todo = [(fmt, given) for fmt in fmts for given in (None, importance)]
        steps = progress(todo, len(todo), "timing quantizers")
        rows = tuple(_row(fmt, w, given, count, peers, rounds) for fmt, given in steps)
    return QuantizeBench(*shape, count, peer, rows)


def weights(shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """w (N, K) with heavier tails than a Gaussian, as trained weights have, and an importance (K,) over three orders of magnitude."""
    generator = torch.Generator().manual_seed(5)
    k, n = shape
    normal = torch.randn((n, k), generator=generator)
    tails = torch.randn((4, n, k), generator=generator).square().mean(0).sqrt()
    return 0.02 * normal / tails, torch.exp(1.2 * torch.randn(k, generator=generator))


class GgmlQuantizer:
    """ggml_quantize_chunk on rows split among threads: the function itself has one, and lets go of Python while it runs."""

    def __init__(self, name: str, w: Tensor, importance: Tensor | None, threads: int) -> None:
        self._name = ggml.SPELLED[name]
        self._shares = [share.numpy() for share in w.tensor_split(threads) if len(share)]
        if importance is None and ggml.needs_importance(self._name):
            importance = torch.ones(w.shape[1])  # it would stop the program
        self._importance = None if importance is None else importance.numpy()
        self._pool = ThreadPoolExecutor(threads) if threads > 1 else None

    def __call__(self, _: int) -> Tensor:
        def one(share: Any) -> ggml.Bytes:
            return ggml.quantize(self._name, share, self._importance)

        parts = list(self._pool.map(one, self._shares)) if self._pool else [one(share) for share in self._shares]
        return torch.from_numpy(parts[0] if len(parts) == 1 else np.concatenate(parts))

    def close(self) -> None:
        if self._pool:
            self._pool.shutdown()


def _row(fmt: Format, w: Tensor, importance: Tensor | None, threads: int, peers: bool, rounds: int) -> QuantizerRow:
    kernel = kernels.bind(fmt, (w.shape[0], w.shape[1]))
    made: dict[str, Parts] = {}

    def ours(_: int) -> None:
        made["ours"] = rtn.quantize(w, fmt, importance)

    contenders = [Contender("fewbits", ours)]
    peer = GgmlQuantizer(fmt.name, w, importance, threads) if peers and fmt.name in ggml.SPELLED else None

    def theirs(number: int) -> None:
        assert peer
        made["ggml"] = {"blocks": peer(number)}

    if peer:
        contenders.append(Contender("ggml", theirs))
    timed = interleaved(contenders, rounds, threads)
    errors = {name: _error(w, fmt, parts, importance) for name, parts in made.items()}
    speeds = [spread(within([w.numel() / seconds / 1e6 for seconds in each.rounds], each.quiet)) for each in timed]
    if peer:
        peer.close()
    return QuantizerRow(
        format=fmt.name,
        importance=importance is not None,
        kernel=kernel.backend,
        million_weights_per_second=speeds[0],
        ggml_million_weights_per_second=speeds[1] if peer else None,
        speedup=speedup(timed[0], timed[1]) if peer else None,
        error=errors["ours"],
        error_ratio=errors["ours"] / errors["ggml"] if peer else None,
    )


def _error(w: Tensor, fmt: Format, parts: Parts, importance: Tensor | None) -> float:
    weight = torch.ones(w.shape[1], dtype=torch.float64) if importance is None else importance.double()
    decoded = kernels.decode(fmt, parts, (w.shape[0], w.shape[1]))
    return float(((decoded.double() - w.double()).square() * weight).sum() / (w.double().square() * weight).sum())
