"""The runtimes that judge a file: each runs the file itself and hands out its logits. One file per runtime."""

from __future__ import annotations

import importlib
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits.errors import InputError, MissingError
from fewbits.progress import silent

if TYPE_CHECKING:
    from torch import Tensor

    from fewbits.progress import Progress
    from fewbits.spilled import Room

Window = Sequence[int]
PART = 512  # positions: logits are handed out for so many at a time, which is 260 MB at a vocabulary of 128,000


class Session(ABC):
    """A model loaded in a runtime."""

    vocabulary: int
    pooling: str | None = None  # how it makes one embedding of a text: mean, cls, last; None: it gives one for every token

    @abstractmethod
    def logits(self, tokens: list[int]) -> Tensor:  # -> (len(tokens), vocabulary) float32
        """Of one sequence, from an empty cache."""

    def parts(self, tokens: list[int]) -> Iterator[Tensor]:  # -> (PART, vocabulary) each, the last one shorter
        """The same, of so many positions at a time."""
        yield from self.logits(tokens).split(PART)

    def each(self, windows: Sequence[Window], room: Room, progress: Progress[Any] = silent) -> Iterator[Iterator[Tensor]]:
        """The parts of every window. A session that runs them together has `room` for what lies between."""
        return (self.parts(list(window)) for window in windows)

    def embeddings(self, tokens: list[int]) -> Tensor:  # -> (len(tokens), width) float32, or (1, width) where they are pooled
        """What a model without a head gives."""
        raise InputError("this runtime gives no embeddings here", "verify an encoder as GGUF in llama.cpp, or its artifact in torch")

    def close(self) -> None:  # noqa: B027 - most runtimes have nothing to free
        pass

    def generate(self, tokens: list[int], count: int) -> list[int]:
        """Greedy continuation, recomputing the whole sequence for each token: right, not fast."""
        sequence = list(tokens)
        for _ in range(count):
            sequence.append(int(self.logits(sequence)[-1].argmax()))
        return sequence[len(tokens) :]


class Runtime(ABC):
    name: str  # as `--runtime` takes it
    extra: str  # `pip install fewbits[extra]` brings it; empty: part of the core

    @abstractmethod
    def missing(self) -> str | None:
        """Why it cannot run here; None if it can."""

    @abstractmethod
    def version(self) -> str: ...

    @abstractmethod
    def takes(self, path: Path) -> bool:
        """Whether this is a file of its kind."""

    @abstractmethod
    def open(self, path: Path, context: int) -> Session:
        """Load the file for sequences of up to `context` tokens."""


@cache
def all() -> dict[str, Runtime]:
    modules = sorted(m.name for m in pkgutil.iter_modules(__path__))
    return {r.name: r for r in (importlib.import_module(f"{__name__}.{name}").RUNTIME for name in modules)}


def get(name: str) -> Runtime:
    if name.lower() not in all():
        raise InputError(f"no runtime is named `{name}`", f"known runtimes: auto, {', '.join(all())}")
    return all()[name.lower()]


def for_file(path: Path) -> Runtime:
    """The runtime that this file is meant for."""
    for runtime in all().values():
        if runtime.takes(path):
            return runtime
    raise InputError(f"no runtime takes `{path}`", "give a .gguf, an .onnx, or a folder that fewbits wrote")


def needed(runtime: Runtime) -> Runtime:
    """The same runtime, or an error that says how to get it."""
    if reason := runtime.missing():
        raise MissingError(f"{runtime.name} cannot run here: {reason}", f"pip install 'fewbits[{runtime.extra}]'")
    return runtime
