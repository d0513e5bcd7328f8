"""How far a quantized model is from the float one: KL divergence, perplexity, agreement, with intervals and a verdict.

Streaming: logits of a few positions at a time, from the reference and from every session under test; what stays is a few
numbers per position.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fewbits.errors import InputError
from fewbits.scratch import scratch_folder

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from fewbits.judged import Judged
    from fewbits.progress import Progress
    from fewbits.runtimes import Session
    from fewbits.texts import Window

    Floats = NDArray[np.float64]

_POSITIONS = 128  # logits in double precision for so many positions at a time: 50 MB at a vocabulary of 50,000
_BLOCK = 64  # neighbouring positions share their context and so their error: they are resampled together
_RESAMPLES = 2000


@dataclass
class Measured:
    """Numbers per position of one session, against the reference."""

    kl: list[float] = field(default_factory=list)
    nll: list[float] = field(default_factory=list)
    nll_base: list[float] = field(default_factory=list)
    agrees: list[bool] = field(default_factory=list)
    max_logit_diff: float = 0.0

    def add(self, reference: Tensor, logits: Tensor, following: Tensor) -> None:
        """One window: logits (n, vocabulary) of both at every position that has a following token."""
        for base, test, token in zip(*(t.split(_POSITIONS) for t in (reference, logits, following)), strict=True):
            p, q = base.double().log_softmax(-1), test.double().log_softmax(-1)
            self.kl += (p.exp() * (p - q)).sum(-1).tolist()
            self.nll += (-q.gather(-1, token[:, None])[:, 0]).tolist()
            self.nll_base += (-p.gather(-1, token[:, None])[:, 0]).tolist()
            self.agrees += ((base.argmax(-1) == test.argmax(-1)) & test.isfinite().all(-1)).tolist()
            difference = float((base - test).abs().max())
            self.max_logit_diff = max(self.max_logit_diff, difference) if math.isfinite(difference) else math.inf

    def extend(self, other: Measured) -> None:
        for series in ("kl", "nll", "nll_base", "agrees"):
            getattr(self, series).extend(getattr(other, series))
        self.max_logit_diff = max(self.max_logit_diff, other.max_logit_diff)


@dataclass(frozen=True)
class Thresholds:
    max_kl: float | None = None
    min_agreement: float | None = None
    max_ppl_ratio: float | None = None
    min_cosine: float | None = None  # of models that give embeddings, see embeddings.py

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and not (0 <= value < math.inf and (not name.startswith("min_") or value <= 1)):
                option = f"--{name.replace('_', '-')}"
                raise InputError(f"`{option} {value}` is no threshold", "agreement and cosine go up to 1, KL and ratio are at least 0")


@dataclass(frozen=True)
class Verdict:
    """A file beside the float model on one text: what was measured, and whether that is within the thresholds."""

    tokens: int
    kl_mean: float
    kl_ci95: tuple[float, float]
    kl_p99: float
    kl_max: float
    kl_floor: float | None  # the float file in the same runtime: what the runtime's own arithmetic costs
    ppl: float
    ppl_base: float
    ppl_ratio: float
    ppl_ratio_ci95: tuple[float, float]
    top1_agreement: float
    max_logit_diff: float
    bytes: int
    bits_per_weight: float
    runtime: str
    runtime_version: str
    thresholds: Thresholds
    failures: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return not self.failures

    def to_dict(self) -> dict[str, object]:
        return asdict(self) | {"passed": self.passed}


def measure(
    reference: Session,
    sessions: Mapping[str, Session],
    windows: Sequence[Window],
    progress: Progress[Any],
    known: Judged | None = None,
    memory: int = 1 << 30,
) -> dict[str, Measured]:
    """Every session on the same windows; the reference is computed once for all of them. `known`: windows that were run before.
    `memory`: bytes that hidden states of windows that are run together may take; more go to disk."""
    from fewbits.spilled import Room

    for session in sessions.values():
        if session.vocabulary != reference.vocabulary:
            found = f"the file has a vocabulary of {session.vocabulary}, the model one of {reference.vocabulary}"
            raise InputError(found, "is it the file of another model?")
    before = [known.find(window) if known else None for window in windows]
    missing = [window for window, found in zip(windows, before, strict=True) if found is None]
    measured = {name: Measured() for name in sessions}
    with known.scratch() if known else scratch_folder() as scratch:
        room = Room(Path(scratch), memory)
        bases = reference.each(windows, room, progress)  # of windows that are known, none is ever asked for
        running = {name: session.each(missing, room, progress) for name, session in sessions.items()}
        for window, here, base in progress(zip(windows, before, bases, strict=True), len(windows), "verifying"):
            if here is None:
                here = _compared(window, base, {name: next(each) for name, each in running.items()})
                if known:
                    known.keep(window, here)
            for name, each in here.items():
                measured[name].extend(each)
    return measured


def _compared(window: Window, base: Iterator[Tensor], tests: Mapping[str, Iterator[Tensor]]) -> dict[str, Measured]:
    """One window, a few positions at a time: logits of all its tokens are never held."""
    import torch

    found = {name: Measured() for name in tests}
    following = torch.tensor(window[1:])
    for reference, *others in zip(base, *tests.values(), strict=True):
        here = following[: len(reference)]  # of the last position none is known
        following = following[len(here) :]
        for each, logits in zip(found.values(), others, strict=True):
            if len(here):
                each.add(reference[: len(here)], logits[: len(here)], here)
    return found


def judge(
    measured: Measured,
    thresholds: Thresholds,
    *,
    nbytes: int,
    bits_per_weight: float,
    runtime: str,
    runtime_version: str,
    kl_floor: float | None = None,
) -> Verdict:
    kl, nll, base = (np.array(values) for values in (measured.kl, measured.nll, measured.nll_base))
    ratio, agreement = float(np.exp(nll.mean() - base.mean())), float(np.mean(measured.agrees))
    low, high = bootstrap_ci95(nll - base)
    failures = []
    if not (np.isfinite(kl).all() and np.isfinite(nll).all() and math.isfinite(measured.max_logit_diff)):
        failures.append("the logits are not all finite")
    elif not np.isfinite(base).all() or not math.isfinite(0.0 if kl_floor is None else kl_floor):
        failures.append("the float model's logits are not all finite")
    elif not np.isfinite(np.exp([nll.mean() - base.mean(), nll.mean(), base.mean(), low, high])).all():
        failures.append("the perplexity is beyond all numbers")
    if thresholds.max_kl is not None and not kl.mean() <= thresholds.max_kl:
        failures.append(f"KL {kl.mean():.5f} is above {thresholds.max_kl:g}")
    if thresholds.min_agreement is not None and not agreement >= thresholds.min_agreement:
        failures.append(f"top-1 agreement {agreement:.4f} is below {thresholds.min_agreement:g}")
    if thresholds.max_ppl_ratio is not None and not ratio <= thresholds.max_ppl_ratio:
        failures.append(f"perplexity ratio {ratio:.4f} is above {thresholds.max_ppl_ratio:g}")
    return Verdict(
        tokens=len(kl),
        kl_mean=float(kl.mean()),
        kl_ci95=bootstrap_ci95(kl),
        kl_p99=float(np.quantile(kl, 0.99)),
        kl_max=float(kl.max()),
        kl_floor=kl_floor,
        ppl=float(np.exp(nll.mean())),
        ppl_base=float(np.exp(base.mean())),
        ppl_ratio=ratio,
        ppl_ratio_ci95=(float(np.exp(low)), float(np.exp(high))),
        top1_agreement=agreement,
        max_logit_diff=measured.max_logit_diff,
        bytes=nbytes,
        bits_per_weight=bits_per_weight,
        runtime=runtime,
        runtime_version=runtime_version,
        thresholds=thresholds,
        failures=tuple(failures),
    )


def bootstrap_ci95(values: Floats, block: int = _BLOCK, seed: int = 0) -> tuple[float, float]:
    """95 % interval of the mean, resampling blocks of neighbours (a remainder joins as a shorter block)."""
    sums, sizes = _resampled([values, np.ones(len(values))], block, seed)
    return _middle95(sums / sizes)


def bootstrap_ratio_ci95(values: Floats, others: Floats, block: int = _BLOCK, seed: int = 0) -> tuple[float, float]:
    """95 % interval of mean(values) / mean(others), measured at the same positions: both are resampled together."""
    top, bottom = _resampled([values, others], block, seed)
    return _middle95(top / bottom)


def _resampled(series: Sequence[Floats], block: int, seed: int) -> list[Floats]:
    """Sums over blocks drawn with replacement, the same draws for every series."""
    count = len(series[0])
    block = min(block, max(1, count // 16))  # few values: smaller blocks, as one block alone would have no spread
    edges = np.arange(0, count, block)
    picks = np.random.default_rng(seed).integers(0, len(edges), (_RESAMPLES, len(edges)))
    return [np.add.reduceat(values, edges)[picks].sum(1) for values in series]


def _middle95(means: Floats) -> tuple[float, float]:
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)
