"""A model run over many windows, one block at a time: never more of it in memory than a block, however large it is.

What lies between the blocks is one buffer of hidden states, spilled to disk where it is large; logits are made of it a few positions at
a time. The same operations in the same order as in the whole module, so the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fewbits.blocks import Blocks
from fewbits.errors import InputError
from fewbits.kept import hash_of
from fewbits.progress import silent
from fewbits.runtimes import PART, Session
from fewbits.runtimes.torch import rounding_inputs
from fewbits.verifying import REFERENCE

if TYPE_CHECKING:
    from fewbits.activations import Activation
    from fewbits.blocks import Call, Source
    from fewbits.kept import Kept
    from fewbits.progress import Progress
    from fewbits.runtimes import Window
    from fewbits.spilled import Room

_WORTH_KEEPING = 50_000_000  # weights: a block that is larger takes longer to run than its output takes to keep


class StreamedSession(Session):
    """`whole` makes the session over the whole module, which answers for single windows, and for models that are no chain of blocks.

    `kept`: where the last block's output is kept, for the next file that is judged beside this model, or for the next run."""

    def __init__(
        self, source: Source, whole: Callable[[], Session], activations: Mapping[str, Activation] | None = None, kept: Kept | None = None
    ) -> None:
        self.vocabulary = int(source.config.get_text_config().vocab_size)
        self._source, self._make, self._activations = source, whole, activations or {}
        self._kept = kept.of(source=source.fingerprint) if kept else None
        self._made: Session | None = None

    @property
    def whole(self) -> Session:
        if self._made is None:
            self._made = self._make()
        return self._made

    def logits(self, tokens: list[int]) -> Tensor:
        return self.whole.logits(tokens)

    def embeddings(self, tokens: list[int]) -> Tensor:
        return self.whole.embeddings(tokens)

    @torch.no_grad()
    def each(self, windows: Sequence[Window], room: Room, progress: Progress[Any] = silent) -> Iterator[Iterator[Tensor]]:
        try:
            blocks = Blocks(self._source, room.limit)
        except InputError:  # no list of blocks
            return self.whole.each(windows, room, progress)
        if self._made is not None or not blocks.is_chain:
            return self.whole.each(windows, room, progress)
        if not windows:
            return iter(())
        walk = _Walk(blocks, windows, self._activations, self._kept)
        hidden = walk.run(room, progress)
        return (walk.logits(hidden, where) for where in walk.places)


class _Walk:
    def __init__(self, blocks: Blocks, windows: Sequence[Window], activations: Mapping[str, Activation], kept: Kept | None) -> None:
        self.blocks, self.windows, self._activations = blocks, windows, activations
        ends = list(accumulate(map(len, windows)))
        self.places = [slice(end - len(window), end) for end, window in zip(ends, windows, strict=True)]
        self._kept = kept.of(windows=hash_of([list(window) for window in windows])) if kept else None
        self._calls: dict[int, list[Call]] = {}  # by the length of a window

    def run(self, room: Room, progress: Progress[Any]) -> Tensor:
        """What the last block gives, (tokens, width)."""
        count = len(self.blocks)
        for done in range(count, 0, -1):
            if self._kept and (found := self._kept.find(REFERENCE, blocks=done)):
                if done == count:
                    return found.tensors["hidden"]
                hidden = self._entered(room)
                hidden.copy_(found.tensors["hidden"])
                break
        else:
            done, hidden = 0, self._entered(room)
        for index in progress(range(done, count), count - done, "running the float model" if self._kept else "running the file"):
            self._block(index, hidden)
            if self._kept and (index + 1 == count or _size(self.blocks, index) >= _WORTH_KEEPING):
                self._kept.keep(REFERENCE, {}, {"hidden": hidden}, blocks=index + 1)
                self._kept.drop(REFERENCE, blocks=index)
        return hidden

    def logits(self, hidden: Tensor, where: slice) -> Iterator[Tensor]:
        """Of one window, a part at a time: (positions, vocabulary)."""
        outer = {weight.tied_to or weight.name for weight in self.blocks.outer_weights}
        for part in hidden[where].split(PART):
            with torch.no_grad(), self._rounding(outer):
                logits = self.blocks.leave(part.unsqueeze(0))[0].float()
            yield logits

    def _entered(self, room: Room) -> Tensor:
        hidden = torch.empty(0)
        for window, where in zip(self.windows, self.places, strict=True):
            entered, calls = self.blocks.enter(torch.tensor([list(window)]))
            self._calls.setdefault(len(window), calls)
            if not len(hidden):
                hidden = room.new((self.places[-1].stop, entered.shape[-1]))
            hidden[where] = entered[0]
        return hidden

    def _block(self, index: int, hidden: Tensor) -> None:
        weights = self.blocks.weights(index)
        with self.blocks.filled(index) as block, self._rounding({weight.name for weight in weights}):
            for window, where in zip(self.windows, self.places, strict=True):
                hidden[where] = self.blocks.run(block, hidden[where].unsqueeze(0), self._calls[len(window)][index])[0]

    def _rounding(self, names: set[str]) -> Any:
        """The inputs of these rounded, where the plan says so."""
        own = {name: activation for name, activation in self._activations.items() if name in names}
        experts = {weight.name: weight for weight in self.blocks.model.weights if weight.name in own and weight.expert is not None}
        modules = {name: self.blocks.submodule(name) for name in own if name not in experts}
        return rounding_inputs(own, modules, {expert.parameter: self.blocks.parameter(expert) for expert in experts.values()})


def _size(blocks: Blocks, index: int) -> int:
    return sum(weight.shape[0] * weight.shape[1] for weight in blocks.weights(index))
