"""Same bytes, best plan: llama.cpp's own mixes with its own quantizer against what fewbits buys for their size, in llama.cpp itself.

For every mix three files: the peer's (its types, its rounding, an importance matrix), its rounding with our allocation, and ours. All
read the same statistics. One more file shows equal KL: ours with 12 % fewer bytes than the peer's. A size in bits per weight stands beside
the mixes: no peer has a file for it, but the forecast can be held against what was measured.

Further baselines: llama.cpp's allocation by target size with its own rounding, and peers in environments of their own. Where a peer's file
has fewer bytes than ours of that mix, one more of ours is made for its bytes, and compared with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits import formats, model, planning, sensitivity
from fewbits.artifact.draft import Draft
from fewbits.benchmarks.peers.ggml import SPELLED
from fewbits.benchmarks.quality import outside
from fewbits.benchmarks.quality.contest import (
    BY_DEFAULT,
    EIGHT_BITS,
    OUR_ROUNDING,
    OURS,
    PEER,
    ROUNDING,
    Contest,
    Found,
    Judged,
    Ours,
    Texts,
    ToPeer,
    compared,
    found,
)
from fewbits.benchmarks.quality.outside import NOBODY, Outside
from fewbits.benchmarks.quality.target_size import plan_by_target_size
from fewbits.errors import InputError
from fewbits.inspection.sizes import bits_per_weight
from fewbits.planning import budgets, recipes
from fewbits.planning.allocation import allocator
from fewbits.planning.constraints import UNCONSTRAINED
from fewbits.planning.decision import Budget
from fewbits.progress import silent
from fewbits.sensitivity.curve import FROM
from fewbits.targets import pricing

if TYPE_CHECKING:
    from fewbits.formats import Format
    from fewbits.planning import Plan
    from fewbits.planning.allocation import Allocator
    from fewbits.progress import Progress
    from fewbits.verification.metrics import MeasuredLogits

    Planned = Callable[[Allocator], Plan]
    Key = tuple[str, str]  # a mix or a size, and a maker

MIXES = ("q4_k_m", "iq4_xs", "q3_k_m", "q4_0", "q2_k")
SMALLER = 0.88  # of the bytes of the first mix: equal KL with 12 % less
ALLOCATION = "our allocation, ggml + imatrix"
BY_TARGET_SIZE = "target size, ggml + imatrix"
_ROUNDED_BY_PEER = (PEER, ALLOCATION, BY_TARGET_SIZE)


@dataclass(frozen=True)
class MixRow:
    """A file as large as a mix of llama.cpp, or of so many bits per weight."""

    mix: str
    maker: str
    bytes: int  # of the file
    bits_per_weight: float
    predicted: float | None  # KL of the plan, where the table has the maker's method
    found: Found
    ours: ToPeer | None  # our file of no more bytes, compared with this one


def plans(
    name: str | Path,
    work: str | Path,
    texts: Texts,
    sizes: Sequence[str] = MIXES,
    brief: bool = False,
    ours: Ours = BY_DEFAULT,
    who: Outside = NOBODY,
    progress: Progress[Any] = silent,
) -> Judged[MixRow]:
    """`sizes`: mixes of llama.cpp, or bits per weight as in `2.5bpw`. `brief`: only the peer's files and ours. `who`: more peers."""
    _check(sizes, who)
    who.check(texts)
    sizes, source, settings = [size.lower() for size in sizes], model.open(name), {"formats": list(ours.formats)}
    with ours.crew(source) as crew:
        contest = Contest(source, Path(work), texts, settings, progress, ours, crew=crew)
        field = _made(contest, sizes, brief, who)
    return contest.judged(lambda measured: _rows(contest, field, sizes, measured))


def _made(contest: Contest, sizes: Sequence[str], brief: bool, who: Outside) -> _Field:
    """All files, and who takes part."""
    source, ours = contest.source, contest.ours
    candidates = [fmt for fmt in pricing.candidates_for(source, contest.target, tuple(ours.formats)) if fmt.is_cast or fmt.name in SPELLED]
    allocators = {method: _allocator(contest, candidates, method) for method in ((ours.method,) if brief else ("rtn", ours.method))}
    made = _plans(contest, sizes, allocators)
    if who.target_size or not brief:
        for mix, plan in [(mix, plan) for (mix, maker), plan in made.items() if maker == PEER]:
            made[mix, BY_TARGET_SIZE] = plan_by_target_size(contest, plan.nbytes, f"llama.cpp within the bytes of {mix}")
    field = _Field(made, {key: plan.bits_per_weight for key, plan in made.items()}, {key: (key[0], OURS) for key in made})
    _add_outsiders(contest, field, who, allocators[ours.method])
    contest.add(EIGHT_BITS, planning.uniform(source.weights, contest.target, formats.get("q8_0")), ROUNDING)
    for (size, maker), plan in field.plans.items():
        contest.add(f"{size} {maker}", plan, PEER if maker in _ROUNDED_BY_PEER else maker)
    return field


def _allocator(contest: Contest, candidates: Sequence[Format], method: str) -> Allocator:
    table = sensitivity.measure(
        contest.source, contest.statistics, candidates, method, cache=contest.cache, crew=contest.crew, progress=contest.progress
    )
    return allocator(table, contest.target)


