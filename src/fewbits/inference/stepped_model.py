"""A text model over an engine that computes logits: fewbits' own decoder, transformers' module, onnxruntime-genai.

What the engine's KV cache holds is not computed again: a chat reads only what is new in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

from fewbits.errors import InputError
from fewbits.inference.generated import Choice
from fewbits.inference.text_model import Footprint

if TYPE_CHECKING:
    from torch import Tensor

_COLDEST = 1e-4  # a temperature below which logits divided by it lose all but the largest, or overflow


class Engine(Protocol):
    """A loaded model and the KV cache of one text."""

    def prompt(self, tokens: list[int], every: bool = True, between: Callable[[], None] | None = None) -> Tensor:
        """-> (tokens, vocabulary); without `every`, at least the last. `between` is called between pieces of a long text, and may raise."""
        ...

    def step(self, token: int) -> Tensor: ...  # -> (vocabulary,)
    def rewind(self, tokens: int) -> int: ...  # forgets all but the first `tokens`, or more; -> how many are left
    def kernels_used(self) -> list[str]: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def cache_bytes(self) -> int: ...


class _CutError(Exception):
    pass


class SteppedModel:
    """The engine is opened when the first text is there, with room for it if `context` is None."""

    def __init__(
        self,
        tokenizer: Any,
        ends: set[int],
        opened: Callable[[int], tuple[Engine, str]],  # tokens to keep room for -> the engine, and its name
        context: int | None,
        longest: int | None,
        on_infinite: Callable[[], None] = lambda: None,  # raises with a better explanation, if it has one
    ) -> None:
        self.tokenizer, self.context, self.longest = tokenizer, context, longest
        self._ends, self._opened, self._on_infinite = ends, opened, on_infinite
        self._loaded: tuple[Engine, str] | None = None
        self._held = list[int]()  # the tokens in the engine's cache
        self._prompt_read = 0

    @property
    def engine(self) -> str:
        return self._loaded[1] if self._loaded else ""

    def load(self, room: int | None = None) -> Engine:
        if self._loaded is None:
            wanted = self.context or room
            assert wanted is not None
            self._loaded = self._opened(wanted)
        return self._loaded[0]

    def tokens(self, prompt: list[int], count: int, choice: Choice, stopped: Callable[[], bool]) -> Iterator[int]:
        import torch

        engine, generator = self.load(len(prompt) + count), torch.Generator().manual_seed(choice.seed)
        try:
            logits = self._read(engine, prompt, stopped)
        except _CutError:
            return
        for i in range(count):
            token = next_token(logits, choice, generator)
            if token in self._ends:
                return
            yield token
            if i + 1 == count or stopped():
                return
            logits = self._stepped(engine, token)

    def footprint(self) -> Footprint:
        import torch

        engine = self.load()
        return Footprint(engine.nbytes, engine.cache_bytes, torch.get_num_threads(), tuple(engine.kernels_used()), self._prompt_read)

    def _read(self, engine: Engine, prompt: list[int], stopped: Callable[[], bool]) -> Tensor:
        def between() -> None:
            if stopped():
                raise _CutError

        shared = next((i for i, (a, b) in enumerate(zip(self._held, prompt, strict=False)) if a != b), min(len(self._held), len(prompt)))
        self._held = []  # until the text is read: what is left of an interrupted one is not known
        kept = engine.rewind(min(shared, len(prompt) - 1))  # the last token is read in any case, for its logits
        self._prompt_read = len(prompt) - kept
        try:
            logits = engine.prompt(prompt[kept:], every=False, between=between)[-1]
        except BaseException:
            engine.rewind(0)
            raise
        if not logits.isfinite().all():
            engine.rewind(0)
            self._on_infinite()
            raise InputError("the logits are not finite", "the model overflows on this text, or the file is damaged")
        self._held = list(prompt)
        return logits

    def _stepped(self, engine: Engine, token: int) -> Tensor:
        held, self._held = self._held, []
        try:
            logits = engine.step(token)
        except BaseException:
            engine.rewind(0)
            raise
        held.append(token)
        self._held = held
        return logits


def next_token(logits: Tensor, choice: Choice, generator: Any) -> int:
    import torch

    if choice.temperature < _COLDEST:
        return int(logits.argmax())
    likely, order = torch.softmax(logits.float() / choice.temperature, -1).sort(descending=True)
    before = likely.cumsum(-1) - likely
    likely = likely.where(before < choice.top_p, 0.0)  # never drops the likeliest
    return int(order[torch.multinomial(likely, 1, generator=generator)])
