"""Requests and answers in OpenAI's JSON: what is asked for, as far as this server can do it, and what is said in reply.

A parameter that would change the answer and cannot be followed is an error, never ignored.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fewbits.errors import FewbitsError
from fewbits.inference.generated import Choice
from fewbits.inference.text_model import Limits, Message

_COMMON = {"model", "max_tokens", "temperature", "top_p", "seed", "stop", "stream", "stream_options"}
_CHAT, _PLAIN = {"messages", "max_completion_tokens"}, {"prompt"}
_NO_MATTER = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls"}
_NEUTRAL: dict[str, tuple[Any, ...]] = {  # values that ask for nothing beyond what is done anyway
    "n": (1,), "best_of": (1,), "echo": (False,), "logprobs": (False, 0), "top_logprobs": (0,), "suffix": ("",),
    "presence_penalty": (0,), "frequency_penalty": (0,), "logit_bias": ({},), "tools": ([],), "tool_choice": ("none", "auto"),
    "functions": ([],), "response_format": ({"type": "text"},), "modalities": (["text"],),
}  # fmt: skip
_PLAIN_DEFAULT = 16  # new tokens of a completion, as OpenAI has it; a chat goes on to the end of its context
_NO_LIMIT = 1 << 30
_MOST_STOPS = 4
_SEEDS = 1 << 63
FINISHED = {"end": "stop", "stop": "stop", "length": "length"}


class RefusedError(FewbitsError):
    """An answer with a status and OpenAI's error document."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def to_dict(self) -> dict[str, Any]:
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.args[0], "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True)
class Asked:
    """A request that was understood."""

    chat: bool
    prompt: str | list[int] | list[Message]  # messages of a chat; text or tokens otherwise
    limits: Limits
    stream: bool
    usage_in_stream: bool


def parse(body: Any, chat: bool, served: str) -> Asked:
    if not isinstance(body, dict):
        raise RefusedError(400, "the body is not a JSON object")
    _check_names(body, _COMMON | (_CHAT if chat else _PLAIN))
    model = _value(body, "model", str, served)
    if model != served:
        raise RefusedError(404, f"there is no model `{model}` here: `{served}` is served", "model", "model_not_found")
    options = _value(body, "stream_options", dict, {})
    return Asked(
        chat=chat,
        prompt=_messages(body) if chat else _prompt(body),
        limits=Limits(_max_tokens(body, chat), _choice(body), _stop(body)),
        stream=_value(body, "stream", bool, False),
        usage_in_stream=options.get("include_usage") is True,
    )


def _check_names(body: Mapping[str, Any], known: set[str]) -> None:
    for name, value in body.items():
        if name in known or name in _NO_MATTER or value is None:
            continue
        if name not in _NEUTRAL:
            raise RefusedError(400, f"unknown parameter `{name}`", name, "unknown_parameter")
        if value not in _NEUTRAL[name]:
            raise RefusedError(400, f"`{name}` cannot be followed here: leave it out", name, "unsupported_parameter")


def _value(body: Mapping[str, Any], name: str, kind: type | tuple[type, ...], default: Any) -> Any:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        wanted = {str: "a string", bool: "true or false", int: "a whole number", dict: "an object"}.get(kind, "a number")  # type: ignore[arg-type]
        raise RefusedError(400, f"`{name}` is not {wanted}", name, "invalid_type")
    return value


def _max_tokens(body: Mapping[str, Any], chat: bool) -> int:
    name = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    count: int = _value(body, name, int, _NO_LIMIT if chat else _PLAIN_DEFAULT)
    if count < 1:
        raise RefusedError(400, f"`{name}` is {count}; it is at least 1", name, "invalid_value")
    return count


def _choice(body: Mapping[str, Any]) -> Choice:
    temperature, top_p = (float(_value(body, name, (int, float), 1.0)) for name in ("temperature", "top_p"))
    if not 0 <= temperature <= 2:
        raise RefusedError(400, f"`temperature` is {temperature:g}; it is from 0 to 2", "temperature", "invalid_value")
    if not 0 < top_p <= 1:
        raise RefusedError(400, f"`top_p` is {top_p:g}; it is above 0 and up to 1", "top_p", "invalid_value")
    seed: int = _value(body, "seed", int, uuid.uuid4().int)  # without one, every answer is another
    return Choice(temperature, top_p, seed % _SEEDS)


def _stop(body: Mapping[str, Any]) -> tuple[str, ...]:
    stop = body.get("stop")
    stops = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or len(stops) > _MOST_STOPS or not all(isinstance(each, str) and each for each in stops):
        raise RefusedError(400, f"`stop` is a string, or up to {_MOST_STOPS} of them", "stop", "invalid_value")
    return tuple(stops)


def _prompt(body: Mapping[str, Any]) -> str | list[int]:
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and prompt and all(isinstance(token, int) and not isinstance(token, bool) for token in prompt):
        return prompt
    raise RefusedError(400, "`prompt` is a text, or a list of tokens; one at a time", "prompt", "invalid_value")


def _messages(body: Mapping[str, Any]) -> list[Message]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RefusedError(400, "`messages` is a list with at least one message", "messages", "invalid_value")
    return [_message(each, f"messages[{i}]") for i, each in enumerate(messages)]


def _message(message: Any, where: str) -> Message:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise RefusedError(400, f"`{where}` has no `role`", where, "invalid_value")
    role, content = message["role"], message.get("content")
    if isinstance(content, list):  # parts: text alone can be read here
        parts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content]
        content = None if None in parts else "".join(map(str, parts))
    if not isinstance(content, str):
        raise RefusedError(400, f"`{where}.content` is not text", f"{where}.content", "invalid_value")
    return {"role": "system" if role == "developer" else role, "content": content}


@dataclass(frozen=True)
class Answer:
    """What is said in reply to one request, whole or in pieces."""

    asked: Asked
    model: str
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, text: str, ended: str, usage: Mapping[str, int]) -> dict[str, Any]:
        said = {"message": {"role": "assistant", "content": text}} if self.asked.chat else {"text": text}
        return self._document("", [self._choice(said, FINISHED[ended])]) | {"usage": usage}

    def first(self) -> dict[str, Any] | None:
        """Says who speaks, where that is said."""
        return self._piece([self._choice({"delta": {"role": "assistant", "content": ""}}, None)]) if self.asked.chat else None

    def piece(self, text: str) -> dict[str, Any]:
        return self._piece([self._choice({"delta": {"content": text}} if self.asked.chat else {"text": text}, None)])

    def last(self, ended: str) -> dict[str, Any]:
        return self._piece([self._choice({"delta": {}} if self.asked.chat else {"text": ""}, FINISHED[ended])])

    def usage(self, usage: Mapping[str, int]) -> dict[str, Any]:
        return self._document(".chunk", []) | {"usage": usage}

    def _choice(self, said: Mapping[str, Any], finished: str | None) -> dict[str, Any]:
        return {"index": 0, **said, "logprobs": None, "finish_reason": finished}

    def _piece(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self._document(".chunk", choices) | ({"usage": None} if self.asked.usage_in_stream else {})

    def _document(self, part: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        start, kind = ("chatcmpl", f"chat.completion{part}") if self.asked.chat else ("cmpl", "text_completion")
        return {"id": f"{start}-{self.id}", "object": kind, "created": self.created, "model": self.model, "choices": choices}


def usage_of(prompt: int, new: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