@dataclass(frozen=True)
class _Field:
    """Who takes part, by mix and maker."""

    plans: dict[Key, Plan]  # of files that are made here
    bits: dict[Key, float]  # per weight, of everybody's
    against: dict[Key, Key]  # the file of ours that each is compared with


def _add_outsiders(contest: Contest, field: _Field, who: Outside, allocator: Allocator) -> None:
    for mix, peer in [(mix, peer) for mix, maker in list(field.plans) if maker == PEER for peer in who.peers if peer.makes(mix)]:
        job = peer.gguf_job(mix, field.plans[mix, PEER].nbytes, allocator.elements)
        path = outside.add(contest, who, f"{mix} {peer.maker}", peer, job)
        bits = field.bits[mix, peer.maker] = bits_per_weight(path, contest.source)
        ours = field.against[mix, peer.maker] = (mix, OURS)
        if bits < field.bits[ours]:
            ours = field.against[mix, peer.maker] = (f"{mix} as {peer.maker}", OURS)
            room = _of_bytes(int(bits * allocator.elements / 8), f"the bytes of {peer.maker}")
            field.plans[ours] = _corrected(contest, allocator, room)
            field.bits[ours] = field.plans[ours].bits_per_weight


def _rows(contest: Contest, field: _Field, sizes: Sequence[str], measured: Mapping[str, MeasuredLogits]) -> Iterator[MixRow]:
    for size, maker in sorted(field.bits, key=lambda key: sizes.index(key[0].split()[0])):
        file, plan = measured[f"{size} {maker}"], field.plans.get((size, maker))
        figures = found(file, measured.get(f"{size.split()[0]} {PEER}"))
        nbytes = contest.files[f"{size} {maker}"].stat().st_size
        predicted = None if plan is None or maker in _ROUNDED_BY_PEER else plan.kl
        beside = None
        if maker not in (OURS, OUR_ROUNDING):
            beside = compared(measured[" ".join(field.against[size, maker])], file)
        yield MixRow(size, maker, nbytes, field.bits[size, maker], predicted, figures, beside)


def _check(sizes: Sequence[str], who: Outside) -> None:
    for size in sizes:
        if isinstance(budgets.parse_size(size), budgets.FileBytes):
            raise InputError(f"`{size}` is neither a mix of llama.cpp nor in bits per weight", "for example `--mixes iq2_m,2.5bpw`")
    for peer in who.peers:
        if not peer.writes_gguf:
            raise InputError(f"`{peer.name}` writes no GGUF", "`fewbits bench quality --formats int4_g32,int4_g128` takes it")
        if not any(peer.makes(size.lower()) for size in sizes):
            raise InputError(f"`{peer.name}` has none of the mixes {', '.join(sizes)}", "for example `--mixes q4_k_m,q4_0,q2_k_s`")


def _plans(contest: Contest, sizes: Sequence[str], allocators: Mapping[str, Allocator]) -> dict[Key, Plan]:
    """By mix and maker."""
    made: dict[Key, Plan] = {}
    source, target, ours = contest.source, contest.target, allocators[contest.ours.method]
    mixes = [size for size in sizes if isinstance(budgets.parse_size(size), budgets.Recipe)]
    for mix in mixes:
        types = recipes.recipe(mix, source.weights, source.config)
        entries = tuple(planning.priced(w, target, types[w.name], f"llama.cpp's {mix}", "rtn") for w in source.weights)
        peer = made[mix, PEER] = planning.Plan(target.name, entries)
        # our plan is written into the file's metadata, with its reasons: the weights get so many bytes fewer
        room = peer.nbytes - _extra(contest, peer, ours.within_bytes(peer.nbytes, f"--size {mix}"))
        if alone := allocators.get("rtn"):
            made[mix, ALLOCATION] = alone.within_bytes(room, f"--size {mix}")
        made[mix, OURS] = _corrected(contest, ours, _of_bytes(room, f"--size {mix}"))
        if alone and mix == mixes[0]:
            made[f"{mix} less 12 %", OURS] = ours.within_bytes(int(room * SMALLER), f"{SMALLER} of {mix}")
            made[mix, OUR_ROUNDING] = made[mix, ALLOCATION]
    for size in sizes:
        if size not in mixes:
            made[size, OURS] = _corrected(contest, ours, _of_size(contest, size))
    return made


def _of_bytes(room: int, why: str) -> Planned:
    return lambda some: some.within_bytes(room, why)


def _of_size(contest: Contest, size: str) -> Planned:
    return lambda some: pricing.within_file(some.table, contest.source, contest.target, Budget(size), UNCONSTRAINED).plan


def _corrected(contest: Contest, ours: Allocator, planned: Planned) -> Plan:
    """A plan with the forecast that `fewbits quantize` gives: where damage is large, corrected by what was measured at that size."""
    plan = planned(ours)
    if (plan.kl or 0.0) < FROM:
        return plan
    return planned(replace(ours, table=replace(ours.table, curve=contest.curve(plan))))


def _extra(contest: Contest, peer: Plan, ours: Plan) -> int:
    """Bytes beside the tensors that our file takes and the peer's does not: the whole text of the plan."""
    text = len(peer.to_json())
    before, after = (contest.target.overhead(Draft(contest.source, plan)) for plan in (peer, ours))
    return max(0, after - before) + text + 4096  # padding and digits
