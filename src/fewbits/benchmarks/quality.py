"""Same bytes, who is nearer to the float model? llama.cpp's quantizer with an importance matrix against ours, in llama.cpp itself.

Both read the same statistics of the same text, and both files hold the same formats, weight for weight. A third file is made with the
plain Hessian: what error feedback does when nothing is known of the attention sink. Every file runs in llama.cpp on text that
calibration did not see; differences are judged in pairs, position by position, by a block bootstrap.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fewbits import artifact as artifacts
from fewbits import calibration, formats, methods, model, pipeline, planning, preparation, runtimes, targets, verification
from fewbits.benchmarks import ggml
from fewbits.calibration.storing import Statistics
from fewbits.methods import Outcome
from fewbits.methods.gptq import Gptq
from fewbits.progress import silent
from fewbits.runtimes import torch as torch_runtime

if TYPE_CHECKING:
    from fewbits.artifact import Artifact
    from fewbits.model import Model, Weight
    from fewbits.planning import Plan
    from fewbits.progress import Progress
    from fewbits.verification import Measured

FORMATS = ("q4_0", "q4_1", "q5_0", "iq4_nl")
PEER, OURS, PLAIN = "ggml + imatrix", "fewbits", "plain Hessian"


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
class Quality:
    model: str
    tokens: int
    kl_floor: float  # the float file in llama.cpp
    kl_q8_0: float  # what 8-bit activations and weights cost there
    rows: tuple[Row, ...]

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


def quality(
    name: str | Path,
    *,
    data: calibration.Paths = (),
    held_out: calibration.Paths = (),
    stats: str | Path | None = None,
    names: Sequence[str] = FORMATS,
    samples: int = 64,
    tokens: int = 40_960,
    method: str = "auto",
    keep: Sequence[str] = ("embed=keep",),
    progress: Progress[Any] = silent,
) -> Quality:
    source = model.open(name)
    target, judge = targets.get("gguf"), runtimes.needed(runtimes.get("llama.cpp"))
    windows = preparation.held_out_windows(source, held_out, None, tokens)
    length = len(windows[0])
    with tempfile.TemporaryDirectory(prefix="fewbits-") as scratch, ExitStack() as opened:
        folder = Path(scratch)
        statistics = Statistics(Path(stats)) if stats else _calibrate(source, data, samples, folder / "statistics", progress)
        files = {("floor", ""): pipeline.float_file(source, target, folder, progress)}
        wanted: list[tuple[str, str]] = [("q8_0", "plain"), *((fmt, maker) for fmt in names for maker in (PEER, OURS, PLAIN))]
        bits = {}
        for fmt, maker in wanted:
            plan = planning.uniform(source.weights, target, formats.get(fmt), keep, method if maker == OURS else "rtn")
            made = _made(source, plan, statistics, maker, folder / f"{fmt}-{maker}", progress)
            files[fmt, maker] = pipeline.export(made, folder / f"{fmt}-{maker}.gguf")
            bits[fmt, maker] = plan.bits_per_weight
        sessions = {f"{f}/{m}": opened.enter_context(closing(judge.open(path, length))) for (f, m), path in files.items()}
        found = verification.measure(torch_runtime.of_module(source.module()), sessions, windows, progress)
    rows = [_row(fmt, maker, bits[fmt, maker], found[f"{fmt}/{maker}"], found[f"{fmt}/{PEER}"]) for fmt, maker in wanted[1:]]
    floor, eight = (float(np.mean(found[key].kl)) for key in ("floor/", "q8_0/plain"))
    return Quality(Path(name).name, len(found["floor/"].kl), floor, eight, tuple(rows))


def _calibrate(source: Model, data: calibration.Paths, samples: int, folder: Path, progress: Progress[Any]) -> Statistics:
    return calibration.collect(source, calibration.draw(source, data, samples, None, 0), folder, progress=progress)


def _made(source: Model, plan: Plan, statistics: Statistics, maker: str, folder: Path, progress: Progress[Weight]) -> Artifact:
    if maker == OURS or maker == "plain":
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
    spelled = next(known for known in ggml.TYPES if known.lower() == fmt)
    importance = statistics.of(name).input
    assert importance is not None
    return torch.from_numpy(ggml.quantize(spelled, w.numpy(), importance.mean_square().numpy()))


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
