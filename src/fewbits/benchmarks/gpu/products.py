"""Products timed on this machine's GPU: our Triton kernels beside torch, and beside torchao and gemlite where they are installed, against
the roofline.

Every contender has as many copies of its weight as do not fit the second-level cache, and takes the next one at each call, so that each
call reads its weight from memory. Contenders take turns; a round is the mean of some calls between two events on the stream, and the
median round counts. A contender that fails or whose result is wrong is not timed, and listed with the reason.
"""

from __future__ import annotations

import importlib
import importlib.util
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fewbits import formats, kernels
from fewbits.errors import FewbitsError
from fewbits.formats import Format, Shape
from fewbits.kernels.triton.tooling import gpus, roofline
from fewbits.kernels.triton.tooling.gpus import GPU

ROUNDS, CALLS = 15, 20
_COLD = 256 << 20  # bytes of weights in all: five times the largest second-level cache
_WRONG = 0.02  # relative error of a product from which it is no product of this weight: bfloat16 rounds to 0.004

Clock = Callable[[Callable[[int], object], int], float]  # (call, number of calls) -> seconds of one


@dataclass(frozen=True)
class Measured:
    name: str
    microseconds: float | None
    gigabytes_per_second: float | None  # of the contender's own weight
    share_of_roofline: float | None  # of what the model expects of this GPU; None: it is not in the catalogue
    problem: str | None = None


def measure(
    fmt: Format,
    shape: Shape,
    tokens: int,
    device: str = "cuda",
    dtype: torch.dtype = torch.float16,
    rounds: int = ROUNDS,
    clock: Clock | None = None,
) -> list[Measured]:
    source = torch.Generator().manual_seed(0)
    w = 0.02 * torch.randn(shape, generator=source)
    x = torch.randn((tokens, shape[1]), generator=source).to(device, dtype)
    prepared = [_prepared(name, make, fmt, w, x) for name, make in _contenders(fmt).items()]
    ready = [(name, run, size) for name, run, size, problem in prepared if run is not None and problem is None]
    timed: dict[str, list[float]] = {name: [] for name, _, _ in ready}
    for _ in range(rounds):
        for name, run, _ in ready:
            timed[name].append((clock or _on_stream)(run, CALLS))
    gpu = _catalogued(device)
    expected = roofline.expected(gpu, fmt.name, shape, tokens).microseconds if gpu else None
    rows = []
    for name, _, size, problem in prepared:
        if problem is not None:
            rows.append(Measured(name, None, None, None, problem))
            continue
        seconds = statistics.median(timed[name])
        share = None if expected is None else expected / (seconds * 1e6)
        rows.append(Measured(name, seconds * 1e6, size / seconds / 1e9, share))
    return rows


_Run = Callable[[int], Tensor]
_Make = Callable[
    [Format, Tensor, Tensor], tuple[_Run, int, Tensor]
]  # -> product number i, bytes of one weight, the weight that it multiplies by


def _contenders(fmt: Format) -> dict[str, _Make]:
    contenders: dict[str, _Make] = {"fewbits triton": _ours, "torch": _torch}
    integers = fmt.name.startswith(("int4", "int8"))  # the nearest formats of the others; each product is checked with its own weight
    if integers and importlib.util.find_spec("torchao"):
        contenders["torchao"] = _torchao
    if integers and fmt.group and importlib.util.find_spec("gemlite"):
        contenders["gemlite"] = _gemlite
    return contenders


def _prepared(name: str, make: _Make, fmt: Format, w: Tensor, x: Tensor) -> tuple[str, _Run | None, int, str | None]:
    try:
        run, size, seen = make(fmt, w, x)
        exact = x.double() @ seen.to(x.device).double().T
        error = float((run(0).double() - exact).norm() / exact.norm())
    except (FewbitsError, RuntimeError, ValueError, TypeError, AttributeError, ImportError, NotImplementedError, AssertionError) as problem:
        return name, None, 0, f"{type(problem).__name__}: {problem}"
    return name, run, size, None if error < _WRONG else f"its product is off by {error:.0%}"


