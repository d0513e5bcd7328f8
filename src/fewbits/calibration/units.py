"""The part of calibration that runs in workers, and how a worker gets the model and the statistics of a unit of work."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits import model as models
from fewbits.calibration.folder import ABOUT, Statistics, files_of
from fewbits.calibration.shards import CollectOptions, collect_shard, samples_from_json
from fewbits.errors import InputError
from fewbits.store import remote
from fewbits.store.cache import hash_of
from fewbits.store.executors.unit import Unit
from fewbits.store.executors.worker import Made, scratch
from fewbits.store.files import remove, sampled

if TYPE_CHECKING:
    from fewbits.model import Model
    from fewbits.model.weights import Weight
    from fewbits.store.executors.crew import Crew

_PATIENCE = 180.0  # seconds to wait for the lock of a machine that is gone; NFS releases it after 90


def shard(unit: Unit) -> Made:
    """Collects one shard. Its folder is its work folder: if a worker is killed, the next one that sees the same folder resumes."""
    samples, options = samples_from_json(unit.inputs["samples"]), CollectOptions(**unit.inputs["options"])
    folder = scratch() / "shard" if unit.store else Path(unit.inputs["folder"])
    statistics = _patiently(lambda: collect_shard(model_of(unit)[0], samples, folder, options))
    made: dict[str, Any] = {"digest": statistics.digest}
    if unit.store:
        store = remote.open(unit.store)
        made["files"] = {path.name: store.put_blob(path) for path in sorted(statistics.folder.iterdir())}
        remove(folder)
    return made, {}


def _patiently(work: Callable[[], Statistics]) -> Statistics:
    """Waits while the folder is locked by a lost worker, until its system or the file server releases the lock."""
    end = time.monotonic() + _PATIENCE
    while True:
        try:
            return work()
        except InputError as failure:
            if "is in use" not in failure.args[0] or time.monotonic() > end:
                raise
            time.sleep(2.0)


def weight_of(unit: Unit) -> tuple[Model, Weight]:
    model, weights = model_of(unit)
    return model, weights[unit.parameters["weight"]]


def model_of(unit: Unit) -> tuple[Model, dict[str, Weight]]:
    where = unit.model
    return _opened(where["where"], where["offline"], where["fingerprint"], tuple(sorted(where["files"].items())))


@lru_cache(maxsize=1)
def _opened(where: str, offline: bool, fingerprint: str, files: tuple[tuple[str, str], ...]) -> tuple[Model, dict[str, Weight]]:
    """Files are compared by samples of their content: hashing a large model in every worker would take longer than the work."""
    model = models.open(where, offline)
    here = {path.name: sampled(path) for path in model.checkpoint.files()}
    if here != dict(files):
        differs = sorted(name for name in {*here, *dict(files)} if here.get(name) != dict(files).get(name))
        hint = "the same files must lie at the same path on all nodes"
        raise InputError(f"`{where}` is another model here: {', '.join(differs[:3])}", hint)
    vars(model)["fingerprint"] = fingerprint  # the cached property, not computed here
    return model, {weight.name: weight for weight in model.weights}


def statistics_of(unit: Unit, model: Model) -> Statistics:
    sent = unit.inputs["statistics"]
    folder = sent["folder"] if unit.store is None else _gathered(unit.store, tuple(sorted(sent["files"].items())))
    return _read(str(folder), unit.about.get("statistics")).expect(model.weights)


@lru_cache(maxsize=2)
def _read(folder: str, digest: str | None) -> Statistics:  # noqa: ARG001 - part of the key of the cache
    return Statistics(Path(folder))


def _gathered(store: str, files: tuple[tuple[str, str], ...]) -> Path:
    """A folder with the files of one block, fetched from the store. Those of two blocks stay, because the next units mostly need them."""
    folder = scratch() / "statistics" / hash_of(files)[:16]
    if not folder.is_dir():
        others = sorted(folder.parent.iterdir(), key=lambda path: path.stat().st_mtime) if folder.parent.is_dir() else []
        for old in others[:-1]:
            remove(old)
        partial = folder.with_suffix(".partial")
        remove(partial)
        partial.mkdir(parents=True)
        for name, blob in files:
            remote.open(store).get_blob(blob, partial / name)
        partial.rename(folder)
    return folder


@dataclass(frozen=True)
class SentStatistics:
    """Adds to the inputs of a unit where its statistics are: a folder, or in a store the files of the weight's block only."""

    crew: Crew
    shared: Mapping[str, Any]
    statistics: Statistics | None = None
    _placed: dict[Path, str] = field(default_factory=dict)

    def of(self, weight: str) -> dict[str, Any]:
        if self.statistics is None:
            return dict(self.shared)
        if self.crew.store is None:
            return {**self.shared, "statistics": {"folder": str(self.statistics.folder.resolve())}}
        block = self.statistics.about["weights"][weight]["block"]
        files = {path.name: self._blob(path) for path in (self.statistics.folder / ABOUT, *files_of(self.statistics.folder, block))}
        return {**self.shared, "statistics": {"files": files}}

    def _blob(self, path: Path) -> str:
        if path not in self._placed:
            self._placed[path] = self.crew.place(path)
        return self._placed[path]
