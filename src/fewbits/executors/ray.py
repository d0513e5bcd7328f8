"""Workers of a Ray cluster. Ray finds a place for each unit; what it loses (a process, a machine) is reported and handed out again."""

from __future__ import annotations

import logging
import os
import socket
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import ray
from ray.exceptions import OutOfMemoryError, RayError, RayTaskError, RuntimeEnvSetupError

from fewbits.errors import MissingError
from fewbits.executors import Answer, Unit, units

_AHEAD = 2  # units under way for each that can run: the next one is there when a worker is free, and memory holds few
_PATIENCE = 10.0  # seconds
_FAILURES = (OSError, RuntimeError, ValueError, ImportError)
_GLANCE = 10.0  # seconds after which the cluster is looked at again: machines come and go


class Ray:
    def __init__(self, address: str | None) -> None:
        self._mine = not ray.is_initialized()
        if self._mine:
            _connect(address)
        self._run = ray.remote(max_retries=0, scheduling_strategy="SPREAD")(units.run)  # what is lost, the crew hands out again

    def carry(self, waiting: deque[Unit]) -> Iterator[tuple[Unit, Answer]]:
        under_way: dict[Any, Unit] = {}
        try:
            while waiting or under_way:
                room = _AHEAD * _room(waiting[0].cores) if waiting else 0
                most = max(_nodes("memory"), default=0)  # a unit that needs more than any machine has is tried all the same
                while waiting and len(under_way) < room:
                    unit = waiting.popleft()
                    taken = {"num_cpus": unit.cores, "memory": min(unit.memory, most) or None, "name": unit.name}
                    under_way[self._run.options(**taken).remote(asdict(unit))] = unit
                for done in ray.wait(list(under_way), num_returns=1, timeout=_GLANCE)[0]:
                    yield under_way.pop(done), _answer(done)
        finally:
            for each in under_way:
                ray.cancel(each, force=True)

    def close(self) -> None:
        if self._mine:
            ray.shutdown()


def _connect(address: str | None) -> None:
    where = address or os.environ.get("RAY_ADDRESS")
    client = where is not None and "://" in where
    logging.getLogger("ray").setLevel(logging.ERROR)
    try:
        if client:
            _knock(str(where))
        try:
            _init(where)
        except _FAILURES:
            if not client:
                raise
            _init(where)  # the server that a cluster starts for each client sometimes does not come up (gRPC and fork, Ray 2.60)
    except _FAILURES as failure:
        reason = str(failure).strip().splitlines()[0] if str(failure).strip() else type(failure).__name__
        hint = "`ray status` on its head node says whether it runs; ray:// needs the port of its client server, 10001 by default"
        raise MissingError(f"no Ray cluster answers at `{where or 'this machine'}`: {reason}", hint) from failure


def _init(where: str | None) -> None:
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    try:
        ray.init(address=where, **quiet) if where else ray.init(include_dashboard=False, **quiet)
    except _FAILURES:
        with suppress(Exception):
            ray.shutdown()  # what a failed attempt leaves is in the way of the next
        raise


def _knock(address: str) -> None:
    """Ray itself waits half a minute for a machine that is not there."""
    host, _, port = address.partition("://")[2].rpartition(":")
    socket.create_connection((host, int(port)), timeout=_PATIENCE).close()


def _room(cores: int) -> int:
    """How many units of so many processors run at once. A unit that no machine can run would wait forever."""
    machines = _nodes("CPU")
    largest = max(machines, default=0)
    if 0 < largest < cores:
        message = f"a unit takes {cores} processors, and the largest machine of the cluster has {largest}"
        raise MissingError(message, f"OMP_NUM_THREADS={largest} in front of the command: the bytes depend on it")
    return max(1, sum(each // cores for each in machines))


def _nodes(resource: str) -> list[int]:
    nodes: list[dict[str, Any]] = ray.nodes()
    return [int(node["Resources"].get(resource, 0)) for node in nodes if node["Alive"]]


def _answer(done: Any) -> Answer:
    try:
        return Answer(**ray.get(done))
    except OutOfMemoryError as failure:
        return Answer(lost=f"Ray ended its worker for lack of memory: {_first_line(failure)}")
    except RuntimeEnvSetupError as failure:
        return Answer(error=f"a worker could not be set up: {_first_line(failure)}", hint="install fewbits on all nodes", missing=True)
    except RayTaskError as failure:  # `units.run` raises nothing itself: it was not there to be called
        if "No module named" in str(failure):
            return Answer(error="a node of the cluster has no fewbits", hint="install the same fewbits on all nodes", missing=True)
        return Answer(failed=str(failure))
    except RayError as failure:  # its process or its machine is gone
        return Answer(lost=f"{type(failure).__name__}: {_first_line(failure)}")


def _first_line(failure: Exception) -> str:
    return (str(failure).strip().splitlines() or [""])[0]
