"""Same bytes, best plan: llama.cpp's own mixes with its own quantizer against what fewbits buys for their size, in llama.cpp itself.

For every mix three files: the peer's (its types, its rounding, an importance matrix), its rounding with our allocation, and ours. All
read the same statistics. One more file shows equal KL: ours with 12 % fewer bytes than the peer's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits import formats, model, planning, sensitivity
from fewbits.artifact.draft import Draft
from fewbits.benchmarks.peers.ggml import SPELLED
from fewbits.benchmarks.quality.contest import EIGHT_BITS, OURS, PEER, ROUNDING, Contest, Judged, Paired, Texts, paired
from fewbits.planning import recipes
from fewbits.planning.allocation import allocator
from fewbits.progress import silent
from fewbits.store.cache import Cache, code_version
from fewbits.targets import pricing

if TYPE_CHECKING:
    from fewbits.planning import Plan
    from fewbits.planning.allocation import Allocator
    from fewbits.progress import Progress
    from fewbits.verification.metrics import MeasuredLogits

MIXES = ("q4_k_m", "iq4_xs", "q3_k_m", "q4_0", "q2_k")
SMALLER = 0.88  # of the bytes of the first mix: equal KL with 12 % less
ALLOCATION = "our allocation, ggml + imatrix"
OUR_ROUNDING = "fewbits, rounding only"


@dataclass(frozen=True)
class MixRow:
    """A file as large as a mix of llama.cpp."""

    mix: str
    maker: str
    bytes: int  # of the file
    bits_per_weight: float
    predicted: float | None  # KL of the plan, where the table has the maker's method
    found: Paired


def plans(
    name: str | Path, work: str | Path, texts: Texts, mixes: Sequence[str] = MIXES, progress: Progress[Any] = silent
) -> Judged[MixRow]:
    source, folder = model.open(name), Path(work)
    contest = Contest(source, folder, texts, {"mixes": list(mixes)}, progress)
    candidates = [fmt for fmt in pricing.candidates_for(source, contest.target, ()) if fmt.levels is None or fmt.name in SPELLED]
    cache = Cache(folder / "cache", {"code": code_version()})
    allocators = {
        method: allocator(
            sensitivity.measure(source, contest.statistics, candidates, method, cache=cache, progress=progress), contest.target
        )
        for method in ("rtn", "auto")
    }
    made = _plans(contest, mixes, allocators)
    contest.add(EIGHT_BITS, planning.uniform(source.weights, contest.target, formats.get("q8_0")), ROUNDING)
    for (mix, maker), plan in made.items():
        contest.add(f"{mix} {maker}", plan, OURS if maker in (OURS, OUR_ROUNDING) else PEER)

    def rows(measured: Mapping[str, MeasuredLogits]) -> Iterator[MixRow]:
        for (mix, maker), plan in made.items():
            figures = paired(measured[f"{mix} {maker}"], measured[f"{mix.split()[0]} {PEER}"])
            nbytes = contest.files[f"{mix} {maker}"].stat().st_size
            yield MixRow(mix, maker, nbytes, plan.bits_per_weight, None if maker in (PEER, ALLOCATION) else plan.kl, figures)

    return contest.judged(rows)


def _plans(contest: Contest, mixes: Sequence[str], allocators: Mapping[str, Allocator]) -> dict[tuple[str, str], Plan]:
    """By mix and maker."""
    made: dict[tuple[str, str], Plan] = {}
    source, target = contest.source, contest.target
    for mix in mixes:
        types = recipes.recipe(mix, source.weights, source.config)
        entries = tuple(planning.priced(w, target, types[w.name], f"llama.cpp's {mix}", "rtn") for w in source.weights)
        peer = made[mix, PEER] = planning.Plan(target.name, entries)
        # our plan is written into the file's metadata, with its reasons: the weights get so many bytes fewer
        room = peer.nbytes - _extra(contest, peer, allocators["auto"].within_bytes(peer.nbytes, f"--size {mix}"))
        made[mix, ALLOCATION] = allocators["rtn"].within_bytes(room, f"--size {mix}")
        made[mix, OURS] = allocators["auto"].within_bytes(room, f"--size {mix}")
        if mix == mixes[0]:
            made[f"{mix} less 12 %", OURS] = allocators["auto"].within_bytes(int(room * SMALLER), f"{SMALLER} of {mix}")
            made[mix, OUR_ROUNDING] = made[mix, ALLOCATION]
    return made


def _extra(contest: Contest, peer: Plan, ours: Plan) -> int:
    """Bytes beside the tensors that our file takes and the peer's does not: the whole text of the plan."""
    text = len(peer.to_json())
    before, after = (contest.target.overhead(Draft(contest.source, plan)) for plan in (peer, ours))
    return max(0, after - before) + text + 4096  # padding and digits
