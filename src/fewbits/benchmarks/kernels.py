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
from fewbits.benchmarks import peers_ggml, peers_onnx, peers_torch, roofline
from fewbits.benchmarks.products import Multiplier, Product, WrongProductError, checked, copies
from fewbits.benchmarks.roofline import Limits, Machine, Memory, Yardsticks
from fewbits.benchmarks.shapes import FORMATS, ROWS, SHAPES, Packed, formats_of, packed
from fewbits.benchmarks.timing import ROUNDS, Contender, Spread, Timed, interleaved, ratio, speedup, spread
from fewbits.errors import FewbitsError
from fewbits.formats import Format, Shape
from fewbits.kernels import w8a8
from fewbits.kernels.tiling import Tiled, tiled
from fewbits.progress import Progress, silent

if TYPE_CHECKING:
    from fewbits.formats import Parts

OURS = "fewbits"
_ALL_AT_WORK = 3e7  # operations, half a millisecond: worth all threads to everybody
Bound = Literal["read", "int8", "fp32"]


@dataclass(frozen=True)
class Result:
    name: str
    setting: str
    bytes: int  # of packed weights, read by each product
    latency: Spread  # seconds of a single call
    seconds: Spread  # of the fastest call in a round, over the rounds: what rates and ratios are made of
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
        own = [result for result in self.results[1:] if result.name.startswith(family)]
        return min(own, key=lambda result: (not result.quiet_rounds, result.seconds.median), default=None)


@dataclass(frozen=True)
class KernelBench:
    machine: Machine
    limits: Limits
    cases: tuple[Case, ...]
    skipped: tuple[str, ...]  # what was asked for and left out, with the reason

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


class Ours(Multiplier):
    """`exact`: x stays in float32; otherwise the kernel may round it to 8 bits, and weights lie in tiles, as a loaded model has them. Many
    rows by 8 bits per row are multiplied as W8A8, x rounded per row: what onnxruntime's MatMulInteger does."""

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


def bench_kernels(
    names: Sequence[str] = FORMATS,
    shapes: Sequence[tuple[int, int]] = SHAPES,
    rows: Sequence[int] = ROWS,
    threads: int | None = None,
    peers: bool = False,
    exact: bool = False,
    rounds: int = ROUNDS,
    cold: int | None = None,
    progress: Progress[Any] = silent,
) -> KernelBench:
    """`exact`: time the product with float32 x too. `cold`: bytes that the copies of a weight take in all; by default more than the caches
    hold."""
    threads = threads or torch.get_num_threads()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return _bench(formats_of(names), shapes, rows, threads, peers, exact, rounds, cold or roofline.cold_bytes(), progress)
    finally:
        torch.set_num_threads(before)


def _bench(
    fmts: Sequence[Format],
    shapes: Sequence[tuple[int, int]],
    rows: Sequence[int],
    threads: int,
    peers: bool,
    exact: bool,
    rounds: int,
    cold: int,
    progress: Progress[Any],
) -> KernelBench:
    skipped: list[str] = []
    memory = Memory(threads, cold)
    limits = roofline.measure(threads, memory)
    yardsticks = Yardsticks(threads, memory)
    todo = [(k_n, fmt) for k_n in shapes for fmt in fmts if _fits(fmt, k_n, skipped)]

    def each() -> Iterator[tuple[Format, tuple[int, int], int, list[Multiplier]]]:
        for k_n in dict.fromkeys(k_n for k_n, _ in todo):
            shared = _Peers(k_n, threads, cold, skipped)
            for fmt in (fmt for other, fmt in todo if other == k_n):
                weight = packed(fmt, (k_n[1], k_n[0]))
                others = shared.of(weight) if peers else []
                own = [Ours(weight, threads, cold, way) for way in ((False, True) if exact else (False,))]
                contenders: list[Multiplier] = [*own, *others]
                for count in rows:
                    yield fmt, k_n, count, contenders
                for contender in contenders:
                    if contender not in shared.kept:
                        contender.close()
            shared.close()

    steps = progress(each(), len(todo) * len(rows), "timing products")
    cases = tuple(_case(fmt, k_n, count, contenders, yardsticks, rounds, threads, skipped) for fmt, k_n, count, contenders in steps)
    return KernelBench(roofline.machine(cold), yardsticks.refined(limits), cases, tuple(dict.fromkeys(skipped)))


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
    calm = {limit.kind: own.quiet for limit, own in zip(limits, timed[len(contenders) :], strict=True)}
    results = tuple(
        _result(multiplier, found, timed[0], per_second, calm, operations, error)
        for (multiplier, error), found in zip(right, timed[: len(contenders)], strict=True)
    )
    return Case(fmt.name, k, n, rows, results)


