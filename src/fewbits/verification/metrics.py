"""How far a quantized language model is from the float one: KL divergence, perplexity, agreement, with intervals and a verdict.

Logits of a few positions at a time, of the reference and of every session under test, are reduced to a few numbers per position.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from fewbits.errors import InputError
from fewbits.planning.accuracy import Thresholds
from fewbits.store.scratch import scratch_folder

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from fewbits.calibration.text.windows import Window
    from fewbits.progress import Progress
    from fewbits.verification.resume import CachedWindows
    from fewbits.verification.session import Session

    Floats = NDArray[np.float64]

_POSITIONS = 128  # that are compared in double precision at a time: 50 MB at a vocabulary of 50,000
_BLOCK = 64  # neighbouring positions that are resampled together: they share their context, and so their error
_RESAMPLES = 2000


@dataclass
class MeasuredLogits:
    """One session against the reference, a number per position in each list."""

    kl: list[float] = field(default_factory=list)
    nll: list[float] = field(default_factory=list)
    nll_base: list[float] = field(default_factory=list)
    agrees: list[bool] = field(default_factory=list)
    max_logit_diff: float = 0.0

    def add(self, reference: Tensor, logits: Tensor, following: Tensor) -> None:
        """Logits of both, (n, vocabulary), at positions of one window, and the tokens that follow them."""
        for base, test, token in zip(*(t.split(_POSITIONS) for t in (reference, logits, following)), strict=True):
            p, q = base.double().log_softmax(-1), test.double().log_softmax(-1)
            self.kl += (p.exp() * (p - q)).sum(-1).tolist()
            self.nll += (-q.gather(-1, token[:, None])[:, 0]).tolist()
            self.nll_base += (-p.gather(-1, token[:, None])[:, 0]).tolist()
            self.agrees += ((base.argmax(-1) == test.argmax(-1)) & test.isfinite().all(-1)).tolist()
            difference = float((base - test).abs().max())
            self.max_logit_diff = max(self.max_logit_diff, difference) if math.isfinite(difference) else math.inf

    def extend(self, other: MeasuredLogits) -> None:
        for series in ("kl", "nll", "nll_base", "agrees"):
            getattr(self, series).extend(getattr(other, series))
        self.max_logit_diff = max(self.max_logit_diff, other.max_logit_diff)


@dataclass(frozen=True)
class DomainFigures:
    """What was measured on the text of one kind."""

    name: str
    tokens: int
    kl_mean: float
    kl_ci95: tuple[float, float]
    kl_floor: float | None
    ppl: float
    ppl_base: float
    ppl_ratio: float
    ppl_ratio_ci95: tuple[float, float]
    top1_agreement: float


class Judged:
    """What every verdict is: a frozen dataclass that names the reasons why it failed."""

    failures: tuple[str, ...]
    thresholds: Thresholds

    @property
    def passed(self) -> bool:
        return not self.failures

    @property
    def outcome(self) -> str:
        """In words."""
        if self.failures:
            return f"failed: {'; '.join(self.failures)}"
        return "passed" if any(value is not None for value in vars(self.thresholds).values()) else "no threshold was given"

    def to_dict(self) -> dict[str, object]:
        return asdict(cast("Any", self)) | {"passed": self.passed}


@dataclass(frozen=True)
class Verdict(Judged):
    """A file beside the float model on one text: what was measured, and whether that is within the thresholds."""

    tokens: int
    kl_mean: float
    kl_ci95: tuple[float, float]
    kl_p99: float
    kl_max: float
    kl_floor: float | None  # of the float file in the same runtime: the error of the runtime itself
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
    reference: str | None = field(default=None, kw_only=True)  # what it was compared with, if that is no float model
    domains: tuple[DomainFigures, ...] = field(default=(), kw_only=True)  # where the text is of several kinds
    worst_domain: str | None = field(default=None, kw_only=True)  # the one with the largest mean KL

    def __str__(self) -> str:
        low, high = self.kl_ci95
        return (
            f"KL {self.kl_mean:.4g} ({low:.4g} to {high:.4g}) to the {self.reference or 'float model'}, "
            f"on {self.tokens} tokens in {self.runtime}\n"
            f"{self.top1_agreement:.1%} of the top tokens are the same; perplexity {self.ppl:.4g}, times {self.ppl_ratio:.4g}\n"
            f"{self.outcome}"
        )

    @property
    def perhaps_worse(self) -> list[str]:
        """Kinds of text that may be worse than the worst one measured: their intervals overlap."""
        low = next((each.kl_ci95[0] for each in self.domains if each.name == self.worst_domain), 0.0)
        return [each.name for each in self.domains if each.name != self.worst_domain and each.kl_ci95[1] > low]


def check_vocabularies(reference: Session, sessions: Mapping[str, Session]) -> None:
    for session in sessions.values():
        if session.vocabulary != reference.vocabulary:
            message = f"the file has a vocabulary of {session.vocabulary}, the model one of {reference.vocabulary}"
            raise InputError(message, "is it the file of another model?")


def compare_logits(
    reference: Session,
    sessions: Mapping[str, Session],
    windows: Sequence[Window],
    progress: Progress[Any],
    judged: CachedWindows | None = None,
    memory: int = 1 << 30,
) -> dict[str, MeasuredLogits]:
    """Runs every session on the same windows, and the reference once for all of them. Windows that `judged` holds are not run again.
    `memory`: bytes for the hidden states of windows that are run together; what exceeds them goes to disk."""
    from fewbits.store.mapped import Room

    check_vocabularies(reference, sessions)
    before = [judged.find(window) if judged else None for window in windows]
    missing = [window for window, result in zip(windows, before, strict=True) if result is None]
    measured = {name: MeasuredLogits() for name in sessions}
    with judged.scratch() if judged else scratch_folder() as scratch:
        room = Room(Path(scratch), memory)
        bases = reference.each(windows, room, progress)  # lazy: logits of windows that were judged are never asked for
        running = {name: session.each(missing, room, progress) for name, session in sessions.items()}
        for window, here, base in progress(zip(windows, before, bases, strict=True), len(windows), "verifying"):
            if here is None:
                here = _compared(window, base, {name: next(each) for name, each in running.items()})
                if judged:
                    judged.keep(window, here)
            for name, each in here.items():
                measured[name].extend(each)
    return measured


def _compared(window: Window, base: Iterator[Tensor], tests: Mapping[str, Iterator[Tensor]]) -> dict[str, MeasuredLogits]:
    """One window, a few positions at a time: the logits of all its tokens are never in memory together."""
    import torch

    measured = {name: MeasuredLogits() for name in tests}
    following = torch.tensor(window[1:])
    for reference, *others in zip(base, *tests.values(), strict=True):
        here = following[: len(reference)]  # the last position has no following token
        following = following[len(here) :]
        for each, logits in zip(measured.values(), others, strict=True):
            if len(here):
                each.add(reference[: len(here)], logits[: len(here)], here)
    return measured


def by_domain(measured: MeasuredLogits, windows: Sequence[Window], domains: Sequence[str]) -> dict[str, MeasuredLogits]:
    """The numbers of every kind of text; `domains` has the kind of each window. Largest logit differences are not known by kind."""
    parts: dict[str, MeasuredLogits] = {}
    start = 0
    for window, name in zip(windows, domains, strict=True):
        part, here = parts.setdefault(name, MeasuredLogits()), slice(start, start + len(window) - 1)
        part.extend(MeasuredLogits(measured.kl[here], measured.nll[here], measured.nll_base[here], measured.agrees[here]))
        start = here.stop
    assert start == len(measured.kl), "every position belongs to a window"
    return parts


def figures_by_domain(measured: Mapping[str, MeasuredLogits], windows: Sequence[Window], domains: Sequence[str]) -> list[DomainFigures]:
    """Of the file, with the floor beside it where that was measured; none where all text is of one kind."""
    if len(set(domains)) < 2:
        return []
    files, floors = (by_domain(measured[name], windows, domains) if name in measured else {} for name in ("file", "floor"))
    return [_figures(name, part, floors.get(name)) for name, part in files.items()]


def _figures(name: str, measured: MeasuredLogits, floor: MeasuredLogits | None) -> DomainFigures:
    kl, nll, base = (np.array(values) for values in (measured.kl, measured.nll, measured.nll_base))
    low, high = bootstrap_ci95(nll - base)
    return DomainFigures(
        name=name,
        tokens=len(kl),
        kl_mean=float(kl.mean()),
        kl_ci95=bootstrap_ci95(kl),
        kl_floor=None if floor is None else float(np.mean(floor.kl)),
        ppl=float(np.exp(nll.mean())),
        ppl_base=float(np.exp(base.mean())),
        ppl_ratio=float(np.exp(nll.mean() - base.mean())),
        ppl_ratio_ci95=(float(np.exp(low)), float(np.exp(high))),
        top1_agreement=float(np.mean(measured.agrees)),
    )


def judge(
    measured: MeasuredLogits,
    thresholds: Thresholds,
    *,
    nbytes: int,
    bits_per_weight: float,
    runtime: str,
    runtime_version: str,
    kl_floor: float | None = None,
    domains: Sequence[DomainFigures] = (),
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
        domains=tuple(domains),
        worst_domain=max(domains, key=lambda each: each.kl_mean).name if domains else None,
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
    block = min(block, max(1, count // 16))  # smaller blocks of few values: a single block would have no spread
    edges = np.arange(0, count, block)
    picks = np.random.default_rng(seed).integers(0, len(edges), (_RESAMPLES, len(edges)))
    return [np.add.reduceat(values, edges)[picks].sum(1) for values in series]


def _middle95(means: Floats) -> tuple[float, float]:
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)
