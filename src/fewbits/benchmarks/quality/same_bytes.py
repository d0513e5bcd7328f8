"""Same bytes, who is nearer to the float model? llama.cpp's quantizer with an importance matrix against ours, in llama.cpp itself.

Both read the same statistics of the same text, and both files hold the same formats, weight for weight. A third file is made with the
plain Hessian: what error feedback does when nothing is known of the attention sink. Every file runs on text that calibration did not see.
Weights whose columns do not divide into the blocks of a type get what llama-quantize gives them, on both sides.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits import formats, model, planning
from fewbits.benchmarks.peers.ggml import SPELLED
from fewbits.benchmarks.quality.contest import BY_DEFAULT, OURS, PEER, PLAIN, ROUNDING, Contest, Found, Judged, Ours, Texts, found
from fewbits.errors import InputError
from fewbits.planning.mixes import BLOCKS_OF_32
from fewbits.progress import silent

if TYPE_CHECKING:
    from fewbits.model.weights import Weight
    from fewbits.progress import Progress
    from fewbits.verification.metrics import MeasuredLogits

FORMATS = ("q4_0", "q4_1", "q5_0", "iq4_nl")


@dataclass(frozen=True)
class FormatRow:
    """A file whose weights all have one format."""

    format: str
    maker: str
    bits_per_weight: float
    found: Found


def quality(
    name: str | Path,
    work: str | Path,
    texts: Texts,
    names: Sequence[str] = FORMATS,
    guard: Sequence[str] = ("q4_0",),
    keep: Sequence[str] = (),
    ours: Ours = BY_DEFAULT,
    progress: Progress[Any] = silent,
) -> Judged[FormatRow]:
    """On each of the held-out texts, with the same files. `guard`: formats that are also made with the plain Hessian. `keep`: overrides of
    a format, for weights that neither side quantizes."""
    if unknown := [fmt for fmt in names if formats.get(fmt).name not in SPELLED]:
        raise InputError(f"llama.cpp has no quantizer for `{unknown[0]}` to compare with", f"it has: {', '.join(SPELLED)}")
    source = model.open(name)
    contest = Contest(source, Path(work), texts, {"keep": list(keep)}, progress, ours)
    wanted = [(fmt, maker) for fmt in names for maker in (PEER, OURS, PLAIN) if maker != PLAIN or fmt in guard]
    bits = {}
    for fmt, maker in [("q8_0", ROUNDING), *wanted]:
        overrides = (*overrides_for(fmt, source.weights), *keep)
        plan = planning.uniform(source.weights, contest.target, formats.get(fmt), overrides, ours.method if maker == OURS else "rtn")
        bits[fmt] = plan.bits_per_weight
        contest.add(f"{fmt} {maker}", plan, maker)

    def rows(measured: Mapping[str, MeasuredLogits]) -> Iterator[FormatRow]:
        for fmt, maker in wanted:
            yield FormatRow(fmt, maker, bits[fmt], found(measured[f"{fmt} {maker}"], measured[f"{fmt} {PEER}"]))

    return contest.judged(rows)


def overrides_for(fmt: str, weights: Sequence[Weight]) -> list[str]:
    """For weights that this type does not fit. Without them our plan would take the nearest type that fits, which llama.cpp does not."""
    other = BLOCKS_OF_32.get(fmt)
    if other is None:
        return []
    block, less = formats.get(fmt).block, formats.get(other).block
    uneven = [weight for weight in weights if weight.shape[1] % block and weight.shape[1] % less == 0]
    return [f"^{re.escape(weight.name)}$={other}" for weight in uneven]
