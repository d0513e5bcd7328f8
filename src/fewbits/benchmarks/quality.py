"""Same bytes, who is nearer to the float model? llama.cpp's quantizer with an importance matrix against ours, in llama.cpp itself.

Both read the same statistics of the same text, and both files hold the same formats, weight for weight. A third file is made with the
plain Hessian: what error feedback does when nothing is known of the attention sink. Every file runs on text that calibration did not see.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fewbits import calibration, formats, model, planning, preparation
from fewbits.benchmarks.contest import FLOOR, OURS, PEER, PLAIN, ROUNDING, SPELLED, Contest, Paired, calibrated, paired
from fewbits.errors import InputError
from fewbits.progress import silent

if TYPE_CHECKING:
    from fewbits.progress import Progress

FORMATS = ("q4_0", "q4_1", "q5_0", "iq4_nl")


@dataclass(frozen=True)
class Row:
    format: str
    maker: str
    bits_per_weight: float
    found: Paired


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
    """On each of the held-out texts, with the same files. `guard`: formats that are also made with the plain Hessian."""
    for wanted_name in names:
        if formats.get(wanted_name).name not in SPELLED:
            raise InputError(f"llama.cpp has no quantizer for `{wanted_name}` to compare with", f"it has: {', '.join(SPELLED)}")
    source, folder = model.open(name), Path(work)
    windows = windows_of(source, held_out, tokens)
    statistics = calibrated(source, stats, data, samples, folder / "statistics", progress)
    contest = Contest(source, folder, statistics, {"method": method, "keep": list(keep)}, progress)
    wanted: list[tuple[str, str]] = [("q8_0", ROUNDING)]
    wanted += [(fmt, maker) for fmt in names for maker in (PEER, OURS, PLAIN) if maker != PLAIN or fmt in guard]
    bits = {}
    for fmt, maker in wanted:
        plan = planning.uniform(source.weights, contest.target, formats.get(fmt), keep, method if maker == OURS else "rtn")
        bits[fmt] = plan.bits_per_weight
        contest.add(f"{fmt} {maker}", plan, maker)
    judged = []
    for text, found in contest.measure(windows).items():
        rows = [Row(fmt, maker, bits[fmt], paired(found[f"{fmt} {maker}"], found[f"{fmt} {PEER}"])) for fmt, maker in wanted[1:]]
        floor, eight = (float(np.mean(found[key].kl)) for key in (FLOOR, f"q8_0 {ROUNDING}"))
        judged.append(OnText(text, len(found[FLOOR].kl), floor, eight, tuple(rows)))
    return Quality(source.path.name, tuple(judged))


def windows_of(source: model.Model, held_out: Sequence[str | Path], tokens: int) -> dict[str, list[list[int]]]:
    found = {Path(text).name: preparation.held_out_windows(source, text, None, tokens) for text in held_out}
    return found or {"embedded": preparation.held_out_windows(source, (), None, tokens)}
