"""What a quantized KV cache costs, by format and context length."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from fewbits import model as models
from fewbits.calibration import Paths, split
from fewbits.calibration.text.windows import Window
from fewbits.errors import InputError
from fewbits.formats.runtime import kv
from fewbits.model import Model
from fewbits.progress import Progress, silent
from fewbits.verification import metrics
from fewbits.verification.runtimes import torch as torch_runtime


@dataclass(frozen=True)
class CacheCost:
    """One format at one context length: means over all positions up to it."""

    format: str
    length: int
    tokens: int
    kl: float
    kl_ci95: tuple[float, float]
    ppl_ratio: float
    ppl_ratio_ci95: tuple[float, float]
    bits_per_value: float  # of a cache of `length` tokens, including tokens that stay in float


def cache_costs(
    model: Model, formats: Sequence[str], lengths: Sequence[int], windows: Sequence[Window], progress: Progress[Window]
) -> list[CacheCost]:
    """Each cache against the float one. One run serves all lengths: windows have the longest length, and a shorter context is the
    beginning of a window, because no token sees a later one."""
    longest = max(lengths)
    if min(lengths) < 2 or any(len(window) < longest for window in windows) or not windows:
        raise InputError(f"no windows of {longest} tokens to measure a KV cache with", "give more text, or shorter lengths")
    module = model.module()
    sessions = {name: torch_runtime.of_module(module, kv=name) for name in formats}
    cut = [window[:longest] for window in windows]
    measured = metrics.compare_logits(torch_runtime.of_module(module), sessions, cut, progress)
    rows = []
    for name in formats:
        kl, nll, base = (
            np.array(values).reshape(len(cut), longest - 1) for values in (measured[name].kl, measured[name].nll, measured[name].nll_base)
        )
        for length in lengths:
            shown = (slice(None), slice(0, length - 1))
            divergence, ratio = kl[shown].flatten(), (nll - base)[shown].flatten()
            low, high = metrics.bootstrap_ci95(ratio)
            rows.append(
                CacheCost(
                    name, length, divergence.size, float(divergence.mean()), metrics.bootstrap_ci95(divergence),
                    math.exp(ratio.mean()), (math.exp(low), math.exp(high)), kv.bits_per_value(model.config, kv.get(name), length),
                )
            )  # fmt: skip
    return rows


@dataclass(frozen=True)
class KvComparison:
    model: str
    rows: tuple[CacheCost, ...]

    def to_dict(self) -> dict[str, object]:
        return {"model": self.model, "rows": [asdict(row) for row in self.rows]}


def compare_kv(
    model: str | Path,
    formats: Sequence[str] | None = None,
    lengths: Sequence[int] = (128, 512),
    data: Paths = (),
    tokens: int = 4096,
    offline: bool = False,
    progress: Progress[Window] = silent,
) -> KvComparison:
    source = models.open(model, offline)
    if why_not := kv.unsupported(source.config):
        raise InputError(f"`{source.name}`: {why_not}", "compare another model")
    windows = split.held_out_windows(source, data, max(lengths), tokens)
    return KvComparison(source.name, tuple(cache_costs(source, list(formats or kv.all()), lengths, windows, progress)))
