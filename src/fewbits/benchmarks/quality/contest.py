"""Files of several makers in one runtime, against the float model in torch: what both comparisons of quality share.

A run takes an hour on a model of 135 million weights, so files and measurements stay in a folder, a few windows at a time, and a run that
was stopped resumes from them. Differences are judged in pairs, position by position, by a block bootstrap.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import torch

from fewbits import artifact as artifacts
from fewbits import calibration, formats, methods, targets
from fewbits.artifact.maker import Maker
from fewbits.benchmarks.peers import ggml
from fewbits.calibration import split
from fewbits.calibration.folder import ABOUT, Statistics
from fewbits.errors import InputError
from fewbits.methods import Outcome
from fewbits.methods.gptq import Gptq
from fewbits.progress import silent
from fewbits.request import USUAL_STEPS
from fewbits.sensitivity.curve import through
from fewbits.store import executors
from fewbits.store.cache import Cache, code_version, machine
from fewbits.store.files import Staged
from fewbits.targets import export, pricing
from fewbits.verification import files, metrics, runtimes
from fewbits.verification.forecast.large_damage import measure_curve
from fewbits.verification.metrics import MeasuredLogits
from fewbits.verification.runtimes import torch as torch_runtime

if TYPE_CHECKING:
    from fewbits.artifact import Artifact
    from fewbits.calibration.text.samples import Samples
    from fewbits.calibration.text.windows import Window
    from fewbits.model import Model
    from fewbits.model.weights import Weight
    from fewbits.planning import Plan
    from fewbits.progress import Progress
    from fewbits.sensitivity.curve import Curve
    from fewbits.store.executors.crew import Crew
    from fewbits.verification.session import Session

R = TypeVar("R")
PEER, OURS, PLAIN, ROUNDING = "ggml + imatrix", "fewbits", "plain Hessian", "rounding"
OUR_ROUNDING = "fewbits, rounding only"
FLOOR, EIGHT_BITS = "floor", f"q8_0 {ROUNDING}"  # the float file, and one in 8 bits: what llama.cpp's own arithmetic costs
_PART = 8  # windows measured between two writes


@dataclass(frozen=True)
class Texts:
    """What all makers calibrate with, and what their files are judged on."""

    data: calibration.Paths = ()
    held_out: Sequence[str | Path] = ()  # each judged apart; none: the embedded text
    stats: str | Path | None = None  # statistics made before, in the place of `data`
    samples: int = 64
    tokens: int = 40_960  # of each held-out text

    def windows(self, source: Model) -> dict[str, list[list[int]]]:
        by_name = {Path(text).name: split.held_out_windows(source, text, None, self.tokens) for text in self.held_out}
        return by_name or {"embedded": split.held_out_windows(source, (), None, self.tokens)}

    def statistics(self, source: Model, folder: Path, progress: Progress[Any]) -> Statistics:
        if self.stats is not None:
            return Statistics(Path(self.stats))
        if (folder / ABOUT).is_file():
            return Statistics(folder)
        return calibration.collect(source, self.drawn(source), folder, progress=progress)

    @property
    def known(self) -> bool:
        """Whether the text that was calibrated with is here: beside given statistics it need not be."""
        return self.stats is None or bool(self.data)

    def drawn(self, source: Model, samples: int | None = None) -> Samples:
        return calibration.draw(source, self.data, samples or self.samples, None, 0)


@dataclass(frozen=True)
class Ours:
    """How our files are made."""

    method: str = "auto"
    sequential: bool = False  # each block is fitted to what the quantized blocks before it give
    tune: int | None = None  # steps of tuning scales; None: as `fewbits quantize` decides
    remake: bool = False  # files of ours that an earlier run left, with what was measured on them; the peer's stay
    plain: Sequence[str] = ()  # formats that are also made with the plain Hessian
    formats: Sequence[str] = ()  # of our plans; none: all that llama.cpp quantizes to
    executor: str = executors.LOCAL  # who measures and rounds; the bytes are the same

    def crew(self, source: Model) -> AbstractContextManager[Crew | None]:
        return executors.open_crew(executors.parse(self.executor), source, source.path, True)


BY_DEFAULT = Ours()


@dataclass(frozen=True)
class ToPeer:
    """How a file compares with the peer's of the same bytes, on the same tokens."""

    kl_ratio: float
    kl_ratio_ci95: tuple[float, float]
    top1_gain: float  # in shares
    top1_gain_ci95: tuple[float, float]
    ppl_ratio_ci95: tuple[float, float]


@dataclass(frozen=True)
class Found:
    """One file's figures."""

    kl: float
    kl_ci95: tuple[float, float]
    top1: float
    ppl_ratio: float
    to_peer: ToPeer | None  # None: no peer makes a file of this size


