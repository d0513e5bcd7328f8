"""Where the work is done: in this process, in other processes, or on other machines. The bytes are the same.

unit.py     the messages: a unit of work that goes to a worker, the answer that comes back, both plain JSON
crew.py     the coordinator: hands units out, takes their results into the cache, hands lost units out again
worker.py   the worker's side: calls the function that a unit names, and stores its result
local.py    carries units to processes on this machine; local_worker.py is the program that each of them runs
ray.py      carries units to a Ray cluster
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fewbits.errors import InputError, MissingError

if TYPE_CHECKING:
    from pathlib import Path

    from fewbits.store.executors.crew import Crew, Source
    from fewbits.store.executors.unit import Carrier


AUTO, LOCAL = "auto", "local"
_HINT = "auto, local (this process), local:4 (so many processes), ray, or ray://HOST:PORT"
_MOST = 1024  # local processes


@dataclass(frozen=True)
class Chosen:
    """`--executor` and `--store`, as they were given."""

    kind: str
    workers: int = 0  # local processes
    address: str | None = None  # of a Ray cluster; None: the one that RAY_ADDRESS names, or one on this machine
    store: str | None = None
    by_itself: bool = False  # nobody asked for these processes: this one goes on alone where they fail

    @property
    def in_process(self) -> bool:
        return self.kind == LOCAL and not self.workers

    def hiring(self, processes: int) -> Chosen:
        """With so many local processes, where it was left open how many."""
        return replace(self, workers=processes if processes > 1 else 0) if self.by_itself else self


def parse(executor: str, store: str | None = None, chains: Mapping[str, object] | None = None) -> Chosen:
    """Refuses, before any work, an unknown executor and one that is not installed. `chains`: options that make each weight depend on the
    ones before, and whether they were given: they need a single process."""
    executor = executor if executor.lower().startswith("ray://") else executor.lower()
    if executor in (AUTO, LOCAL):
        if store is not None:
            raise InputError("`--store` goes with workers", "give them too, such as `--executor local:2` or `--executor ray`")
        return Chosen(LOCAL, by_itself=executor == AUTO)
    chosen = _parsed(executor, store)
    if name := next((name for name, given in (chains or {}).items() if given), None):
        raise InputError(f"`{name}` goes block by block, each after the one before", "leave `--executor` out: it runs in this process")
    if store is not None:
        from fewbits.store import remote

        remote.check(store)
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
def open_crew(chosen: Chosen, source: Source, where: str | Path, offline: bool) -> Iterator[Crew | None]:
    """The workers, or None if this process does everything. `where`: the model as the user named it."""
    if chosen.in_process:
        yield None
        return
    from fewbits.store.executors.crew import Crew

    carrier = _carrier(chosen)
    try:
        with Crew.of(carrier, source, where, offline, chosen) as crew:
            yield crew
    finally:
        carrier.close()


def _carrier(chosen: Chosen) -> Carrier:
    if chosen.kind == "ray":
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # before the import: Ray would send usage statistics
        from fewbits.store.executors.ray import Ray

        return Ray(chosen.address)
    from fewbits.store.executors.local import Processes

    return Processes(chosen.workers)
