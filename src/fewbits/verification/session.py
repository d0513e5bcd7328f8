"""A model loaded in a runtime: what every judge must give."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from fewbits.errors import InputError
from fewbits.progress import silent

if TYPE_CHECKING:
    from torch import Tensor

    from fewbits.progress import Progress
    from fewbits.store.mapped import Room

PART = 512  # positions whose logits are given at a time: 260 MB at a vocabulary of 128,000
Window = Sequence[int]


class Session(ABC):
    """A model loaded in a runtime."""

    vocabulary: int
    context: int  # the most tokens, where the runtime has a limit
    pooling: str | None = None  # how the embeddings of tokens become one: mean, cls, last; None: they do not
    timed: bool = False  # it generates as a user's program would, so that its speed says something

    @abstractmethod
    def logits(self, tokens: list[int]) -> Tensor:  # -> (len(tokens), vocabulary) float32
        """Of one sequence, starting with an empty cache."""

    def parts(self, tokens: list[int]) -> Iterator[Tensor]:  # -> (PART, vocabulary) each, the last one shorter
        """The same logits, `PART` positions at a time."""
        yield from self.logits(tokens).split(PART)

    def each(self, windows: Sequence[Window], room: Room, progress: Progress[Any] = silent) -> Iterator[Iterator[Tensor]]:
        """The parts of every window. A session that runs windows together keeps their hidden states in `room`."""
        return (self.parts(list(window)) for window in windows)

    def following(self, tokens: list[int], count: int) -> Iterator[int]:
        """The likeliest token each time, up to so many. Without a cache of its own a runtime reads the whole sequence for every one."""
        sequence = list(tokens)
        for _ in range(count):
            sequence.append(int(self.logits(sequence)[-1].argmax()))
            yield sequence[-1]

    def embeddings(self, tokens: list[int]) -> Tensor:  # -> (len(tokens), width) float32, or (1, width) where they are pooled
        """Of a model without a head."""
        raise InputError("this runtime gives no embeddings here", "verify an encoder as GGUF in llama.cpp, or its artifact in torch")

    def close(self) -> None:  # noqa: B027 - most runtimes have nothing to free
        pass

    def check(self, tokens: Sequence[int], length: int) -> None:
        """Refuses what the runtime's native code would not survive. `length`: of the tokens and those that are to follow."""
        if not tokens:
            raise InputError("there are no tokens to run", "give some text")
        if length > self.context:
            raise InputError(f"{length} tokens do not fit the context of {self.context}", "use a longer context or a shorter text")
        if not 0 <= min(tokens) <= max(tokens) < self.vocabulary:
            raise InputError(f"token {max(tokens)} is outside the vocabulary of {self.vocabulary}", "is it the tokenizer of another model?")
