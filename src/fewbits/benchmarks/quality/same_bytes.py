"""Same bytes, who is nearer to the float model? One format for all weights, made by us and by others, in the runtime of that format.

GGUF, in llama.cpp: its own quantizer with an importance matrix against ours. Both read the same statistics of the same text, and both files
hold the same formats, weight for weight. A third file is made with the plain Hessian: what error feedback does when nothing is known of the
attention sink. Weights whose columns do not divide into the blocks of a type get what llama-quantize gives them, on both sides.

Groups of 4-bit integers (`int4_g32`, `int4_g128`) and 4-bit floats (`nvfp4_tensor`, `mxfp4`), as compressed-tensors folders in
transformers: peers in environments of their own against ours. All quantize the linear layers of the blocks and nothing else.

Every file runs on text that calibration did not see.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits import formats, model, planning
from fewbits.benchmarks.peers.ggml import SPELLED
from fewbits.benchmarks.peers.named import FOLDERS, TARGET_SIZE
from fewbits.benchmarks.quality import outside
from fewbits.benchmarks.quality.contest import (
    BY_DEFAULT,
    OURS,
    PEER,
    PLAIN,
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
from fewbits.errors import InputError
from fewbits.inspection.sizes import bits_per_weight
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
    ours: ToPeer | None  # our file of the same format, compared with this one


def quality(
    name: str | Path,
    work: str | Path,
    texts: Texts,
    names: Sequence[str] = FORMATS,
    keep: Sequence[str] = (),
    ours: Ours = BY_DEFAULT,
    who: Outside = NOBODY,
    progress: Progress[Any] = silent,
) -> Judged[FormatRow]:
    """On each of the held-out texts, with the same files. `keep`: overrides of a format, for weights that neither side quantizes. `who`:
    the peers beside llama.cpp's quantizer."""
    names = [formats.get(fmt).name for fmt in names]
    grouped = [fmt for fmt in names if fmt in FOLDERS and (who.peers or fmt not in SPELLED)]  # mxfp4 is in both worlds
    _check(names, grouped, keep, who)
    who.check(texts)
    source, settings = model.open(name), {"keep": list(keep)} | ({"to": "safetensors"} if grouped else {})
    makers = (OURS,) if grouped else (PEER, OURS, PLAIN)
    wanted = [(fmt, maker) for fmt in names for maker in makers if maker != PLAIN or fmt in ours.plain]
    bits = {}
    with ours.crew(source) as crew:
        contest = Contest(source, Path(work), texts, settings, progress, ours, "safetensors" if grouped else "gguf", crew)
        for fmt, maker in [("q8_0", ROUNDING), *wanted]:
            overrides = (*overrides_for(fmt, source.weights), *keep)
            plan = planning.uniform(source.weights, contest.target, formats.get(fmt), overrides, ours.method if maker == OURS else "rtn")
            contest.add(f"{fmt} {maker}", plan, maker)
            bits[fmt, maker] = bits_per_weight(contest.files[f"{fmt} {maker}"], source) if grouped else plan.bits_per_weight
    for fmt in grouped:
        for peer in (peer for peer in who.peers if peer.makes_folder(fmt)):
            path = outside.add(contest, who, f"{fmt} {peer.maker}", peer, peer.folder_job(fmt))
            wanted.append((fmt, peer.maker))
            bits[fmt, peer.maker] = bits_per_weight(path, source)

    def rows(measured: Mapping[str, MeasuredLogits]) -> Iterator[FormatRow]:
        for fmt, maker in sorted(wanted, key=lambda row: names.index(row[0])):
            file, mine = measured[f"{fmt} {maker}"], measured[f"{fmt} {OURS}"]
            figures = found(file, measured.get(f"{fmt} {PEER}"))
            yield FormatRow(fmt, maker, bits[fmt, maker], figures, None if maker == OURS else compared(mine, file))

    return contest.judged(rows)


def _check(names: Sequence[str], grouped: Sequence[str], keep: Sequence[str], who: Outside) -> None:
    if grouped and len(grouped) < len(names):
        other = next(fmt for fmt in names if fmt not in grouped)
        raise InputError(f"`{other}` is judged in llama.cpp and `{grouped[0]}` in transformers", "run them apart, each with its own `-o`")
    if unknown := [fmt for fmt in names if fmt not in SPELLED and fmt not in grouped]:
        known = f"it has: {', '.join(SPELLED)}; for peers with `--peer`: {', '.join(FOLDERS)}"
        raise InputError(f"llama.cpp has no quantizer for `{unknown[0]}` to compare with", known)
    if grouped and not who.peers:
        raise InputError(f"`{grouped[0]}` has no peer in llama.cpp", "name others, for example `--peer llmcompressor,autoround`")
    if grouped and not keep:
        raise InputError(f"`{grouped[0]}` leaves the embedding in float, as its peers do", "leave `--whole` out")
    if who.target_size or (who.peers and not grouped):
        name = who.peers[0].name if who.peers else TARGET_SIZE
        raise InputError(
            f"`{name}` makes no file of one GGUF format for all", "`fewbits bench plans` takes it, or `--formats int4_g32,int4_g128`"
        )
    if other_kind := [peer for peer in who.peers if not peer.writes_folders]:
        raise InputError(f"`{other_kind[0].name}` writes no file of one format for all", "`fewbits bench plans` takes it")


def overrides_for(fmt: str, weights: Sequence[Weight]) -> list[str]:
    """For weights that this type does not fit. Without them our plan would take the nearest type that fits, which llama.cpp does not."""
    other = BLOCKS_OF_32.get(fmt)
    if other is None:
        return []
    block, less = formats.get(fmt).block, formats.get(other).block
    uneven = [weight for weight in weights if weight.shape[1] % block and weight.shape[1] % less == 0]
    return [f"^{re.escape(weight.name)}$={other}" for weight in uneven]
