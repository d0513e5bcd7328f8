"""Peers in environments of their own, in a contest: they get the samples that everybody gets, and their files are judged alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits.benchmarks.peers import environments, named
from fewbits.benchmarks.peers.named import TARGET_SIZE, Peer
from fewbits.errors import InputError

if TYPE_CHECKING:
    from fewbits.benchmarks.quality.contest import Contest, Texts


@dataclass(frozen=True)
class Outside:
    """Who else takes part."""

    peers: tuple[Peer, ...] = ()
    folder: Path = Path()  # of the environments
    samples: int | None = None  # that they get; None: as many as ours
    target_size: bool = False  # llama.cpp's allocation by target size was asked for by name

    def check(self, texts: Texts) -> None:
        """Before any work: is everybody here, and is there text to calibrate with?"""
        for peer in self.peers:
            environments.python_of(peer.program, self.folder)
        if self.peers and not texts.known:
            hint = "give the text that the statistics were made from with `--data`"
            raise InputError(f"`--peer {self.peers[0].name}` calibrates by itself, and `--stats` holds no text", hint)


NOBODY = Outside()


def outside(names: Sequence[str], folder: Path | None = None, steps: int | None = None, samples: int | None = None) -> Outside:
    apart = [name for name in names if name.lower() != TARGET_SIZE]
    return Outside(tuple(named.parse(apart, steps)), folder or environments.usual_folder(), samples, len(apart) < len(names))


def add(contest: Contest, who: Outside, name: str, peer: Peer, job: dict[str, Any]) -> Path:
    """The peer's file of this name, unless an earlier run made it."""
    path = contest.place(name)
    if not path.exists():
        python = environments.python_of(peer.program, who.folder)
        samples = contest.texts.drawn(contest.source, who.samples).ids
        job = {**job, "model": str(contest.source.path.resolve())}
        environments.run(python, peer.program, job, samples, path, contest.folder / "logs" / f"{name}.log", contest.progress)
    return path
