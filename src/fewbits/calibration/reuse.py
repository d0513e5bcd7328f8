"""Statistics for a run: the ones it was given, those of an earlier run over the same model and text, or new ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits.calibration import collection
from fewbits.calibration.collector import STEPS
from fewbits.calibration.folder import ABOUT, Statistics
from fewbits.calibration.importance_matrix import ImportanceMatrix
from fewbits.calibration.matched import MatchedStatistics
from fewbits.calibration.shards import CollectOptions, collect_shards, drop_shards
from fewbits.errors import InputError
from fewbits.model.gguf.model import GgufModel
from fewbits.progress import say, silent
from fewbits.store.cache import hash_of

if TYPE_CHECKING:
    from fewbits.calibration.text.samples import Samples
    from fewbits.model import Model
    from fewbits.progress import Progress
    from fewbits.store.cache import Cache
    from fewbits.store.executors.crew import Crew


def given(path: Path, source: Model, subject: Model) -> Statistics | ImportanceMatrix:
    """Statistics that the user names: a folder of `fewbits calibrate`, or an importance matrix of llama.cpp. They are of the source, and
    asked for the weights of `subject`, which may be the same model as llama.cpp lays it out."""
    if path.is_file():
        return ImportanceMatrix(path, subject)
    statistics = Statistics(Path(path)).expect(source.weights)
    if statistics.model_sha256 != source.fingerprint:
        raise InputError(f"`{path}` holds statistics of another model", "calibrate this one: leave `--stats` out")
    return matched(statistics, subject)


def matched(statistics: Statistics, subject: Model) -> Statistics:
    """The same statistics for the weights of `subject`."""
    return MatchedStatistics(statistics, subject) if isinstance(subject, GgufModel) else statistics


def collected(
    source: Model,
    samples: Samples,
    folder: Path,
    cache: Cache,
    *,
    memory: int,
    shards: int = 1,
    crew: Crew | None = None,
    progress: Progress[Any] = silent,
) -> Statistics:
    """Statistics of these samples in `folder`: from an earlier run if they are there, else collected now, by the crew if there are
    several shards."""

    def collect() -> Statistics:
        if shards > 1:
            return collect_shards(source, samples, folder, shards, CollectOptions(memory), cache=cache, crew=crew, progress=progress)
        return collection.collect(source, samples, folder, memory=memory, cache=cache, progress=progress)

    key = {"source": source.fingerprint, "text": hash_of(samples.ids), "shards": shards}
    statistics = once("statistics", folder, cache, key, collect, progress)
    drop_shards(cache)
    return statistics


def once(
    step: str, folder: Path, cache: Cache, key: Mapping[str, Any], collect: Callable[[], Statistics], progress: Progress[Any]
) -> Statistics:
    """The statistics in `folder` if an earlier run made them with the same key, else what `collect` returns. After that nothing resumes
    within the pass, so the states between blocks are removed from the cache."""
    done = cache.find(step, **key)
    if done is not None and (folder / ABOUT).is_file():
        with suppress(InputError):  # damaged: collected again
            statistics = Statistics(folder)
            if statistics.digest == done.values["digest"]:
                say(progress, "resuming: the statistics of this text are there")
                return statistics
    statistics = collect()
    cache.keep(step, {"digest": statistics.digest}, {}, **key)
    for each in STEPS:
        cache.drop_step(each)
    return statistics
