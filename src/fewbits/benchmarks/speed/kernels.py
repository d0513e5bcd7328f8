"""`fewbits bench kernels`: products of quantized weights against the limits of this machine and against other libraries, in one run.

For every shape, format and number of rows: all contenders hold as many copies of their weights as do not fit the caches, are checked, and
then timed in turn, the limits themselves (reading memory, multiplying in registers) among them. A share of a limit is taken within a round,
like a ratio.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from fewbits import formats, kernels
from fewbits.benchmarks.contenders import Multiplier, Product, WrongProductError, checked, copies
from fewbits.benchmarks.peers import ggml, ggml_matmul, onnxruntime
from fewbits.benchmarks.peers import torch as peers_torch
from fewbits.benchmarks.shapes import FORMATS, ROWS, SHAPES, Packed, packed
from fewbits.benchmarks.speed import roofline
from fewbits.benchmarks.speed.roofline import Limits, Machine, Memory, Yardsticks
from fewbits.benchmarks.timing import ROUNDS, Contender, Spread, Timed, interleaved, on_threads, ratio, speedup, spread
from fewbits.errors import FewbitsError
from fewbits.formats import Format, Shape
from fewbits.kernels import w8a8
from fewbits.kernels.tiles import Tiled, tiled
from fewbits.progress import Progress, silent

if TYPE_CHECKING:
    from fewbits.formats import Parts

OURS = "fewbits"
_ALL_AT_WORK = 3e7  # operations, half a millisecond: from here on every library uses all threads
Bound = Literal["read", "int8", "fp32"]


@dataclass(frozen=True)
class Result:
    name: str
    setting: str
    bytes: int  # of packed weights, read by each product
    latency: Spread  # seconds of a single call
    seconds: Spread  # of the fastest call in a round, over the rounds; rates and ratios are computed from these
    gigabytes_per_second: float  # of packed weights
    gigaoperations_per_second: float  # 2 * rows * K * N per product
    bound: Bound  # the limit that is reached first
    share_of_limit: Spread
    quiet_rounds: int  # in which it was timed undisturbed by other programs; rates, shares and ratios are of these, if there are any
    error: float  # relative RMS, to float64
    speedup: Spread | None  # how many times as fast as this one fewbits is; None: it is fewbits


@dataclass(frozen=True)
class Case:
    format: str
    k: int
    n: int
    rows: int
    results: tuple[Result, ...]  # fewbits first

    @property
    def ours(self) -> Result:
        return self.results[0]

    def best(self, family: str) -> Result | None:
        """The fastest of a library's contenders."""
        of_family = [result for result in self.results[1:] if result.name.startswith(family)]
        return min(of_family, key=lambda result: (not result.quiet_rounds, result.seconds.median), default=None)


@dataclass(frozen=True)
class KernelBench:
    machine: Machine
    limits: Limits
    cases: tuple[Case, ...]
    skipped: tuple[str, ...]  # what was asked for and left out, with the reason

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


class Ours(Multiplier):
    """`exact`: x stays in float32; otherwise the kernel may round it to 8 bits, and weights lie in tiles, as in a loaded model. In
    int8_channel several rows of x are multiplied as W8A8, x rounded per row, to compare with onnxruntime's MatMulInteger."""

    def __init__(self, weight: Packed, threads: int, cold: int, exact: bool = False) -> None:
        self._source = weight
        kernel = kernels.bind(weight.fmt, weight.shape)
        self._stored: Callable[[Tensor, Parts, Shape], Tensor] = partial(kernel.matmul, exact=exact)
        self._integers = weight.fmt.name == "int8_channel" and not exact
        self._tiles: list[Tiled] = []
        if exact:
            self.name, self.unit, self.rounding = f"{OURS} exact", "fp32", "none"
        else:
            self.name = OURS
        self.nbytes = weight.nbytes
        count = copies(weight.nbytes, cold)
        if not exact and (tiles := tiled(kernel, weight.copy(), weight.shape)):
            self._tiles = [tiles, *(replace(tiles, tiles=tiles.tiles.clone()) for _ in range(count - 1))]
        self._copies = [weight.copy() for _ in range(count)] if self._integers or not self._tiles else []
        self.setting = f"{kernel.backend}, tiles" if self._tiles else kernel.backend

    def bind(self, x: Tensor) -> Product:
        made: list[Tensor] = []

        def run(number: int) -> None:
            if self._tiles and not (self._integers and len(x) > 1):
                made[:] = [self._tiles[number % len(self._tiles)].matmul(x)]
            else:
                multiply = _w8a8 if self._integers else self._stored
                made[:] = [multiply(x, self._copies[number % len(self._copies)], self._source.shape)]

        return Product(run, lambda: made[0])

    def decoded(self, rows: Tensor) -> Tensor:
        return self._source.decoded(rows)

    def close(self) -> None:
        self._copies.clear()
        self._tiles.clear()


