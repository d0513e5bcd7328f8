"""Workers that live in the process of the test."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from fewbits.store.executors import worker
from fewbits.store.executors.unit import Answer, Unit


@dataclass
class Fake:
    """Workers in this process, told by JSON and answering by JSON. The last unit first; `act` may do to an answer what a network does."""

    act: Callable[[Unit, Callable[[], Answer]], Answer] = field(default=lambda _, run: run())
    seen: list[str] = field(default_factory=list)

    def carry(self, waiting: deque[Unit]) -> Iterator[tuple[Unit, Answer]]:
        while waiting:
            unit = waiting.pop()
            told = json.loads(json.dumps(asdict(unit)))
            self.seen.append(unit.name)
            yield unit, self.act(unit, partial(_answer, told))

    def close(self) -> None:
        pass


def _answer(told: dict[str, Any]) -> Answer:
    return Answer(**json.loads(json.dumps(worker.run(told))))
