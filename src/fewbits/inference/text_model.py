"""A loaded model that continues texts, one at a time, whoever computes it; and one continuation while it grows."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from fewbits.errors import InputError
from fewbits.inference.generated import GREEDY, Choice, Generated, Stats, peak_memory
from fewbits.store.untrusted import first_line

Message = Mapping[str, str]  # role and content
ROOM = 4096  # tokens of a text where nobody asked for another number and the model takes as many


def never() -> bool:
    return False


class TooLongError(InputError):
    """The prompt leaves no room for an answer."""


class Footprint(NamedTuple):
    weight_bytes: int
    cache_bytes: int
    threads: int
    kernels: tuple[str, ...]
    prompt_read: int  # tokens of the last prompt that were not in the KV cache already


class TextModel(Protocol):
    tokenizer: Any  # of transformers
    context: int | None  # tokens of a text with its continuation, at most; None: as many as are asked for
    longest: int | None  # that the model was made for, where its config says so

    @property
    def engine(self) -> str: ...  # as in Stats
    def tokens(self, prompt: list[int], count: int, choice: Choice, stopped: Callable[[], bool]) -> Iterator[int]:
        """`count` new tokens; fewer when the text ends (that token is not given), or when `stopped` says so."""
        ...

    def footprint(self) -> Footprint: ...


@dataclass(frozen=True)
class Limits:
    """What a continuation is made with, and where it ends."""

    max_tokens: int
    choice: Choice = GREEDY
    stop: tuple[str, ...] = ()  # texts before which it ends


@dataclass
class Continuation:
    """Iterated over once, for its text piece by piece; then the rest is known."""

    model: TextModel
    prompt: list[int]
    limits: Limits
    stopped: Callable[[], bool] = never
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    ended: str = "cut"  # "end" of the text, "length", "stop" (one of the texts that were given), or "cut" by `stopped`
    _times: list[float] = field(default_factory=list)  # before the prompt, after the first token, after the last

    def __post_init__(self) -> None:
        if not self.prompt:
            raise InputError("the prompt has no tokens", "give some text")
        if self.model.context is not None and len(self.prompt) >= self.model.context:
            raise TooLongError(
                f"the prompt has {len(self.prompt)} tokens, and the context {self.model.context}: nothing is left for an answer",
                "give a larger `--context`, or a shorter prompt",
            )

    def __iter__(self) -> Iterator[str]:
        count, growing, stops = self._count(), _GrowingText(self.model.tokenizer), _StopTexts(self.limits.stop)
        self._times = [time.perf_counter()]
        with closing(self.model.tokens(self.prompt, count, self.limits.choice, self.stopped)) as tokens:  # type: ignore[type-var]
            for token in tokens:
                self._times[1:] = [self._times[1] if self.tokens else time.perf_counter()]
                self.tokens.append(token)
                yield from self._given(stops.add(growing.add(token)))
                if stops.found:
                    break
        self._times = [*self._times[:2], time.perf_counter()]
        yield from self._given(stops.add(growing.rest()))
        yield from self._given(stops.rest())
        if stops.found:
            self.ended = "stop"
        elif len(self.tokens) == count:
            self.ended = "length"
        else:
            self.ended = "cut" if self.stopped() else "end"

    def generated(self) -> Generated:
        at = self.model.footprint()
        started, first, last = (self._times[0], self._times[min(1, len(self._times) - 1)], self._times[-1])
        steps = len(self.tokens) - (self.ended != "end")  # the first token comes with the prompt, the token that ends it is computed too
        stats = Stats(
            engine=self.model.engine,
            prompt_tokens=len(self.prompt),
            new_tokens=len(self.tokens),
            prompt_tokens_per_second=at.prompt_read / max(first - started, 1e-9),
            tokens_per_second=steps / (last - first) if steps > 0 and last > first else None,
            weight_bytes=at.weight_bytes,
            cache_bytes=at.cache_bytes,
            peak_memory_bytes=peak_memory(),
            threads=at.threads,
            kernels=at.kernels,
        )
        return Generated(self.text, tuple(self.tokens), self.ended, stats)

    def _count(self) -> int:
        room = self.limits.max_tokens if self.model.context is None else self.model.context - len(self.prompt)
        return min(self.limits.max_tokens, room)

    def _given(self, text: str) -> Iterator[str]:
        if text:
            self.text += text
            yield text


def has_template(tokenizer: Any) -> bool:
    return bool(getattr(tokenizer, "chat_template", None))


def plain_tokens(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text)["input_ids"])


def chat_tokens(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    """By the model's chat template, up to where its answer begins."""
    if not has_template(tokenizer):
        raise InputError("the model has no chat template", "give a plain text to continue")
    try:
        text = tokenizer.apply_chat_template([dict(each) for each in messages], add_generation_prompt=True, tokenize=False)
    except Exception as failure:  # whatever the template of somebody raises, such as for a role that it does not know
        raise InputError(
            f"the model's chat template refuses these messages: {first_line(failure)}",
            "some know no system message, or want question and answer by turns",
        ) from failure
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def prompt_tokens(tokenizer: Any, prompt: str, system: str | None, raw: bool) -> list[int]:
    """Of a single question: through the chat template if there is one and `raw` does not forbid it."""
    if raw or not has_template(tokenizer):
        if system is not None:
            why = "`--raw` leaves it out" if raw else "the model has no chat template"
            raise InputError(f"`--system` has no place: {why}", "write what it says into the prompt")
        return plain_tokens(tokenizer, prompt)
    first = [] if system is None else [{"role": "system", "content": system}]
    return chat_tokens(tokenizer, [*first, {"role": "user", "content": prompt}])


class _GrowingText:
    """Text of tokens as they come. A token may end inside a character: it is given when the character is complete. Decoded anew are
    only the last tokens, together with those before them, on which spaces may depend."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self._tokens, self._start, self._given = tokenizer, list[int](), 0, 0

    def add(self, token: int) -> str:
        self._tokens.append(token)
        return self._new(whole=True)

    def rest(self) -> str:
        return self._new(whole=False)

    def _new(self, whole: bool) -> str:
        text = self._decoded(self._tokens[self._start :])
        if whole and text.endswith("\ufffd"):
            return ""
        before = self._decoded(self._tokens[self._start : self._given])
        self._start, self._given = self._given, len(self._tokens)
        return text[len(before) :]

    def _decoded(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True)) if tokens else ""


class _StopTexts:
    """Gives text on, up to the first of some texts; what may be the beginning of one is kept until that is clear."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops, self._kept, self.found = stops, "", False

    def add(self, text: str) -> str:
        if self.found:
            return ""
        self._kept += text
        found = [at for stop in self._stops if (at := self._kept.find(stop)) >= 0]
        self.found = bool(found)
        given = min(found) if found else len(self._kept) - self._begun()
        out, self._kept = self._kept[:given], "" if found else self._kept[given:]
        return out

    def rest(self) -> str:
        out, self._kept = self._kept, ""
        return out

    def _begun(self) -> int:
        """How many of the last characters may be the beginning of a stop."""
        most = min(len(self._kept), max((len(stop) - 1 for stop in self._stops), default=0))
        return next((n for n in range(most, 0, -1) if any(stop.startswith(self._kept[-n:]) for stop in self._stops)), 0)
