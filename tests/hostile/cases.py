"""What a case is: a function that writes a hostile file, whose first line says what it attacks, and the kind of file that it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benign import Benign

Maker = Callable[[Path, Benign], Path | None]  # writes into a folder of its own; returns the file to open, or None: the folder


@dataclass(frozen=True)
class Case:
    name: str
    kind: str
    attacks: str
    make: Maker
    passes: tuple[str, ...]  # verbs that do nothing with what is wrong, and may succeed
    fails: tuple[str, ...]  # verbs that judge it, and must find it wanting

    def write(self, folder: Path, benign: Benign) -> Path:
        folder.mkdir(parents=True)
        return self.make(folder, benign) or folder


CASES: list[Case] = []


def case(kind: str, passes: tuple[str, ...] = (), fails: tuple[str, ...] = ()) -> Callable[[Maker], Maker]:
    def register(make: Maker) -> Maker:
        assert make.__doc__, make.__name__
        CASES.append(Case(make.__name__, kind, make.__doc__.splitlines()[0], make, passes, fails))
        return make

    return register
