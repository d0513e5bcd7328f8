"""The coordinator's side: units handed out, results taken into the work folder, what was lost handed out again.

When `finish` returns, every result is in the work folder, as if this process had made it; what comes after does not know who did.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from fewbits.errors import InputError, MissingError
from fewbits.executors import Answer, Carrier, Unit, stores, units
from fewbits.files import sampled
from fewbits.progress import say

if TYPE_CHECKING:
    from types import TracebackType

    from fewbits.calibration.storing import Statistics
    from fewbits.kept import Kept
    from fewbits.model import Model
    from fewbits.outcomes import Known
    from fewbits.preparation import Rescaled
    from fewbits.progress import Progress

TRIES = 4  # of a unit whose worker was lost; one that takes its machine down every time is not the machine's fault
Wanted = tuple[Mapping[str, Any], Mapping[str, Any]]  # a unit's parameters and its inputs


def held_by(rows: int, cols: int) -> int:
    """Bytes at the most for a weight and its Hessians: one in float32, three in float64 while it is factored."""
    return 8 * rows * cols + 28 * cols**2


@dataclass(frozen=True)
class Crew:
    carrier: Carrier
    model: Mapping[str, Any]
    store: str | None = None
    shapes: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # of the model's weights
    _sent: dict[str, Path] = field(default_factory=dict)  # blobs of ours in the store

    @classmethod
    def of(cls, carrier: Carrier, source: Model, where: str | Path, offline: bool, store: str | None) -> Crew:
        place = str(Path(where).resolve()) if Path(where).exists() else str(where)
        files = {path.name: sampled(path) for path in source.checkpoint.files()}
        shapes = {weight.name: weight.shape for weight in source.weights}
        return cls(carrier, {"where": place, "offline": offline, "files": files, "fingerprint": source.fingerprint}, store, shapes)

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """After work that went well nothing of it stays in the store; a run that goes on finds what is there."""
        if self.store and error is None:
            for blob in self._sent:
                stores.open(self.store).remove(f"blobs/{blob}")

    def finish(self, step: str, wanted: Sequence[Wanted], kept: Kept, progress: Progress[Any], what: str) -> None:
        """Every one of these results in `kept`: those that are not there are made by the workers."""
        missing = [self._unit(step, *each, kept) for each in wanted if kept.find(step, **each[0]) is None]
        if missing:
            for _ in progress(self._finished(missing, kept, progress), len(missing), f"{what}, on workers"):
                pass

    def knowledge(self, known: Known | None, kept: Kept) -> Knowledge:
        """Where workers find what these statistics say."""
        from fewbits.calibration.importance_matrix import ImportanceMatrix
        from fewbits.calibration.storing import Statistics
        from fewbits.preparation import digest

        if known is None:
            return Knowledge(self, {})
        if isinstance(known, ImportanceMatrix):
            return Knowledge(self, {"imatrix": self.place(known.path)})
        if isinstance(known, Statistics):
            return Knowledge(self, {}, known)
        rescaled = cast("Rescaled", known)
        own = {"of": digest(rescaled)}
        factors = kept.find("factors", **own) or kept.keep("factors", {}, rescaled.rewrite.to_tensors(), **own)
        return Knowledge(self, {"factors": self.place(factors.path)}, rescaled.original)

    def place(self, path: Path) -> str:
        """An input as a worker is told it: a path that it sees too, or what it asks the store for."""
        if self.store is None:
            return str(path.resolve())
        try:
            blob = stores.open(self.store).put_blob(path)
        except stores.Damaged as failure:
            raise MissingError(f"the store fails: {failure}", "the same command goes on from what is finished") from failure
        self._sent[blob] = path
        return blob

    def fetch(self, files: Mapping[str, str], folder: Path) -> None:
        """Files that a worker put into the store, under their names."""
        assert self.store, "without a store they are where they belong"
        store = stores.open(self.store)
        folder.mkdir(parents=True, exist_ok=True)
        for name, blob in files.items():
            if Path(name).name != name:
                raise InputError(f"a worker calls a file `{name}`", "it is not a worker of this work")
            store.get_blob(blob, folder / name)
            self._sent[blob] = folder / name

    def _unit(self, step: str, parameters: Mapping[str, Any], inputs: Mapping[str, Any], kept: Kept) -> Unit:
        kept.folder.mkdir(parents=True, exist_ok=True)
        shape = self.shapes.get(parameters.get("weight", ""))
        memory = held_by(*shape) if shape else 0
        return Unit(step, kept.about, parameters, inputs, self.model, units.versions(), str(kept.folder.resolve()), self.store, memory)

    def _finished(self, missing: list[Unit], kept: Kept, progress: Progress[Any]) -> Iterator[Unit]:
        waiting, tries = deque(missing), Counter[str]()
        with closing(cast("Any", self.carrier.carry(waiting))) as answers:
            for unit, answer in answers:
                problem = self._taken(unit, answer, kept)
                if problem is None:
                    yield unit
                    continue
                tries[unit.name] += 1
                if tries[unit.name] >= TRIES:
                    look = "that worker's memory and log, and the store," if self.store else "that worker's memory and log"
                    hint = f"the same command goes on from what is finished; look at {look} first"
                    raise MissingError(f"`{unit.name}` was lost {TRIES} times, the last time so: {problem}", hint)
                say(progress, f"`{unit.name}` is done again: {problem}")
                self._send_again()
                waiting.append(unit)

    def _taken(self, unit: Unit, answer: Answer, kept: Kept) -> str | None:
        """Into `kept`, or why not. What the user can mend is raised, and so is what only we can."""
        if answer.error:
            raise (MissingError if answer.missing else InputError)(answer.error, answer.hint)
        if answer.failed:
            raise RuntimeError(f"a worker failed at `{unit.name}`:\n{answer.failed}")
        if answer.lost:
            return answer.lost
        if not self.store:
            return None if kept.take(answer.file, unit.step, **unit.parameters) else "its result did not arrive whole"
        if not answer.file.startswith(f"{kept.stem(unit.step, **unit.parameters)}-") or Path(answer.file).name != answer.file:
            return f"its result is called `{answer.file}`"
        store, path = stores.open(self.store), kept.folder / answer.file
        partial = path.with_name(f".{path.name}.partial")
        with suppress(stores.Damaged):
            store.get(f"kept/{answer.file}", partial)
            partial.replace(path)
        found = kept.take(answer.file, unit.step, **unit.parameters)
        store.remove(f"kept/{answer.file}")  # it is here, or of no use
        return None if found else "its result did not arrive whole"

    def _send_again(self) -> None:
        """A blob that arrived damaged was removed by whoever noticed."""
        for path in self._sent.values() if self.store else ():
            if path.exists():
                stores.open(cast("str", self.store)).put_blob(path)


@dataclass(frozen=True)
class Knowledge:
    """What the inputs of a unit say about statistics. A worker with a store fetches those of the weight's block, and no more."""

    crew: Crew
    shared: Mapping[str, Any]
    statistics: Statistics | None = None
    _placed: dict[Path, str] = field(default_factory=dict)

    def of(self, weight: str) -> dict[str, Any]:
        if self.statistics is None:
            return dict(self.shared)
        from fewbits.calibration import storing

        if self.crew.store is None:
            return {**self.shared, "statistics": {"folder": str(self.statistics.folder.resolve())}}
        block = self.statistics.about["weights"][weight]["block"]
        names = (storing.ABOUT, storing.file_name("input", block), storing.file_name("gradient", block))
        there = [path for path in (self.statistics.folder / name for name in names) if path.is_file()]
        files = {path.name: self._blob(path) for path in there}
        return {**self.shared, "statistics": {"files": files}}

    def _blob(self, path: Path) -> str:
        if path not in self._placed:
            self._placed[path] = self.crew.place(path)
        return self._placed[path]