def _copies(size: int) -> int:
    return max(1, -(-_COLD // size)) if torch.cuda.is_available() else 1


def _ours(fmt: Format, w: Tensor, x: Tensor) -> tuple[_Run, int, Tensor]:
    from fewbits.kernels.triton import linear, repack
    from fewbits.methods import rtn

    parts = rtn.quantize(w, fmt, how="max")
    first = repack.repack(fmt, parts).to(x.device)
    size = first.layout.nbytes(first.shape)
    every = [first, *(repack.repack(fmt, parts).to(x.device) for _ in range(_copies(size) - 1))]
    return lambda number: linear.matmul(x, every[number % len(every)]), size, kernels.decode(fmt, parts, first.shape)


def _torch(_: Format, w: Tensor, x: Tensor) -> tuple[_Run, int, Tensor]:
    size = w.numel() * x.element_size()
    every = [w.to(x.device, x.dtype) for _ in range(_copies(size))]
    return lambda number: torch.nn.functional.linear(x, every[number % len(every)]), size, w


def _torchao(fmt: Format, w: Tensor, x: Tensor) -> tuple[_Run, int, Tensor]:
    torchao = importlib.import_module("torchao.quantization")
    four = fmt.levels is not None and len(fmt.levels) == 16
    config = torchao.Int4WeightOnlyConfig(group_size=fmt.group or 128) if four else torchao.Int8WeightOnlyConfig()
    size = formats.get(f"int4_g{fmt.group or 128}" if four else "int8_channel").nbytes((w.shape[0], w.shape[1]))
    every = []
    for _ in range(_copies(size)):
        layer = torch.nn.Linear(w.shape[1], w.shape[0], bias=False, device=x.device, dtype=torch.bfloat16)
        layer.weight.data.copy_(w)
        torchao.quantize_(layer, config)
        every.append(layer)
    half = x.bfloat16()  # its int4 kernel takes nothing else
    eye = torch.eye(w.shape[1], dtype=torch.bfloat16, device=x.device)
    return lambda number: every[number % len(every)](half), size, every[0](eye).T


def _gemlite(fmt: Format, w: Tensor, x: Tensor) -> tuple[_Run, int, Tensor]:
    from fewbits.methods import rtn

    gemlite = importlib.import_module("gemlite")

    parts = rtn.quantize(w, fmt, how="max")
    codes, grid = fmt.unpack(parts)
    assert fmt.levels and fmt.group
    zeros = grid["zeros"].to(x.dtype) if "zeros" in grid else torch.full_like(grid["scales"], -fmt.levels[0]).to(x.dtype)
    kind = gemlite.DType.BF16 if x.dtype == torch.bfloat16 else gemlite.DType.FP16
    size = fmt.nbytes((w.shape[0], w.shape[1]))
    every = []
    for _ in range(_copies(size)):
        layer = gemlite.GemLiteLinear(
            (len(fmt.levels) - 1).bit_length(), group_size=fmt.group, in_features=w.shape[1], out_features=w.shape[0],
            input_dtype=kind, output_dtype=kind,
        )  # fmt: skip
        layer.pack(codes.to(x.device), grid["scales"].to(x.device, x.dtype), zeros.to(x.device), None)
        every.append(layer)
    return lambda number: every[number % len(every)](x), size, kernels.decode(fmt, parts, (w.shape[0], w.shape[1]))


def _on_stream(run: Callable[[int], object], calls: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for number in range(calls):
        run(number)
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / calls / 1e3


def wall_clock(run: Callable[[int], object], calls: int) -> float:
    """For what runs on the CPU."""
    start = time.perf_counter()
    for number in range(calls):
        run(number)
    return (time.perf_counter() - start) / calls


def _catalogued(device: str) -> GPU | None:
    return gpus.named(torch.cuda.get_device_name(device)) if torch.cuda.is_available() else None


def table(rows: Sequence[Measured]) -> list[str]:
    lines = ["| | us | GB/s | of the roofline | |", "|---|---:|---:|---:|---|"]
    for row in rows:
        share = "" if row.share_of_roofline is None else f"{row.share_of_roofline:.0%}"
        numbers = ("", "") if row.microseconds is None else (f"{row.microseconds:.1f}", f"{row.gigabytes_per_second:.0f}")
        lines.append(f"| {row.name} | {numbers[0]} | {numbers[1]} | {share} | {row.problem or ''} |")
    return lines
