"""Who does the work: this process, other processes, or other machines. The bytes are the same.

units.py    what is handed out: pure functions, files in and files out, each told by plain JSON
crew.py     hands units out, takes their results into the work folder, hands out again what was lost
local.py    workers that are processes of this machine; worker.py is such a process
ray.py      workers of a Ray cluster
stores.py   results through an fsspec store, where machines share no folder
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from fewbits.errors import InputError, MissingError

if TYPE_CHECKING:
    from pathlib import Path

    from fewbits.executors.crew import Crew
    from fewbits.model import Model

LOCAL = "local"
_HINT = "local (this process), local:4 (so many processes), ray, or ray://HOST:PORT"
_MOST = 1024  # processes of one machine


@dataclass(frozen=True)
class Unit:
    """One piece of work as a worker is told it: nothing but what JSON can say."""

    step: str  # what units.py calls it, and how its result's name begins
    about: Mapping[str, Any]  # with `parameters`: all that its result is made from, and is named by
    parameters: Mapping[str, Any]
    inputs: Mapping[str, Any]  # where files lie, and what follows from the above
    model: Mapping[str, Any]  # where it lies, its files' sizes, its hash
    versions: Mapping[str, str]  # to say what differs, where something does
    folder: str  # for its result, if all machines see it
    store: str | None = None  # for its result, if they do not
    memory: int = 0  # bytes that it holds at the most, as far as they can be counted before

    @property
    def name(self) -> str:
        return f"{self.step} {self.parameters.get('weight', self.parameters.get('shard', ''))}".strip()

    @property
    def cores(self) -> int:
        """Rows are measured on one thread each, wherever they are."""
        return 1 if self.step == "row" else int(self.about["machine"][1])


@dataclass(frozen=True)
class Answer:
    """What comes back: the name of the result's file, or why there is none."""

    file: str = ""
    error: str = ""  # of the user's input, with a hint
    hint: str = ""
    missing: bool = False
    failed: str = ""  # a traceback: a mistake of ours
    lost: str = ""  # the worker, not the work: worth another try


class Carrier(Protocol):
    """Brings units to workers and answers back."""

    def carry(self, waiting: deque[Unit]) -> Iterator[tuple[Unit, Answer]]:
        """Takes from the left until nothing is left and nothing is under way; in between, units may be added. Answers come in any order.
        Closed early, what is under way is given up."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class Chosen:
    """`--executor` and `--store`, as they were given."""

    kind: str
    workers: int = 0  # of local processes
    address: str | None = None  # of a Ray cluster; None: the one that RAY_ADDRESS names, or one on this machine
    store: str | None = None

    @property
    def in_process(self) -> bool:
        return self.kind == LOCAL and not self.workers


def parse(executor: str, store: str | None = None, chains: Mapping[str, object] | None = None) -> Chosen:
    """Refused before any work: what is no executor, what is not installed. `chains`: options that make each weight depend on others,
    and whether they were given."""
    executor = executor if executor.lower().startswith("ray://") else executor.lower()
    if executor == LOCAL:
        if store is not None:
            raise InputError("`--store` goes with workers", "give them too, such as `--executor local:2` or `--executor ray`")
        return Chosen(LOCAL)
    chosen = _parsed(executor, store)
    if name := next((name for name, given in (chains or {}).items() if given), None):
        raise InputError(f"`{name}` goes block by block, each after the one before", "leave `--executor` out: it runs in this process")
    if store is not None:
        from fewbits.executors import stores

        stores.check(store)
    return chosen


def _parsed(executor: str, store: str | None) -> Chosen:
    if number := re.fullmatch(r"local:(\d+)", executor):
        workers = int(number[1])
        if not 1 <= workers <= _MOST:
            raise InputError(f"`--executor {executor}` asks for {workers} processes", f"from 1 to {_MOST}")
        return Chosen(LOCAL, workers, store=store)
    if executor == "ray" or re.fullmatch(r"ray://[^\s/]+:\d+", executor):
        if importlib.util.find_spec("ray") is None:
            raise MissingError(f"`--executor {executor}` needs Ray, which is not installed", "pip install 'fewbits[ray]'")
        return Chosen("ray", address=None if executor == "ray" else executor, store=store)
    raise InputError(f"`--executor {executor}` is no executor", _HINT)


@contextmanager
def opened(chosen: Chosen, source: Model, where: str | Path, offline: bool) -> Iterator[Crew | None]:
    """The workers, as long as they are needed; None: this process does everything. `where`: the model, as it was named."""
    if chosen.in_process:
        yield None
        return
    from fewbits.executors.crew import Crew

    carrier = _carrier(chosen)
    try:
        with Crew.of(carrier, source, where, offline, chosen.store) as found:
            yield found
    finally:
        carrier.close()


def _carrier(chosen: Chosen) -> Carrier:
    if chosen.kind == "ray":
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # before it is imported: it would report to its makers
        from fewbits.executors.ray import Ray

        return Ray(chosen.address)
    from fewbits.executors.local import Processes

    return Processes(chosen.workers)