def found(file: MeasuredLogits, peer: MeasuredLogits | None) -> Found:
    kl, nll, base = (np.array(values) for values in (file.kl, file.nll, file.nll_base))
    return Found(
        kl=float(kl.mean()),
        kl_ci95=metrics.bootstrap_ci95(kl),
        top1=float(np.mean(file.agrees)),
        ppl_ratio=float(np.exp(nll.mean() - base.mean())),
        to_peer=None if peer is None else compared(file, peer),
    )


def compared(file: MeasuredLogits, peer: MeasuredLogits) -> ToPeer:
    kl, peers = np.array(file.kl), np.array(peer.kl)
    gain = np.array(file.agrees, float) - np.array(peer.agrees, float)
    low, high = metrics.bootstrap_ci95(np.array(file.nll) - np.array(peer.nll))
    return ToPeer(
        kl_ratio=float(kl.mean() / peers.mean()),
        kl_ratio_ci95=metrics.bootstrap_ratio_ci95(kl, peers),
        top1_gain=float(gain.mean()),
        top1_gain_ci95=metrics.bootstrap_ci95(gain),
        ppl_ratio_ci95=(float(np.exp(low)), float(np.exp(high))),
    )


@dataclass(frozen=True)
class OnText(Generic[R]):
    text: str
    tokens: int
    kl_floor: float  # the float file in the same runtime
    kl_q8_0: float  # what 8-bit activations and weights cost there
    rows: tuple[R, ...]


@dataclass(frozen=True)
class Judged(Generic[R]):
    model: str
    runtime: str
    texts: tuple[OnText[R], ...]

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


class Contest:
    """`settings` are written beside the files: a folder made with others is refused."""

    def __init__(
        self,
        source: Model,
        folder: Path,
        texts: Texts,
        settings: Mapping[str, Any],
        progress: Progress[Any],
        ours: Ours = BY_DEFAULT,
        to: str = "gguf",
        crew: Crew | None = None,
    ) -> None:
        self.source, self.folder, self.progress, self.texts, self.ours, self.crew = source, folder, progress, texts, ours, crew
        self.windows = texts.windows(source)
        self.statistics = texts.statistics(source, folder / "statistics", progress)
        self.target = targets.get(to)
        self.judge = runtimes.needed(runtimes.get(self.target.runtime))
        refined = {"method": ours.method, "sequential": ours.sequential, "tune": ours.tune}
        self._check_settings({"model": source.fingerprint, "runs": self.statistics.about["runs"], **refined, **settings})
        self.cache = Cache(folder / "cache", {"code": code_version(), "machine": machine()})
        self.files = {FLOOR: folder / self.target.file_name}
        if not self.files[FLOOR].exists():
            files.float_file(source, self.target, folder, progress)

    def add(self, name: str, plan: Plan, maker: str) -> None:
        """Writes a file by this plan, made by `maker`, unless an earlier run did."""
        path = self.place(name)
        if self.ours.remake and maker in (OURS, OUR_ROUNDING):
            if path.exists():
                remove = shutil.rmtree if path.is_dir() else Path.unlink
                remove(path)
            for measured in (self.folder / "measured").glob(f"*/{name}"):
                shutil.rmtree(measured)
        if path.exists():
            return
        if maker == OURS:
            self._make_ours(plan, path)
        else:
            export.export(self._made(plan, maker, Path(f"{path}.work")), path)

    def place(self, name: str) -> Path:
        """Where the file of this name is or will be; it takes part from now on."""
        path = self.files[name] = self.folder / f"{name.replace(' ', '-', 1)}{Path(self.target.file_name).suffix}"
        return path

    def judged(self, rows_of: Callable[[Mapping[str, MeasuredLogits]], Iterable[R]]) -> Judged[R]:
        """Runs all files on every text. `rows_of` makes the rows of a text from what each file gave per position, by the file's name."""
        reference = torch_runtime.of_module(self.source.module())
        texts = []
        with ExitStack() as opened:
            length = max(len(each[0]) for each in self.windows.values())
            sessions = {key: opened.enter_context(closing(self.judge.open(path, length))) for key, path in self.files.items()}
            for text, windows in self.windows.items():
                measured = _measured(reference, sessions, windows, self.folder / "measured" / text, self._running)
                floor, eight_bits = (float(np.mean(measured[key].kl)) for key in (FLOOR, EIGHT_BITS))
                texts.append(OnText(text, len(measured[FLOOR].kl), floor, eight_bits, tuple(rows_of(measured))))
        return Judged(self.source.path.name, self.judge.name, tuple(texts))

    def _running(self, items: Iterable[Any], total: int, what: str) -> Iterator[Any]:
        return self.progress(items, total, f"{what} in {self.judge.name}")

    def _check_settings(self, settings: dict[str, Any]) -> None:
        path = self.folder / "settings.json"
        if path.is_file() and json.loads(path.read_text()) != settings:
            raise InputError(f"`{self.folder}` holds a benchmark with other settings", "choose another `-o`, or remove it first")
        with Staged(path) as staged:
            staged.write_text(json.dumps(settings, indent=1))

    def _make_ours(self, plan: Plan, path: Path) -> None:
        """As the pipeline does. Plans of different sizes share many weights, which the cache keeps."""
        tune = self._steps(plan)
        samples = self.texts.drawn(self.source) if self.ours.sequential or tune else None
        text = split.Text(samples, next(iter(self.windows.values())))
        Maker(
            source=self.source, text=text, statistics=self.statistics, work=Path(f"{path}.work"), cache=self.cache, progress=self.progress,
            target=self.target, sequential=self.ours.sequential, tune=tune, crew=self.crew,
        ).make(plan, path)  # fmt: skip

    def _steps(self, plan: Plan) -> int:
        if self.ours.tune is not None:
            return self.ours.tune
        pays = self.texts.known and self.ours.method != "rtn" and pricing.has_few_bits(self.source, plan)
        return USUAL_STEPS if pays else 0

    def curve(self, plan: Plan) -> Curve:
        """What the forecast of this plan's size of damage comes to, measured in torch as the pipeline does, once."""
        of = hashlib.sha256("".join(entry.format for entry in plan.entries).encode()).hexdigest()[:16]
        path = self.folder / "curves" / f"{of}.json"
        if not path.is_file():
            samples = self.texts.drawn(self.source).ids if self.texts.known else next(iter(self.windows.values()))
            tuned = self._steps(plan) > 0
            measured = measure_curve(self.source, self.statistics, plan, samples, calibration.MEMORY, self.progress, tuned)
            with Staged(path) as staged:
                staged.write_text(json.dumps(measured.points))
        return through([(float(predicted), float(kl)) for predicted, kl in json.loads(path.read_text())])

    def _made(self, plan: Plan, maker: str, folder: Path) -> Artifact:
        if maker in (OUR_ROUNDING, ROUNDING):
            return artifacts.quantize(self.source, plan, folder, self.progress, None if maker == ROUNDING else self.statistics)

        def each() -> Iterator[tuple[Weight, Outcome]]:
            for weight in self.progress(self.source.weights, len(self.source.weights), f"quantizing by {maker}"):
                fmt, w = formats.get(plan[weight.name].format), self.source.load(weight)
                if fmt.is_cast:
                    yield weight, methods.get("rtn").quantize(w, fmt)
                elif maker == PLAIN:
                    yield weight, Gptq("plain").quantize(w, fmt, self.statistics.of(weight.name))
                else:
                    yield weight, Outcome({"blocks": ggml_blocks(w, fmt.name, self.statistics, weight)}, PEER)

        return artifacts.write(self.source, plan, folder, each())