def _w8a8(x: Tensor, parts: Parts, shape: Shape) -> Tensor:  # noqa: ARG001  (as Kernel.matmul)
    return w8a8.linear(x, parts["codes"], parts["scales"])


@dataclass(frozen=True)
class Settings:
    formats: Sequence[str] = FORMATS
    shapes: Sequence[tuple[int, int]] = SHAPES  # (K, N)
    rows: Sequence[int] = ROWS  # of x
    threads: int | None = None  # None: torch's
    peers: bool = False  # time other libraries too
    exact: bool = False  # time the product with float32 x too
    rounds: int = ROUNDS
    cold: int | None = None  # bytes that the copies of a weight take in all; None: more than the caches hold


def bench_kernels(settings: Settings, progress: Progress[Any] = silent) -> KernelBench:
    skipped: list[str] = []
    fmts = [formats.get(name) for name in settings.formats]
    todo = [(k_n, fmt) for k_n in settings.shapes for fmt in fmts if _fits(fmt, k_n, skipped)]
    with on_threads(settings.threads) as threads:
        cold = settings.cold or roofline.cold_bytes()
        memory = Memory(threads, cold)
        limits = roofline.measure(threads, memory)
        yardsticks = Yardsticks(threads, memory)
        steps = progress(_products(settings, todo, threads, cold, skipped), len(todo) * len(settings.rows), "timing products")
        cases = tuple(
            _case(fmt, k_n, count, contenders, yardsticks, settings.rounds, threads, skipped) for fmt, k_n, count, contenders in steps
        )
    return KernelBench(roofline.machine(cold), yardsticks.refined(limits), cases, tuple(dict.fromkeys(skipped)))


def _products(
    settings: Settings, todo: Sequence[tuple[tuple[int, int], Format]], threads: int, cold: int, skipped: list[str]
) -> Iterator[tuple[Format, tuple[int, int], int, list[Multiplier]]]:
    """(format, (K, N), rows of x, contenders). Memory holds the contenders of one format and shape at a time."""
    for k_n in dict.fromkeys(k_n for k_n, _ in todo):
        shared = _Peers(k_n, threads, cold, skipped)
        for fmt in (fmt for other, fmt in todo if other == k_n):
            weight = packed(fmt, (k_n[1], k_n[0]))
            others = shared.of(weight) if settings.peers else []
            ours = [Ours(weight, threads, cold, exact) for exact in ((False, True) if settings.exact else (False,))]
            for count in settings.rows:
                yield fmt, k_n, count, [*ours, *others]
            for contender in [*ours, *others]:
                if contender not in shared.made.values():
                    contender.close()
        shared.close()


def _case(
    fmt: Format,
    k_n: tuple[int, int],
    rows: int,
    multipliers: Sequence[Multiplier],
    yardsticks: Yardsticks,
    rounds: int,
    threads: int,
    skipped: list[str],
) -> Case:
    k, n = k_n
    operations = 2.0 * rows * k * n
    x = torch.randn((rows, k), generator=torch.Generator().manual_seed(rows))
    right: list[tuple[Multiplier, float]] = []
    contenders: list[Contender] = []
    for multiplier in multipliers:
        product = multiplier.bind(x)
        try:
            right.append((multiplier, checked(multiplier, product, x, n)))
        except WrongProductError as failure:
            if isinstance(multiplier, Ours):
                raise
            skipped.append(f"{multiplier.name} at {k}x{n}, {rows} rows: {failure.args[0]}")
        else:
            contenders.append(Contender(multiplier.name, product.run, threads if operations >= _ALL_AT_WORK else 0))
    limits = yardsticks.of({multiplier.unit for multiplier, _ in right}, multipliers[0].nbytes, operations)
    timed = interleaved([*contenders, *(Contender(limit.kind, limit.call, threads) for limit in limits)], rounds, threads)
    per_second = yardsticks.rates(limits, timed[len(contenders) :])
    calm = {limit.kind: each.quiet for limit, each in zip(limits, timed[len(contenders) :], strict=True)}
    results = tuple(
        _result(multiplier, each, timed[0], per_second, calm, operations, error)
        for (multiplier, error), each in zip(right, timed[: len(contenders)], strict=True)
    )
    return Case(fmt.name, k, n, rows, results)


