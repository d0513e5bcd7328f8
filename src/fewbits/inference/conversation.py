"""A chat with a model: its turns so far, as the next prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from fewbits.errors import InputError
from fewbits.inference.text_model import Continuation, Limits, TextModel, chat_tokens, has_template, never, plain_tokens


class Conversation:
    """By the model's chat template. Without one (`plain`) what is said is a text that the model continues."""

    def __init__(self, model: TextModel, limits: Limits, system: str | None = None, raw: bool = False) -> None:
        self.plain = raw or not has_template(model.tokenizer)
        if self.plain and system is not None:
            raise InputError("`--system` has no place: there is no chat template", "write what it says into the first message")
        self.last: Continuation | None = None
        self.left_out = 0  # turns at the beginning that the context has no room for any more
        self._model, self._limits, self._system, self._turns = model, limits, system, list[str]()  # said, answered, said, ...

    def answer(self, said: str, stopped: Callable[[], bool] = never) -> Iterator[str]:
        """The answer's text as it comes. What `stopped` cuts off stays in the conversation as far as it came."""
        before, self._turns = self._turns, [*self._turns, said]
        try:
            continuation = self._continued(stopped)
        except InputError:
            self._turns = before
            raise
        yield from continuation
        self._turns.append(continuation.text)
        self.last = continuation

    def clear(self) -> None:
        self._turns = []

    def _continued(self, stopped: Callable[[], bool]) -> Continuation:
        tokens, context = self._tokens(), self._model.context
        wanted = self._limits.max_tokens
        if context is not None:
            wanted = min(wanted, context // 4)  # room that an answer has in any case
            while len(tokens) + wanted > context and len(self._turns) > 1:
                self._turns = self._turns[2:]
                self.left_out += 2
                tokens = self._tokens()
        return Continuation(self._model, tokens, self._limits, stopped)

    def _tokens(self) -> list[int]:
        if self.plain:
            return plain_tokens(self._model.tokenizer, _one_text(self._turns))
        said = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(self._turns)]
        first = [] if self._system is None else [{"role": "system", "content": self._system}]
        return chat_tokens(self._model.tokenizer, [*first, *said])


def _one_text(turns: list[str]) -> str:
    """What was said begins a new line; what the model wrote follows it as it came."""
    text = ""
    for i, turn in enumerate(turns):
        text += ("\n" if text and i % 2 == 0 and not text.endswith("\n") else "") + turn
    return text
