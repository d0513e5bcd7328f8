"""The messages between coordinator and workers: a unit of work, and the answer to it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Unit:
    """One piece of work, as JSON carries it to a worker."""

    step: str  # how the file name of its result begins
    function: str  # makes the result: "package.module:name"
    about: Mapping[str, Any]  # together with `parameters`, all that the result depends on and is named by
    parameters: Mapping[str, Any]
    inputs: Mapping[str, Any]  # paths or blobs of input files, and values that follow from the above
    model: Mapping[str, Any]  # its path or name, the sampled hashes of its files, its fingerprint
    versions: Mapping[str, str]  # of fewbits, torch and transformers, for a readable error where they differ
    folder: str  # the cache folder for its result, if all machines share it
    store: str | None = None  # the store for its result, if they do not
    memory: int = 0  # bytes that it holds at the most, estimated from the shape of its weight
    one_thread: bool = False  # a row of the sensitivity table; error feedback in a narrow weight

    @property
    def name(self) -> str:
        return f"{self.step} {self.parameters.get('weight', self.parameters.get('shard', ''))}".strip()

    @property
    def cores(self) -> int:
        return 1 if self.one_thread else int(self.about["machine"][1])


@dataclass(frozen=True)
class Answer:
    """The file name of the result, or why there is none."""

    file: str = ""
    error: str = ""  # one that the user can mend, with a hint
    hint: str = ""
    missing: bool = False
    failed: str = ""  # the traceback of a bug in fewbits
    lost: str = ""  # the worker died, or its result was damaged: the unit is tried again


class Carrier(Protocol):
    """Brings units to workers and answers back."""

    def carry(self, waiting: deque[Unit]) -> Iterator[tuple[Unit, Answer]]:
        """Takes units from the left until none waits and none is under way. Units may be added meanwhile; answers come in any order.
        If the iterator is closed early, units under way are given up."""

    def close(self) -> None: ...