def _result(
    multiplier: Multiplier,
    timed: Timed,
    ours: Timed,
    per_second: dict[str, list[float]],
    calm_limits: dict[str, tuple[bool, ...]],
    operations: float,
    error: float,
) -> Result:
    least: dict[Bound, list[float]] = {"read": [multiplier.nbytes / rate for rate in per_second["read"]]}
    if multiplier.unit in per_second:
        least[multiplier.unit] = [operations / rate for rate in per_second[multiplier.unit]]
    bound = max(least, key=lambda name: spread(least[name]).median)
    seconds = timed.undisturbed
    return Result(
        name=multiplier.name,
        setting=multiplier.setting,
        bytes=multiplier.nbytes,
        latency=timed.latency,
        seconds=seconds,
        gigabytes_per_second=multiplier.nbytes / seconds.median / 1e9,
        gigaoperations_per_second=operations / seconds.median / 1e9,
        bound=bound,
        share_of_limit=ratio(least[bound], calm_limits[bound], timed.rounds, timed.quiet),
        quiet_rounds=sum(timed.quiet),
        error=error,
        speedup=None if timed is ours else speedup(ours, timed),
    )


class _Peers:
    """The other libraries for one shape. Weights that several formats are compared with are made once, and closed with the shape."""

    def __init__(self, k_n: tuple[int, int], threads: int, cold: int, skipped: list[str]) -> None:
        self._shape, self._threads, self._cold, self._skipped = (k_n[1], k_n[0]), threads, cold, skipped
        self.made: dict[str, Multiplier | None] = {}  # for several formats; None: it could not be made

    def of(self, weight: Packed) -> list[Multiplier]:
        bits = weight.fmt.bits_per_weight(self._shape)
        wanted = [self._onnx(name) for name in _onnx_formats(weight.fmt, bits)]
        wanted.append(self._once("torch", lambda: peers_torch.TorchLinear(self._packed("int8_channel"), self._threads, self._cold)))
        return [*self._ggml(weight, bits), *(peer for peer in wanted if peer)]

    def close(self) -> None:
        for multiplier in self.made.values():
            if multiplier:
                multiplier.close()

    def _ggml(self, weight: Packed, bits: float) -> list[Multiplier]:
        name = weight.fmt.name if weight.fmt.name in ggml.SPELLED else _nearest_ggml(bits)
        if formats.get(name).fits(self._shape) is not None:
            return []
        stored = weight if name == weight.fmt.name else self._packed(name)
        try:
            layouts = (False, True) if ggml_matmul.repacks(name, self._shape) else (False,)
            return [ggml_matmul.GgmlMatmul(stored, self._threads, self._cold, repacked) for repacked in layouts]
        except FewbitsError as failure:
            self._skipped.append(f"ggml: {failure.args[0]}")
            return []

    def _onnx(self, name: str) -> Multiplier | None:
        kind = onnxruntime.MatMulInteger if name == "int8_channel" else onnxruntime.MatMulNBits
        return self._once(f"onnxruntime {name}", lambda: kind(self._packed(name), self._threads, self._cold))

    def _packed(self, name: str) -> Packed:
        return packed(formats.get(name), self._shape)

    def _once(self, key: str, make: Callable[[], Multiplier]) -> Multiplier | None:
        if key not in self.made:
            try:
                self.made[key] = make()
            except Exception as failure:  # whatever another library raises must not end the run
                self._skipped.append(f"{key}: {str(failure).splitlines()[0]}")
                self.made[key] = None
        return self.made[key]


def _onnx_formats(fmt: Format, bits: float) -> list[str]:
    """onnxruntime's own formats of about as many bits; W8A8 beside 8 bits per row."""
    group = 128 if fmt.group and fmt.group >= 128 and not fmt.name.startswith("q") else 32
    nearest = f"int{2 if bits < 3 else 4 if bits < 6 else 8}_g{group}"
    return [nearest, "int8_channel"] if bits >= 8 and fmt.group is None else [nearest]


def _nearest_ggml(bits: float) -> str:
    """For a format that ggml does not have: the one of 32 columns of at least as many bits, rounded down to a whole."""
    return next((name for most, name in ((4.9, "q4_0"), (5.9, "q5_0")) if bits < most), "q8_0")


def _fits(fmt: Format, k_n: tuple[int, int], skipped: list[str]) -> bool:
    reason = fmt.fits((k_n[1], k_n[0]))
    if reason:
        skipped.append(f"{fmt.name} at {k_n[0]}x{k_n[1]}: {reason}")
    return reason is None
