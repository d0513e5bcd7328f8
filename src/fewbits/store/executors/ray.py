"""Workers of a Ray cluster. Ray chooses a node for each unit; a unit whose process or node dies is reported as lost."""

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
from fewbits.store.executors import worker
from fewbits.store.executors.unit import Answer, Unit
from fewbits.store.untrusted import first_line

_AHEAD = 2  # units submitted for each that can run: a free worker has its next unit at once, and few wait in memory
_CONNECT_SECONDS = 10.0
_FAILURES = (OSError, RuntimeError, ValueError, ImportError)
_REFRESH_SECONDS = 10.0  # then the size of the cluster is asked for again: nodes come and go


class Ray:
    def __init__(self, address: str | None) -> None:
        self._mine = not ray.is_initialized()
        if self._mine:
            _connect(address)
        self._run = ray.remote(max_retries=0, scheduling_strategy="SPREAD")(worker.run)  # `Crew` retries lost units

    def carry(self, waiting: deque[Unit]) -> Iterator[tuple[Unit, Answer]]:
        under_way: dict[Any, Unit] = {}
        try:
            while waiting or under_way:
                room = _AHEAD * _room(waiting[0].cores) if waiting else 0
                most = max(_nodes("memory"), default=0)  # a unit that needs more than any node has is tried all the same
                while waiting and len(under_way) < room:
                    unit = waiting.popleft()
                    options = {"num_cpus": unit.cores, "memory": min(unit.memory, most) or None, "name": unit.name}
                    under_way[self._run.options(**options).remote(asdict(unit))] = unit
                for done in ray.wait(list(under_way), num_returns=1, timeout=_REFRESH_SECONDS)[0]:
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
            _init(where)  # once more: the server that a cluster starts for each client sometimes fails to start (gRPC and fork, Ray 2.60)
    except _FAILURES as failure:
        hint = "`ray status` on its head node says whether it runs; ray:// needs the port of its client server, 10001 by default"
        raise MissingError(f"no Ray cluster answers at `{where or 'this machine'}`: {first_line(failure)}", hint) from failure


def _init(where: str | None) -> None:
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    try:
        ray.init(address=where, **quiet) if where else ray.init(include_dashboard=False, **quiet)
    except _FAILURES:
        with suppress(Exception):
            ray.shutdown()  # a failed attempt would block the next one
        raise


def _knock(address: str) -> None:
    """Tries the port first: Ray itself waits half a minute for a machine that does not answer."""
    host, _, port = address.partition("://")[2].rpartition(":")
    socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()


def _room(cores: int) -> int:
    """How many units of `cores` processors run at once. Raises where no node is large enough: the unit would wait forever."""
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
        return Answer(lost=f"Ray ended its worker for lack of memory: {first_line(failure)}")
    except RuntimeEnvSetupError as failure:
        return Answer(error=f"a worker could not be set up: {first_line(failure)}", hint="install fewbits on all nodes", missing=True)
    except RayTaskError as failure:  # `worker.run` itself raises nothing: it could not be imported
        if "No module named" in str(failure):
            return Answer(error="a node of the cluster has no fewbits", hint="install the same fewbits on all nodes", missing=True)
        return Answer(failed=str(failure))
    except RayError as failure:  # its process or its node died
        return Answer(lost=f"{type(failure).__name__}: {first_line(failure)}")