def ggml_blocks(w: torch.Tensor, fmt: str, statistics: Statistics, weight: Weight) -> torch.Tensor:
    """By ggml at its best setting: with the importance matrix that llama.cpp would have measured on this text. It measures none for an
    embedding, which is looked up and not multiplied; the types that ggml refuses to round without one then get a flat one. No mix of
    llama.cpp's asks for that, but a plan of ours may."""
    seen, name = statistics.of(weight.name).input, ggml.SPELLED[fmt]
    importance: ggml.Floats | None = None if seen is None else seen.mean_square().numpy()
    if importance is None and ggml.needs_importance(name):
        importance = np.ones(w.shape[1], np.float32)
    parts = [part.numpy() for part in w.chunk(max(1, torch.get_num_threads()))]  # ggml rounds rows alone, and a million weights a second
    with ThreadPoolExecutor(len(parts)) as threads:
        return torch.from_numpy(np.concatenate(list(threads.map(lambda part: ggml.quantize(name, part, importance), parts))))


def _measured(
    reference: Session, sessions: Mapping[str, Session], windows: Sequence[Window], folder: Path, progress: Progress[Any]
) -> dict[str, MeasuredLogits]:
    """A few windows at a time, and a file for what each of the contenders gave on them."""
    whole = {key: MeasuredLogits() for key in sessions}
    starts = range(0, len(windows), _PART)
    for start in progress(starts, len(starts), "running"):
        part = windows[start : start + _PART]
        name = hashlib.sha256(str(part).encode()).hexdigest()[:16]
        files = {key: folder / key / f"{name}.json" for key in sessions}
        missing = {key: session for key, session in sessions.items() if not files[key].is_file()}
        for key, measured in (metrics.compare_logits(reference, missing, part, silent) if missing else {}).items():
            with Staged(files[key]) as staged:
                staged.write_text(json.dumps(vars(measured)))
        for key, path in files.items():
            stored = json.loads(path.read_text())
            for field in ("kl", "nll", "nll_base", "agrees"):
                getattr(whole[key], field).extend(stored[field])
    return whole
