"""Calibration in shards: each part of the samples goes through the whole model by itself, and their statistics are added in order.

The result depends on the number of shards, because sums of sums round differently, and never on which process ran them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits.calibration import collection
from fewbits.calibration.collection import MEMORY
from fewbits.calibration.folder import Statistics, merge
from fewbits.calibration.text.samples import Samples, checksum
from fewbits.errors import InputError
from fewbits.progress import Progress, say, silent
from fewbits.store.cache import SHARDS, Cache, hash_of, open_cache
from fewbits.store.files import remove

if TYPE_CHECKING:
    from fewbits.model import Model
    from fewbits.store.executors.crew import Crew

STEP = "shard"
UNIT = "fewbits.calibration.units:shard"  # the function that a worker calls
_STATISTICS = "statistics"
_TRIES = 2  # at fetching a shard from a store; then this process makes it


@dataclass(frozen=True)
class CollectOptions:
    """What `collection.collect` is asked for; a worker gets them as JSON."""

    memory: int = MEMORY
    hessians: bool = True
    gradients: bool = True


def check_shards(samples: Samples | None, count: int) -> None:
    """Checks, before any work, that the samples can be split into so many shards."""
    if count > 1 and samples is None:
        raise InputError(f"`--shards {count}` splits the text of a calibration, and there is none", "leave `--shards` out")
    if samples is not None:
        split_samples(samples, count)


def split_samples(samples: Samples, count: int) -> list[Samples]:
    if count == 1:
        return [samples]
    if not 1 <= count <= len(samples.ids) // 2:  # statistics need two halves, in every shard
        hint = f"at most {len(samples.ids) // 2}: each part needs two samples" if len(samples.ids) > 1 else "give more text"
        raise InputError(f"`--shards {count}`: there are {len(samples.ids)} samples", hint)
    ends = [len(samples.ids) * i // count for i in range(count + 1)]
    slices = [slice(start, end) for start, end in pairwise(ends)]
    return [
        replace(samples, ids=samples.ids[s], sources=samples.sources[s], domains=samples.domains[s], digest=checksum(samples.ids[s]))
        for s in slices
    ]


def collect_shards(
    source: Model,
    samples: Samples,
    out: Path,
    shards: int,
    options: CollectOptions,
    *,
    cache: Cache,
    crew: Crew | None = None,
    progress: Progress[Any] = silent,
) -> Statistics:
    """Shard after shard in this process, or each by a worker of the crew. A finished shard is not repeated after an interruption."""
    parts, work = split_samples(samples, shards), cache.folder.parent / SHARDS
    cache = cache.of(source=source.fingerprint, hessians=options.hessians, gradients=options.gradients)
    keys = [{STEP: f"{number + 1} of {shards}", "text": hash_of(part.ids)} for number, part in enumerate(parts)]
    folders = [work / f"{number + 1}-of-{shards}" for number in range(shards)]
    for key, folder in zip(keys, folders, strict=True):
        if cache.find(STEP, **key) and not _is_there(cache, folder, key):
            cache.drop(STEP, **key)
    if crew:
        pairs = zip(parts, folders, strict=True)
        inputs = [{"samples": asdict(part), "folder": str(folder.resolve()), "options": asdict(options)} for part, folder in pairs]
        for _ in range(_TRIES):
            crew.finish(STEP, UNIT, list(zip(keys, inputs, strict=True)), cache, progress, "statistics")
            for key, folder in zip(keys, folders, strict=True):
                _fetch(cache, crew, folder, key)
    for number, (part, key, folder) in enumerate(zip(parts, keys, folders, strict=True)):
        if cache.find(STEP, **key) is None:
            say(progress, f"shard {number + 1} of {shards}")
            cache.keep(STEP, {"digest": collect_shard(source, part, folder, options, progress).digest}, {}, **key)
    return merge([folder / _STATISTICS for folder in folders], out)


def _fetch(cache: Cache, crew: Crew, folder: Path, key: Mapping[str, Any]) -> None:
    """Gets the statistics that a worker put into a store. A shard that arrives damaged counts as not done."""
    from fewbits.store.remote import Damaged

    done = cache.find(STEP, **key)
    if done and "files" in done.values and not _is_there(cache, folder, key):
        try:
            crew.fetch(done.values["files"], folder / _STATISTICS)
        except Damaged:
            cache.drop(STEP, **key)


def collect_shard(source: Model, samples: Samples, folder: Path, options: CollectOptions, progress: Progress[Any] = silent) -> Statistics:
    """One shard, with a work folder of its own: after an interruption any process can resume from there."""
    with open_cache(folder) as cache:
        statistics = collection.collect(source, samples, folder / _STATISTICS, cache=cache, progress=progress, **asdict(options))
        cache.drop_all()
    return statistics


def drop_shards(cache: Cache) -> None:
    """Removes the statistics of the shards, once their sum is written."""
    cache.drop_step(STEP)
    remove(cache.folder.parent / SHARDS)


def samples_from_json(content: Mapping[str, Any]) -> Samples:
    lists = {"ids": tuple(map(tuple, content["ids"])), "sources": tuple(content["sources"]), "notes": tuple(content["notes"])}
    lists["domains"] = tuple(content["domains"])
    return Samples(**dict(content) | lists)


def _is_there(cache: Cache, folder: Path, key: Mapping[str, Any]) -> bool:
    done = cache.find(STEP, **key)
    try:
        return bool(done and Statistics(folder / _STATISTICS).digest == done.values["digest"])
    except (InputError, OSError):
        return False
