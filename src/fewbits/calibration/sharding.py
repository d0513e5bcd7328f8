"""Calibration in parts: every part of the samples goes through the whole model by itself, and the statistics are added up in order.

What comes out depends on the number of parts, because sums of sums round otherwise, and never on who ran them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits import calibration
from fewbits import kept as results
from fewbits.calibration import storing
from fewbits.calibration.data import Samples, checksum
from fewbits.calibration.storing import Statistics
from fewbits.errors import InputError
from fewbits.files import remove
from fewbits.kept import Kept
from fewbits.progress import Progress, say, silent

if TYPE_CHECKING:
    from fewbits.executors.crew import Crew
    from fewbits.model import Model

STEP = "shard"
_STATISTICS = "statistics"
_TRIES = 2  # of fetching a shard; then this process makes it


def check(samples: Samples | None, count: int) -> None:
    """Before any work: that there are so many parts."""
    if count > 1 and samples is None:
        raise InputError(f"`--shards {count}` splits the text of a calibration, and there is none", "leave `--shards` out")
    if samples is not None:
        parts(samples, count)


def parts(samples: Samples, count: int) -> list[Samples]:
    if count == 1:
        return [samples]
    if not 1 <= count <= len(samples.ids) // 2:  # each part has two halves
        hint = f"at most {len(samples.ids) // 2}: each part needs two samples" if len(samples.ids) > 1 else "give more text"
        raise InputError(f"`--shards {count}`: there are {len(samples.ids)} samples", hint)
    ends = [len(samples.ids) * i // count for i in range(count + 1)]
    slices = [slice(start, end) for start, end in pairwise(ends)]
    return [replace(samples, ids=samples.ids[s], sources=samples.sources[s], digest=checksum(samples.ids[s])) for s in slices]


def collect(
    source: Model,
    samples: Samples,
    out: Path,
    shards: int,
    *,
    kept: Kept,
    crew: Crew | None = None,
    memory: int,
    hessians: bool = True,
    gradients: bool = True,
    progress: Progress[Any] = silent,
) -> Statistics:
    """Shard by shard in this process, or each by one of the workers. A finished shard stays until all are."""
    each, work = parts(samples, shards), kept.folder.parent / results.SHARDS
    options: dict[str, Any] = {"memory": memory, "hessians": hessians, "gradients": gradients}
    kept = kept.of(source=source.fingerprint, hessians=hessians, gradients=gradients)
    own = [{STEP: f"{number + 1} of {shards}", "text": results.hash_of(part.ids)} for number, part in enumerate(each)]
    folders = [work / f"{number + 1}-of-{shards}" for number in range(shards)]
    for parameters, folder in zip(own, folders, strict=True):
        if kept.find(STEP, **parameters) and not _is_there(kept, folder, parameters):
            kept.drop(STEP, **parameters)
    if crew:
        pairs = zip(each, folders, strict=True)
        told = [{"samples": asdict(part), "folder": str(folder.resolve()), "options": options} for part, folder in pairs]
        for _ in range(_TRIES):
            crew.finish(STEP, list(zip(own, told, strict=True)), kept, progress, "statistics")
            for parameters, folder in zip(own, folders, strict=True):
                _fetch(kept, crew, folder, parameters)
    for number, (part, parameters, folder) in enumerate(zip(each, own, folders, strict=True)):
        if kept.find(STEP, **parameters) is None:
            say(progress, f"shard {number + 1} of {shards}")
            kept.keep(STEP, {"digest": one(source, part, folder, progress=progress, **options).digest}, {}, **parameters)
    return storing.merge([folder / _STATISTICS for folder in folders], out)


def _fetch(kept: Kept, crew: Crew, folder: Path, parameters: Mapping[str, Any]) -> None:
    """What a worker left in a store. What does not arrive whole counts as not done."""
    from fewbits.executors.stores import Damaged

    done = kept.find(STEP, **parameters)
    if done and "files" in done.values and not _is_there(kept, folder, parameters):
        try:
            crew.fetch(done.values["files"], folder / _STATISTICS)
        except Damaged:
            kept.drop(STEP, **parameters)


def one(
    source: Model, samples: Samples, folder: Path, *, memory: int, hessians: bool, gradients: bool, progress: Progress[Any] = silent
) -> Statistics:
    """In a work folder of its own: killed, it goes on from there, whoever does."""
    with results.opened(folder) as own:
        found = calibration.collect(
            source, samples, folder / _STATISTICS, memory=memory, hessians=hessians, gradients=gradients, kept=own, progress=progress
        )
        own.drop_all()
    return found


def forget(kept: Kept) -> None:
    """Once the sum is where it belongs."""
    kept.drop_step(STEP)
    remove(kept.folder.parent / results.SHARDS)


def samples_of(told: Mapping[str, Any]) -> Samples:
    """As JSON says them."""
    lists = {"ids": tuple(map(tuple, told["ids"])), "sources": tuple(told["sources"]), "notes": tuple(told["notes"])}
    return Samples(**dict(told) | lists)


def _is_there(kept: Kept, folder: Path, parameters: Mapping[str, Any]) -> bool:
    done = kept.find(STEP, **parameters)
    try:
        return bool(done and Statistics(folder / _STATISTICS).digest == done.values["digest"])
    except (InputError, OSError):
        return False
