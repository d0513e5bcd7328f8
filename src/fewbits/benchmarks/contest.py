"""Files of several makers in llama.cpp, against the float model in torch: what every comparison of quality shares.

A run takes an hour on a model of 135 million weights, so files and measurements are kept in a folder, a few windows at a time, and found
again. Differences are judged in pairs, position by position, by a block bootstrap.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fewbits import artifact as artifacts
from fewbits import calibration, formats, methods, pipeline, runtimes, targets, verification
from fewbits.benchmarks import ggml
from fewbits.calibration import storing
from fewbits.calibration.storing import Statistics
from fewbits.errors import InputError
from fewbits.files import Staged
from fewbits.methods import Outcome
from fewbits.methods.gptq import Gptq
from fewbits.progress import silent
from fewbits.runtimes import torch as torch_runtime
from fewbits.verification import Measured

if TYPE_CHECKING:
    from fewbits.artifact import Artifact
    from fewbits.model import Model, Weight
    from fewbits.planning import Plan
    from fewbits.progress import Progress
    from fewbits.runtimes import Session
    from fewbits.texts import Window

PEER, OURS, PLAIN, ROUNDING = "ggml + imatrix", "fewbits", "plain Hessian", "rounding"
FLOOR = "floor"  # the float file in llama.cpp
SPELLED = {name.lower(): name for name in ggml.TYPES}
_PART = 8  # windows measured between two writes


@dataclass(frozen=True)
class Paired:
    """One file's figures, and how they compare with the peer's on the same tokens."""

    kl: float
    kl_ci95: tuple[float, float]
    kl_ratio: float  # to the peer's
    kl_ratio_ci95: tuple[float, float]
    top1: float
    top1_gain_ci95: tuple[float, float]  # over the peer's, in shares
    ppl_ratio: float
    ppl_to_peer_ci95: tuple[float, float]  # perplexity over the peer's


def paired(own: Measured, peer: Measured) -> Paired:
    kl, nll, base = (np.array(values) for values in (own.kl, own.nll, own.nll_base))
    gain = np.array(own.agrees, float) - np.array(peer.agrees, float)
    low, high = verification.bootstrap_ci95(nll - np.array(peer.nll))
    return Paired(
        kl=float(kl.mean()),
        kl_ci95=verification.bootstrap_ci95(kl),
        kl_ratio=float(kl.mean() / np.mean(peer.kl)),
        kl_ratio_ci95=verification.bootstrap_ratio_ci95(kl, np.array(peer.kl)),
        top1=float(np.mean(own.agrees)),
        top1_gain_ci95=verification.bootstrap_ci95(gain),
        ppl_ratio=float(np.exp(nll.mean() - base.mean())),
        ppl_to_peer_ci95=(float(np.exp(low)), float(np.exp(high))),
    )


class Contest:
    def __init__(self, source: Model, folder: Path, statistics: Statistics, settings: Mapping[str, Any], progress: Progress[Any]) -> None:
        self.source, self.folder, self.statistics, self.progress = source, folder, statistics, progress
        self.target = targets.get("gguf")
        self.judge = runtimes.needed(runtimes.get("llama.cpp"))
        self._same({"model": source.fingerprint, "runs": statistics.about["runs"], **settings})
        self.files = {FLOOR: folder / self.target.file_name}
        if not self.files[FLOOR].is_file():
            pipeline.float_file(source, self.target, folder, progress)

    def add(self, name: str, plan: Plan, maker: str) -> None:
        """A file by this plan, made by `maker`, unless it is there."""
        path = self.files[name] = self.folder / f"{name.replace(' ', '-', 1)}.gguf"
        if not path.is_file():
            pipeline.export(self._made(plan, maker, path.with_suffix("")), path)

    def measure(self, windows: Mapping[str, Sequence[Window]]) -> dict[str, dict[str, Measured]]:
        """text -> file -> numbers per position."""
        reference = torch_runtime.of_module(self.source.module())
        with ExitStack() as opened:
            length = max(len(each[0]) for each in windows.values())
            sessions = {key: opened.enter_context(closing(self.judge.open(path, length))) for key, path in self.files.items()}
            return {
                text: _measured(reference, sessions, each, self.folder / "measured" / text, self.progress) for text, each in windows.items()
            }

    def _same(self, settings: dict[str, Any]) -> None:
        path = self.folder / "settings.json"
        if path.is_file() and json.loads(path.read_text()) != settings:
            raise InputError(f"`{self.folder}` holds a benchmark with other settings", "choose another `-o`, or remove it first")
        with Staged(path) as staged:
            staged.write_text(json.dumps(settings, indent=1))

    def _made(self, plan: Plan, maker: str, folder: Path) -> Artifact:
        if maker in (OURS, ROUNDING):
            return artifacts.quantize(self.source, plan, folder, self.progress, self.statistics if maker == OURS else None)

        def each() -> Iterator[tuple[Weight, Outcome]]:
            for weight in self.progress(self.source.weights, len(self.source.weights), f"quantizing by {maker}"):
                fmt, w = formats.get(plan[weight.name].format), self.source.load(weight)
                if fmt.levels is None:
                    yield weight, methods.get("rtn").quantize(w, fmt)
                elif maker == PLAIN:
                    yield weight, Gptq("plain").quantize(w, fmt, self.statistics.of(weight.name))
                else:
                    yield weight, Outcome({"blocks": ggml_blocks(w, fmt.name, self.statistics, weight)}, PEER)

        return artifacts.write(self.source, plan, folder, each())


def ggml_blocks(w: torch.Tensor, fmt: str, statistics: Statistics, weight: Weight) -> torch.Tensor:
    """The peer at its best setting: with the importance matrix that llama.cpp would have measured on this text. It measures none for an
    embedding that is only looked up."""
    seen = statistics.of(weight.name).input
    return torch.from_numpy(ggml.quantize(SPELLED[fmt], w.numpy(), None if seen is None else seen.mean_square().numpy()))


def calibrated(
    source: Model, stats: str | Path | None, data: calibration.Paths, samples: int, folder: Path, progress: Progress[Any]
) -> Statistics:
    if stats is not None:
        return Statistics(Path(stats))
    if (folder / storing.ABOUT).is_file():
        return Statistics(folder)
    return calibration.collect(source, calibration.draw(source, data, samples, None, 0), folder, progress=progress)


def _measured(
    reference: Session, sessions: Mapping[str, Session], windows: Sequence[Window], folder: Path, progress: Progress[Any]
) -> dict[str, Measured]:
    """A few windows at a time, each part kept in a file of its own."""
    whole = {key: Measured() for key in sessions}
    starts = range(0, len(windows), _PART)
    for start in progress(starts, len(starts), "running in llama.cpp"):
        part = windows[start : start + _PART]
        name = hashlib.sha256(str(part).encode()).hexdigest()[:16]
        files = {key: folder / key / f"{name}.json" for key in sessions}
        missing = {key: session for key, session in sessions.items() if not files[key].is_file()}
        for key, measured in (verification.measure(reference, missing, part, silent) if missing else {}).items():
            with Staged(files[key]) as staged:
                staged.write_text(json.dumps(vars(measured)))
        for key, path in files.items():
            found = json.loads(path.read_text())
            for field in ("kl", "nll", "nll_base", "agrees"):
                getattr(whole[key], field).extend(found[field])
    return whole
