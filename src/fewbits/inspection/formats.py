"""`fewbits compare`: the reconstruction error of weights by granularity and by format, and the decode speed of each format."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fewbits import formats as known
from fewbits import kernels
from fewbits.errors import InputError
from fewbits.model import Model
from fewbits.model import open as open_model
from fewbits.progress import silent

if TYPE_CHECKING:
    from torch import Tensor

    from fewbits.formats import Format, How, Parts
    from fewbits.model.weights import Weight
    from fewbits.progress import Progress

USUAL = ("q3_s6", "q3_k", "q4_0", "q4_k", "iq4_xs", "int4_g32", "int4_g128", "mxfp4", "q5_k", "q6_k", "int8_channel", "q8_0")
_DECODE_SHAPE = (256, 4096)  # 4 MB of float32: in cache, so that the kernel is measured and not the memory it writes
_DECODE_SECONDS = 0.3


@dataclass(frozen=True)
class Granularity:
    """One weight, rounded to `bits` with one scale per tensor, per row and per 64: relative RMS error of each."""

    weight: str
    shape: tuple[int, int]
    per_tensor: float
    per_channel: float
    per_group: float | None  # None: the columns do not divide by 64

    @property
    def channel_ratio(self) -> float:
        return self.per_tensor / self.per_channel

    @property
    def group_ratio(self) -> float | None:
        return self.per_tensor / self.per_group if self.per_group else None


@dataclass(frozen=True)
class FormatRow:
    format: str
    bits_per_weight: float
    error_max: float | None  # relative RMS error over all weights that fit, scales by the textbook rule
    error: float | None  # and by search
    left_out: int  # weights whose shape does not fit
    kernel: str
    gigaweights_per_second: float


@dataclass(frozen=True)
class Comparison:
    bits: int
    weights: tuple[Granularity, ...]
    formats: tuple[FormatRow, ...]

    def __str__(self) -> str:
        channel = [each.channel_ratio for each in self.weights]
        ratio = f"{math.fsum(channel) / len(channel):.3g} of its error per channel" if channel else "no weight"
        errors = sorted((row.error, row.format) for row in self.formats if row.error is not None)
        least = ", ".join(f"{name} {error:.3g}" for error, name in errors[:5]) or "none"
        first = f"{len(self.weights)} weights in {len(self.formats)} formats"
        return f"{first}\n{self.bits} bits with one scale for a tensor, and {ratio} on average\nleast relative error: {least}"

    def to_dict(self) -> dict[str, object]:
        rows = [asdict(g) | {"channel_ratio": g.channel_ratio, "group_ratio": g.group_ratio} for g in self.weights]
        return {"bits": self.bits, "weights": rows, "formats": [asdict(row) for row in self.formats]}


def compare(
    model: str | Path | Model,
    weight: str | None = None,
    formats: str | Sequence[str] | None = None,
    bits: int = 4,
    offline: bool = False,
    progress: Progress[Weight] = silent,
) -> Comparison:
    """Errors are relative to the weights' own RMS, so that layers compare. `formats`: the usual dozen, or names, or ["all"]."""
    model = model if isinstance(model, Model) else open_model(model, offline)
    try:
        chosen = [w for w in model.weights if weight is None or re.search(weight, w.name)]
    except re.error as failure:
        raise InputError(f"`{weight}` is not a regular expression: {failure}", "for example `--weight 'layers.0'`") from failure
    if not chosen:
        raise InputError(f"`{weight}` matches no weight", f"names look like `{model.weights[len(model.weights) // 2].name}`")
    if bits not in range(2, 9):
        raise InputError(f"`--bits {bits}` is not between 2 and 8", "4 and 8 are the usual ones")
    names = known.names_of(formats or USUAL)
    fmts = list(known.all().values()) if names == ("all",) else [known.get(name) for name in names]

    granularities = []
    squares: dict[tuple[str, How], list[tuple[float, float]]] = {}
    for each in progress(chosen, len(chosen), "comparing"):
        w = model.load(each)
        granularities.append(_granularity(each, w, bits))
        for fmt in fmts:
            if fmt.fits(each.shape) is None:
                for how in ("max", "search"):
                    squares.setdefault((fmt.name, how), []).append(_squared_error(w, fmt, how))
    rows = [_format_row(fmt, squares, len(chosen)) for fmt in fmts]
    return Comparison(bits, tuple(granularities), tuple(rows))


def _granularity(weight: Weight, w: Tensor, bits: int) -> Granularity:
    def error(x: Tensor) -> float:
        from fewbits.formats.search import fit_scale
        from fewbits.formats.storage.codes import decode, encode

        top = float(2 ** (bits - 1) - 1)
        levels = tuple(float(q) for q in range(-int(top) - 1, int(top) + 1))
        scale = fit_scale(x, levels, (top,), how="max", store=lambda s: s).unsqueeze(-1)
        return float((decode(encode(x, levels, scale), levels, scale) - x).norm() / (x.norm() or 1))

    per_group = error(w.reshape(-1, 64)) if w.shape[1] % 64 == 0 else None
    return Granularity(weight.name, weight.shape, error(w.reshape(1, -1)), error(w), per_group)


def _squared_error(w: Tensor, fmt: Format, how: How) -> tuple[float, float]:
    from fewbits.methods import rtn

    shape = (w.shape[0], w.shape[1])
    decoded = kernels.decode(fmt, rtn.quantize(w, fmt, how=how), shape)
    return float((decoded - w).double().square().sum()), float(w.double().square().sum())


def _format_row(fmt: Format, squares: dict[tuple[str, How], list[tuple[float, float]]], weights: int) -> FormatRow:
    def relative(how: How) -> float | None:
        pairs = squares.get((fmt.name, how), [])
        total = sum(square for _, square in pairs)
        return (sum(error for error, _ in pairs) / total) ** 0.5 if total else None

    kernel = kernels.bind(fmt, _DECODE_SHAPE)
    left_out = weights - len(squares.get((fmt.name, "max"), []))
    speed = decode_speed(fmt, kernel)
    return FormatRow(fmt.name, fmt.bits_per_weight(_DECODE_SHAPE), relative("max"), relative("search"), left_out, kernel.backend, speed)


def decode_speed(fmt: Format, kernel: kernels.Kernel) -> float:
    """Billions of weights per second to float32, the fastest of repeated runs on a 256 x 4096 matrix."""
    parts = _any_parts(fmt, _DECODE_SHAPE)
    kernel.decode(parts, _DECODE_SHAPE)
    best, started = float("inf"), time.perf_counter()
    while time.perf_counter() - started < _DECODE_SECONDS:
        begin = time.perf_counter()
        kernel.decode(parts, _DECODE_SHAPE)
        best = min(best, time.perf_counter() - begin)
    return _DECODE_SHAPE[0] * _DECODE_SHAPE[1] / best / 1e9


def _any_parts(fmt: Format, shape: tuple[int, int]) -> Parts:
    """Packed weights of this shape: a few rows quantized, then repeated (speed does not depend on the values)."""
    import torch

    from fewbits.methods import rtn

    few = torch.randn((16, shape[1]), generator=torch.Generator().manual_seed(0)) * 0.02
    parts = rtn.quantize(few, fmt, how="max")
    specs = fmt.parts(shape)
    return {
        name: part.repeat(spec.shape[0] // len(part), 1) if len(part) > 1 else part
        for (name, part), spec in zip(parts.items(), specs.values(), strict=True)
    }