def _result(
    multiplier: Multiplier,
    found: Timed,
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
    seconds = found.undisturbed
    return Result(
        name=multiplier.name,
        setting=multiplier.setting,
        bytes=multiplier.nbytes,
        latency=found.latency,
        seconds=seconds,
        gigabytes_per_second=multiplier.nbytes / seconds.median / 1e9,
        gigaoperations_per_second=operations / seconds.median / 1e9,
        bound=bound,
        share_of_limit=ratio(least[bound], calm_limits[bound], found.rounds, found.quiet),
        quiet_rounds=sum(found.quiet),
        error=error,
        speedup=None if found is ours else speedup(ours, found),
    )


class _Peers:
    """The other libraries for one shape. Weights that several formats are compared with are made once, and kept until the shape is done."""

    def __init__(self, k_n: tuple[int, int], threads: int, cold: int, skipped: list[str]) -> None:
        self._shape, self._threads, self._cold, self._skipped = (k_n[1], k_n[0]), threads, cold, skipped
        self.kept: dict[object, Multiplier] = {}
        self._made: dict[str, Multiplier | None] = {}

    def of(self, weight: Packed) -> list[Multiplier]:
        bits = weight.fmt.bits_per_weight(self._shape)
        wanted = [self._onnx(name) for name in _onnx_formats(weight.fmt, bits)]
        wanted.append(self._once("torch", lambda: peers_torch.TorchLinear(self._packed("int8_channel"), self._threads, self._cold)))
        return [*self._ggml(weight, bits), *(peer for peer in wanted if peer)]

    def close(self) -> None:
        for multiplier in self.kept.values():
            multiplier.close()

    def _ggml(self, weight: Packed, bits: float) -> list[Multiplier]:
        name = weight.fmt.name if weight.fmt.name in peers_ggml.SPELLED else _nearest_ggml(bits)
        own = weight if name == weight.fmt.name else self._packed(name) if formats.get(name).fits(self._shape) is None else None
        if own is None:
            return []
        try:
            layouts = (False, True) if peers_ggml.repacks(name, self._shape) else (False,)
            return [peers_ggml.GgmlMatmul(own, self._threads, self._cold, repacked) for repacked in layouts]
        except FewbitsError as failure:
            self._skipped.append(f"ggml: {failure.args[0]}")
            return []

    def _onnx(self, name: str) -> Multiplier | None:
        kind = peers_onnx.MatMulInteger if name == "int8_channel" else peers_onnx.MatMulNBits
        return self._once(f"onnxruntime {name}", lambda: kind(self._packed(name), self._threads, self._cold))

    def _packed(self, name: str) -> Packed:
        return packed(formats.get(name), self._shape)

    def _once(self, key: str, make: Callable[[], Multiplier]) -> Multiplier | None:
        if key not in self._made:
            self._made[key] = self._tried(key, make)
        return self._made[key]

    def _tried(self, key: str, make: Callable[[], Multiplier]) -> Multiplier | None:
        try:
            made = make()
        except Exception as failure:  # whatever another library raises is no reason to end
            self._skipped.append(f"{key}: {str(failure).splitlines()[0]}")
            return None
        self.kept[made] = made
        return made


def _onnx_formats(fmt: Format, bits: float) -> list[str]:
    """onnxruntime's own formats of about as many bits; W8A8 beside 8 bits per row."""
    group = 128 if fmt.run and fmt.run >= 128 and not fmt.name.startswith("q") else 32
    nearest = f"int{2 if bits < 3 else 4 if bits < 6 else 8}_g{group}"
    return [nearest, "int8_channel"] if bits >= 8 and fmt.run is None else [nearest]


def _nearest_ggml(bits: float) -> str:
    """For a format that ggml does not have: the one of 32 columns of at least as many bits, rounded down to a whole."""
    return next((name for most, name in ((4.9, "q4_0"), (5.9, "q5_0")) if bits < most), "q8_0")


def _fits(fmt: Format, k_n: tuple[int, int], skipped: list[str]) -> bool:
    reason = fmt.fits((k_n[1], k_n[0]))
    if reason:
        skipped.append(f"{fmt.name} at {k_n[0]}x{k_n[1]}: {reason}")
    return reason is None
