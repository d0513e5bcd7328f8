"""Same bytes, best plan: llama.cpp's own mixes with its own quantizer against what fewbits buys for their size, in llama.cpp itself.

For every mix three files: the peer's (its types, its rounding, an importance matrix), its rounding with our allocation, and ours. All
read the same statistics. One more file shows equal KL: ours with 12 % fewer bytes than the peer's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fewbits import budgeted, calibration, model, planning, sensitivity
from fewbits.benchmarks.contest import FLOOR, OURS, PEER, ROUNDING, SPELLED, Contest, Paired, calibrated, paired
from fewbits.benchmarks.quality import windows_of
from fewbits.drafting import Draft
from fewbits.kept import Kept, code_version
from fewbits.planning import recipes
from fewbits.planning.allocation import allocator
from fewbits.progress import silent

if TYPE_CHECKING:
    from fewbits.planning import Plan
    from fewbits.progress import Progress

MIXES = ("q4_k_m", "iq4_xs", "q3_k_m", "q4_0", "q2_k")
SMALLER = 0.88  # of the bytes of the first mix: equal KL with 12 % less
ALLOCATION = "our allocation, ggml + imatrix"
OUR_ROUNDING = "fewbits, rounding only"


@dataclass(frozen=True)
class Row:
    mix: str
    maker: str
    bytes: int  # of the file
    bits_per_weight: float
    predicted: float | None  # KL of the plan, where the table has the maker's method
    found: Paired


@dataclass(frozen=True)
class OnText:
    text: str
    tokens: int
    kl_floor: float
    kl_q8_0: float
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Plans:
    model: str
    texts: tuple[OnText, ...]

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


def plans(
    name: str | Path,
    work: str | Path,
    *,
    data: calibration.Paths = (),
    held_out: Sequence[str | Path] = (),
    stats: str | Path | None = None,
    mixes: Sequence[str] = MIXES,
    samples: int = 64,
    tokens: int = 40_960,
    progress: Progress[Any] = silent,
) -> Plans:
    source, folder = model.open(name), Path(work)
    windows = windows_of(source, held_out, tokens)
    statistics = calibrated(source, stats, data, samples, folder / "statistics", progress)
    contest = Contest(source, folder, statistics, {"mixes": list(mixes)}, progress)
    target = contest.target
    candidates = [fmt for fmt in budgeted.candidates_for(source, target, ()) if fmt.levels is None or fmt.name in SPELLED]
    makers = {}
    kept = Kept(folder / "kept", {"code": code_version()})
    for method in ("rtn", "auto"):
        makers[method] = allocator(sensitivity.measure(source, statistics, candidates, method, kept=kept, progress=progress), target)
    made: dict[tuple[str, str], Plan] = {}
    for mix in mixes:
        types = recipes.recipe(mix, source.weights, source.config)
        entries = tuple(planning.priced(w, target, types[w.name], f"llama.cpp's {mix}", "rtn") for w in source.weights)
        peer = made[mix, PEER] = planning.Plan(target.name, entries)
        # a plan of ours stands in the file's metadata, with its reasons: what that takes, the weights do not get
        room = peer.nbytes - _extra(contest, peer, makers["auto"].within_bytes(peer.nbytes, f"--size {mix}"))
        made[mix, ALLOCATION] = makers["rtn"].within_bytes(room, f"--size {mix}")
        made[mix, OURS] = makers["auto"].within_bytes(room, f"--size {mix}")
        if mix == mixes[0]:
            made[f"{mix} less 12 %", OURS] = makers["auto"].within_bytes(int(room * SMALLER), f"{SMALLER} of {mix}")
            made[mix, OUR_ROUNDING] = made[mix, ALLOCATION]
    contest.add(f"q8_0 {ROUNDING}", _uniform(source, contest, "q8_0"), ROUNDING)
    for (mix, maker), plan in made.items():
        contest.add(f"{mix} {maker}", plan, OURS if maker in (OURS, OUR_ROUNDING) else PEER)
    judged = []
    for text, found in contest.measure(windows).items():
        rows = []
        for (mix, maker), plan in made.items():
            figures = paired(found[f"{mix} {maker}"], found[f"{mix.split()[0]} {PEER}"])
            nbytes = contest.files[f"{mix} {maker}"].stat().st_size
            predicted = None if maker in (PEER, ALLOCATION) else plan.kl
            rows.append(Row(mix, maker, nbytes, plan.bits_per_weight, predicted, figures))
        floor, eight = (float(np.mean(found[key].kl)) for key in (FLOOR, f"q8_0 {ROUNDING}"))
        judged.append(OnText(text, len(found[FLOOR].kl), floor, eight, tuple(rows)))
    return Plans(source.path.name, tuple(judged))


def _extra(contest: Contest, peer: Plan, ours: Plan) -> int:
    """Bytes that our file takes beyond the tensors and the peer's does not: the whole text of the plan."""
    text = len(peer.to_json())
    before, after = (contest.target.overhead(Draft(contest.source, plan)) for plan in (peer, ours))
    return max(0, after - before) + text + 4096  # padding and digits


def _uniform(source: model.Model, contest: Contest, name: str) -> Plan:
    from fewbits import formats

    return planning.uniform(source.weights, contest.target, formats.get(name))
