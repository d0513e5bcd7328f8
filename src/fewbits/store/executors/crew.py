"""The coordinator's side: hands units out, takes their results into the cache, hands lost units out again.

When `finish` returns, every result is in the cache, as if this process had made it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from fewbits.errors import InputError, MissingError
from fewbits.progress import say
from fewbits.store import remote, threads
from fewbits.store.executors import worker
from fewbits.store.executors.unit import Answer, Carrier, Unit
from fewbits.store.files import sampled

if TYPE_CHECKING:
    from types import TracebackType

    from fewbits.progress import Progress
    from fewbits.store.cache import Cache
    from fewbits.store.executors import Chosen

TRIES = 4  # of a unit whose worker is lost: one that is lost every time is itself the cause
Wanted = tuple[Mapping[str, Any], Mapping[str, Any]]  # the parameters of a unit and its inputs


def held_by(rows: int, cols: int) -> int:
    """The most bytes that a weight and its Hessians take: one Hessian in float32, three in float64 while it is factored."""
    return 8 * rows * cols + 28 * cols**2


class Source(Protocol):
    """What workers need of a model: `model.Model`, seen from below."""

    @property
    def checkpoint(self) -> Any: ...

    @property
    def weights(self) -> Any: ...

    @property
    def fingerprint(self) -> str: ...


@dataclass(frozen=True)
class Crew:
    carrier: Carrier
    model: Mapping[str, Any]
    store: str | None = None
    shapes: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # of the weights of the model
    by_itself: int = 0  # so many processes that nobody asked for: what they cannot do is left to this one
    _failed: list[str] = field(default_factory=list)  # why they are not asked again
    _sent: dict[str, Path] = field(default_factory=dict)  # blob in the store -> the file that it was uploaded from

    @classmethod
    def of(cls, carrier: Carrier, source: Source, where: str | Path, offline: bool, chosen: Chosen) -> Crew:
        place = str(Path(where).resolve()) if Path(where).exists() else str(where)
        files = {path.name: sampled(path) for path in source.checkpoint.files()}
        shapes = {weight.name: weight.shape for weight in source.weights}
        about = {"where": place, "offline": offline, "files": files, "fingerprint": source.fingerprint}
        return cls(carrier, about, chosen.store, shapes, chosen.workers if chosen.by_itself else 0)

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Removes our inputs from the store after a run that succeeded; a failed run leaves them for the one that resumes."""
        if self.store and error is None:
            for blob in self._sent:
                remote.open(self.store).remove(f"blobs/{blob}")

    def finish(self, step: str, function: str, wanted: Sequence[Wanted], cache: Cache, progress: Progress[Any], what: str) -> None:
        """Has workers make those of the wanted results that are not in `cache`. Without an order for them, weights that need all threads
        stay, and all where workers fail."""
        missing = [self._unit(step, function, *each, cache) for each in wanted if cache.find(step, **each[0]) is None]
        if self.by_itself:
            missing = [unit for unit in missing if not threads.are_all_used(self.shapes[unit.parameters["weight"]])]
            if self._failed or len(missing) < 2 * self.by_itself:
                return
            say(progress, f"{what} in {self.by_itself} processes (`--executor local`: in this one)")
        if not missing:
            return
        try:
            for _ in progress(self._finished(missing, cache, progress), len(missing), what):
                pass
        except OSError as failure:
            if not self.by_itself:
                raise
            self._alone(str(failure), progress)  # no process may be started here

    def place(self, path: Path) -> str:
        """How a unit names an input file: by a path that workers share, or by its blob in the store, to which it is uploaded."""
        if self.store is None:
            return str(path.resolve())
        try:
            blob = remote.open(self.store).put_blob(path)
        except remote.Damaged as failure:
            raise MissingError(f"the store fails: {failure}", "the same command resumes from what is finished") from failure
        self._sent[blob] = path
        return blob

    def fetch(self, files: Mapping[str, str], folder: Path) -> None:
        """Downloads files that a worker put into the store. `files`: name -> blob."""
        assert self.store, "without a store, workers write them to the shared folder"
        store = remote.open(self.store)
        folder.mkdir(parents=True, exist_ok=True)
        for name, blob in files.items():
            if Path(name).name != name:
                raise InputError(f"a worker calls a file `{name}`", "it is not a worker of this run")
            store.get_blob(blob, folder / name)
            self._sent[blob] = folder / name

    def _unit(self, step: str, function: str, parameters: Mapping[str, Any], inputs: Mapping[str, Any], cache: Cache) -> Unit:
        cache.folder.mkdir(parents=True, exist_ok=True)
        shape = self.shapes.get(parameters.get("weight", ""))
        memory = held_by(*shape) if shape else 0
        folder = str(cache.folder.resolve())
        fed_back = step == "weight" and parameters["method"] != "rtn"  # rounding alone shares its rows among threads
        one = step == "row" or (fed_back and shape is not None and not threads.are_all_used(shape))
        return Unit(step, function, cache.about, parameters, inputs, self.model, worker.versions(), folder, self.store, memory, one)

    def _finished(self, missing: list[Unit], cache: Cache, progress: Progress[Any]) -> Iterator[Unit]:
        waiting, tries = deque(missing), Counter[str]()
        with closing(cast("Any", self.carrier.carry(waiting))) as answers:
            for unit, answer in answers:
                if self.by_itself and (reason := answer.error or answer.failed or answer.lost):
                    self._alone(reason, progress)  # a mistake of the user is reported when this process comes to it
                    return
                problem = self._taken(unit, answer, cache)
                if problem is None:
                    yield unit
                    continue
                if self.by_itself:
                    self._alone(problem, progress)
                    return
                tries[unit.name] += 1
                if tries[unit.name] >= TRIES:
                    look = "that worker's memory and log, and the store," if self.store else "that worker's memory and log"
                    hint = f"the same command resumes from what is finished; look at {look} first"
                    raise MissingError(f"`{unit.name}` was lost {TRIES} times, the last time so: {problem}", hint)
                say(progress, f"`{unit.name}` is done again: {problem}")
                self._send_again()
                waiting.append(unit)

    def _alone(self, reason: str, progress: Progress[Any]) -> None:
        self._failed.append(reason)
        self.carrier.close()  # those that are left hold memory, of which there may be too little
        say(progress, f"worker processes fail ({reason.strip().splitlines()[-1]}): this one goes on alone")

    def _taken(self, unit: Unit, answer: Answer, cache: Cache) -> str | None:
        """Takes the result of a unit into `cache`; returns why that failed, if it is worth another try. Errors that the worker reports are
        raised."""
        if answer.error:
            raise (MissingError if answer.missing else InputError)(answer.error, answer.hint)
        if answer.failed:
            raise RuntimeError(f"a worker failed at `{unit.name}`:\n{answer.failed}")
        if answer.lost:
            return answer.lost
        if not self.store:
            return None if cache.take(answer.file, unit.step, **unit.parameters) else "its result did not arrive whole"
        if not answer.file.startswith(f"{cache.stem(unit.step, **unit.parameters)}-") or Path(answer.file).name != answer.file:
            return f"its result is called `{answer.file}`"
        store, path = remote.open(self.store), cache.folder / answer.file
        partial = path.with_name(f".{path.name}.partial")
        with suppress(remote.Damaged):
            store.get(f"cache/{answer.file}", partial)
            partial.replace(path)
        result = cache.take(answer.file, unit.step, **unit.parameters)
        store.remove(f"cache/{answer.file}")  # it was fetched, or is damaged
        return None if result else "its result did not arrive whole"

    def _send_again(self) -> None:
        """Uploads inputs that are missing: a worker that fetched a damaged blob has removed it."""
        for path in self._sent.values() if self.store else ():
            if path.exists():
                remote.open(cast("str", self.store)).put_blob(path)
