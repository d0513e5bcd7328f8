"""Same bytes, who is nearer to the float model? llama.cpp's quantizer with an importance matrix against ours, in llama.cpp itself.

Both read the same statistics of the same text, and both files hold the same formats, weight for weight. A third file is made with the
plain Hessian: what error feedback does when nothing is known of the attention sink. Every file runs in llama.cpp on text that
calibration did not see; differences are judged in pairs, position by position, by a block bootstrap.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fewbits import artifact as artifacts
from fewbits import calibration, formats, methods, model, pipeline, planning, preparation, runtimes, targets, verification
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

_PART = 8  # windows measured between two writes
_SPELLED = {name.lower(): name for name in ggml.TYPES}
FORMATS = ("q4_0", "q4_1", "q5_0", "iq4_nl")
PEER, OURS, PLAIN, _ROUNDING = "ggml + imatrix", "fewbits", "plain Hessian", "rounding"


@dataclass(frozen=True)
class Row:
    format: str
    maker: str
    bits_per_weight: float
    kl: float
    kl_ci95: tuple[float, float]
    kl_ratio: float  # to the peer's
    kl_ratio_ci95: tuple[float, float]
    top1: float
    top1_gain_ci95: tuple[float, float]  # over the peer's, in shares
    ppl_ratio: float
    ppl_to_peer_ci95: tuple[float, float]  # perplexity over the peer's


@dataclass(frozen=True)
class OnText:
    text: str
    tokens: int
    kl_floor: float  # the float file in llama.cpp
    kl_q8_0: float  # what 8-bit activations and weights cost there
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Quality:
    model: str
    texts: tuple[OnText, ...]

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


def quality(
    name: str | Path,
    work: str | Path,
    *,
    data: calibration.Paths = (),
    held_out: Sequence[str | Path] = (),
    stats: str | Path | None = None,
    names: Sequence[str] = FORMATS,
    guard: Sequence[str] = ("q4_0",),
    samples: int = 64,
    tokens: int = 40_960,
    method: str = "auto",
    keep: Sequence[str] = (),
    progress: Progress[Any] = silent,
) -> Quality:
    """On each of the held-out texts, with the same files. `guard`: formats that are also made with the plain Hessian.

    This takes an hour on a model of 135 million weights: files and measurements are kept in `work`, and found again.
    """
    for wanted_name in names:
        if formats.get(wanted_name).name not in _SPELLED:
            known = ", ".join(_SPELLED)
            raise InputError(f"llama.cpp has no quantizer for `{wanted_name}` to compare with", f"it has: {known}")
    source, folder = model.open(name), Path(work)
    target, judge = targets.get("gguf"), runtimes.needed(runtimes.get("llama.cpp"))
    windows = {Path(text).name: preparation.held_out_windows(source, text, None, tokens) for text in held_out}
    windows = windows or {"embedded": preparation.held_out_windows(source, (), None, tokens)}
    statistics = Statistics(Path(stats)) if stats else _calibrate(source, data, samples, folder / "statistics", progress)
    settings = {"model": source.fingerprint, "runs": statistics.about["runs"], "method": method, "keep": list(keep)}
    _same_settings(folder, settings)
    wanted: list[tuple[str, str]] = [("q8_0", _ROUNDING)]
    wanted += [(fmt, maker) for fmt in names for maker in (PEER, OURS, PLAIN) if maker != PLAIN or fmt in guard]
    files, bits = {"floor": folder / target.file_name}, {}
    if not files["floor"].is_file():
        pipeline.float_file(source, target, folder, progress)
    for fmt, maker in wanted:
        plan = planning.uniform(source.weights, target, formats.get(fmt), keep, method if maker == OURS else "rtn")
        path = files[f"{fmt} {maker}"] = folder / f"{fmt}-{maker}.gguf"
        bits[fmt] = plan.bits_per_weight
        if not path.is_file():
            pipeline.export(_made(source, plan, statistics, maker, folder / f"{fmt}-{maker}", progress), path)
    reference = torch_runtime.of_module(source.module())
    judged = []
    with ExitStack() as opened:
        length = max(len(each[0]) for each in windows.values())
        sessions = {key: opened.enter_context(closing(judge.open(path, length))) for key, path in files.items()}
        for text, each in windows.items():
            found = _measured(reference, sessions, each, folder / "measured" / text, progress)
            rows = [_row(fmt, maker, bits[fmt], found[f"{fmt} {maker}"], found[f"{fmt} {PEER}"]) for fmt, maker in wanted[1:]]
            floor, eight = (float(np.mean(found[key].kl)) for key in ("floor", f"q8_0 {_ROUNDING}"))
            judged.append(OnText(text, len(found["floor"].kl), floor, eight, tuple(rows)))
    return Quality(source.path.name, tuple(judged))


def _calibrate(source: Model, data: calibration.Paths, samples: int, folder: Path, progress: Progress[Any]) -> Statistics:
    if (folder / storing.ABOUT).is_file():
        return Statistics(folder)
    return calibration.collect(source, calibration.draw(source, data, samples, None, 0), folder, progress=progress)


def _same_settings(folder: Path, settings: dict[str, Any]) -> None:
    path = folder / "settings.json"
    if path.is_file() and json.loads(path.read_text()) != settings:
        raise InputError(f"`{folder}` holds a benchmark with other settings", "choose another `-o`, or remove it first")
    with Staged(path) as staged:
        staged.write_text(json.dumps(settings, indent=1))


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


def _made(source: Model, plan: Plan, statistics: Statistics, maker: str, folder: Path, progress: Progress[Weight]) -> Artifact:
    if maker in (OURS, _ROUNDING):
        return artifacts.quantize(source, plan, folder, progress, statistics if maker == OURS else None)

    def each() -> Iterator[tuple[Weight, Outcome]]:
        for weight in progress(source.weights, len(source.weights), f"quantizing by {maker}"):
            fmt, w = formats.get(plan[weight.name].format), source.load(weight)
            if fmt.levels is None:
                yield weight, methods.get("rtn").quantize(w, fmt)
            elif maker == PLAIN:
                yield weight, Gptq("plain").quantize(w, fmt, statistics.of(weight.name))
            else:
                yield weight, Outcome({"blocks": ggml_blocks(w, fmt.name, statistics, weight.name)}, PEER)

    return artifacts.write(source, plan, folder, each())


def ggml_blocks(w: torch.Tensor, fmt: str, statistics: Statistics, name: str) -> torch.Tensor:
    """The peer at its best setting: with the importance matrix that llama.cpp would have measured on this text."""
    importance = statistics.of(name).input
    assert importance is not None
    return torch.from_numpy(ggml.quantize(_SPELLED[fmt], w.numpy(), importance.mean_square().numpy()))


def _row(fmt: str, maker: str, bits: float, own: Measured, peer: Measured) -> Row:
    kl, nll, base = (np.array(values) for values in (own.kl, own.nll, own.nll_base))
    gain = np.array(own.agrees, float) - np.array(peer.agrees, float)
    low, high = verification.bootstrap_ci95(nll - np.array(peer.nll))
    return Row(
        format=fmt,
        maker=maker,
        bits_per_weight=bits,
        kl=float(kl.mean()),
        kl_ci95=verification.bootstrap_ci95(kl),
        kl_ratio=float(kl.mean() / np.mean(peer.kl)),
        kl_ratio_ci95=verification.bootstrap_ratio_ci95(kl, np.array(peer.kl)),
        top1=float(np.mean(own.agrees)),
        top1_gain_ci95=verification.bootstrap_ci95(gain),
        ppl_ratio=float(np.exp(nll.mean() - base.mean())),
        ppl_to_peer_ci95=(float(np.exp(low)), float(np.exp(high))),
    )
