"""A model run over many windows, one block at a time: never more of it in memory than a block, however large it is.

Logits are made of the last block's output a few positions at a time. The operations and their order are those of the whole module, so the
bits are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fewbits.errors import InputError
from fewbits.formats.runtime.kv import text_config
from fewbits.inference.rounded_inputs import rounding_inputs
from fewbits.model import placement
from fewbits.model.blocks import Blocks
from fewbits.model.walk import Batch, Walk
from fewbits.progress import silent
from fewbits.store.cache import hash_of
from fewbits.verification.session import PART, Session

if TYPE_CHECKING:
    from fewbits.formats.runtime.activations import Activation
    from fewbits.model.blocks import Source
    from fewbits.progress import Progress
    from fewbits.store.cache import Cache
    from fewbits.store.mapped import Room
    from fewbits.verification.session import Window

REFERENCE = "reference"  # the step under which the float model's hidden states are cached, for all files that are compared with it
_WORTH_CACHING = 50_000_000  # weights: a block of more takes longer to run than its output takes to write


class StreamedSession(Session):
    """`whole` makes a session over the whole module, which is used for single windows and for models that are not a chain of blocks.

    `cache`: for the last block's output, which the next file that is compared with this model needs, and the next run."""

    def __init__(
        self, source: Source, whole: Callable[[], Session], activations: Mapping[str, Activation] | None = None, cache: Cache | None = None
    ) -> None:
        self.vocabulary = int(text_config(source.config).vocab_size)
        self._source, self._make, self._activations = source, whole, activations or {}
        self._cache = cache.of(source=source.fingerprint) if cache else None
        self._made: Session | None = None

    @property
    def whole(self) -> Session:
        if self._made is None:
            self._made = self._make()
        return self._made

    def logits(self, tokens: list[int]) -> Tensor:
        return self.whole.logits(tokens)

    def following(self, tokens: list[int], count: int) -> Iterator[int]:
        return self.whole.following(tokens, count)

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
        starts = accumulate(map(len, windows), initial=0)
        batches = [Batch(torch.tensor([list(window)]), 0, start) for window, start in zip(windows, starts, strict=False)]
        with placement.passes_on(placement.CPU) if self._activations else nullcontext():  # inputs are rounded by native code
            walk = Walk(blocks, batches, room)
        hidden = self._hidden(walk, progress)
        return (self._logits(walk, hidden[batch.where]) for batch in batches)

    def _hidden(self, walk: Walk, progress: Progress[Any]) -> Tensor:
        """The last block's output, (tokens, width)."""
        cache = self._cache.of(windows=hash_of([batch.ids[0].tolist() for batch in walk.batches])) if self._cache else None
        count = len(walk.blocks)
        for done in range(count, 0, -1):
            if cache and (result := cache.find(REFERENCE, blocks=done)):
                if done == count:
                    return result.tensors["hidden"]
                hidden = walk.enter().copy_(result.tensors["hidden"])
                break
        else:
            done, hidden = 0, walk.enter()
        for index in progress(range(done, count), count - done, "running the float model" if cache else "running the file"):
            weights = walk.blocks.weights(index)
            with walk.block(index) as block, self._rounding(walk.blocks, {weight.name for weight in weights}):
                block.run(hidden, hidden)
            if cache and (index + 1 == count or sum(weight.shape[0] * weight.shape[1] for weight in weights) >= _WORTH_CACHING):
                cache.keep(REFERENCE, {}, {"hidden": hidden}, blocks=index + 1)
                cache.drop(REFERENCE, blocks=index)
        return hidden

    def _logits(self, walk: Walk, hidden: Tensor) -> Iterator[Tensor]:
        """Of one window, a part at a time: (positions, vocabulary)."""
        outer = {weight.tied_to or weight.name for weight in walk.blocks.outer_weights}
        for part in hidden.split(PART):
            with torch.no_grad(), self._rounding(walk.blocks, outer):
                logits = walk.blocks.leave(part.unsqueeze(0))[0].float().cpu()
            yield logits

    def _rounding(self, blocks: Blocks, names: set[str]) -> Any:
        """While inside, the inputs of these weights are rounded if the plan says so."""
        activations = {name: activation for name, activation in self._activations.items() if name in names}
        experts = {weight.name: weight for weight in blocks.model.weights if weight.name in activations and weight.expert is not None}
        modules = {name: blocks.submodule(name) for name in activations if name not in experts}
        return rounding_inputs(activations, modules, {expert.parameter: blocks.parameter(expert) for expert in experts.values()})
