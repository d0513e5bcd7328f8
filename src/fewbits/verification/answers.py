"""A few answers of the file and of its source side by side: the same beginning of a text, the likeliest token each time.

For a person to read; the verdict has the figures. The time is bounded: an answer ends where the time does.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits.devices import host
from fewbits.errors import FewbitsError, MissingError
from fewbits.progress import silent

if TYPE_CHECKING:
    from fewbits.model import Model
    from fewbits.progress import Progress
    from fewbits.verification.runtimes import Runtime
    from fewbits.verification.session import Session, Window

COUNT = 3  # answers
PROMPT, NEW = 24, 48  # tokens
_SECONDS = 30.0  # for all answers of one model
_FLOAT = 4  # bytes of a weight in torch


@dataclass(frozen=True)
class Answer:
    prompt: str
    source: str  # what the source goes on with
    file: str
    same_tokens: int  # before the first difference


def answers(
    path: Path, source: Model, windows: Sequence[Window], runtime: Runtime, count: int = COUNT, progress: Progress[Any] = silent
) -> tuple[Answer, ...]:
    """Of prompts spread over the text. Raises a FewbitsError where the source does not fit in memory, or cannot be decoded to text."""
    from fewbits.verification.files import sessions_of  # loads torch, and the page reads `Answer` without it

    tokenizer = source.tokenizer
    if not hasattr(tokenizer, "decode"):
        raise FewbitsError("nothing here turns its tokens into text")
    needed, free = _FLOAT * sum(rows * cols for rows, cols in (weight.shape for weight in source.weights)), host.free_memory()
    if free is not None and needed > free // 2:
        raise MissingError(f"the float model as a whole takes {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free")
    long_enough = [window for window in windows if len(window) >= 2]
    chosen = [long_enough[index * len(long_enough) // count] for index in range(min(count, len(long_enough)))]
    prompts = [list(window[:PROMPT]) for window in chosen]
    if not prompts:
        return ()
    ends = {tokenizer.eos_token_id} - {None} if hasattr(tokenizer, "eos_token_id") else set()
    room = [[0] * (PROMPT + NEW)]
    with sessions_of(path, source, room, runtime, None, progress, None) as (base, sessions):
        made = [_all(session, prompts, ends, progress) for session in (base, sessions["file"])]
    return tuple(_answer(tokenizer, *each) for each in zip(prompts, *made, strict=True))


def _all(session: Session, prompts: Sequence[list[int]], ends: set[int], progress: Progress[Any]) -> list[list[int]]:
    until = time.perf_counter() + _SECONDS
    return [_one(session, prompt, ends, until) for prompt in progress(prompts, len(prompts), "answering")]


def _one(session: Session, prompt: list[int], ends: set[int], until: float) -> list[int]:
    made: list[int] = []
    for token in session.following(prompt, NEW):
        if token in ends:
            break
        made.append(token)
        if time.perf_counter() > until:
            break
    return made


def _answer(tokenizer: Any, prompt: list[int], source: list[int], file: list[int]) -> Answer:
    same = next((place for place, (one, two) in enumerate(zip(source, file, strict=False)) if one != two), min(len(source), len(file)))
    begun, by_source, by_file = (str(tokenizer.decode(tokens, skip_special_tokens=True)) for tokens in (prompt, source, file))
    return Answer(begun, by_source, by_file, same)
