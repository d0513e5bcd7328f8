"""Text as windows of tokens, the same for the model, the file under test and every runtime."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from fewbits.errors import InputError
from fewbits.formats.runtime.kv import text_config
from fewbits.store.untrusted import first_line

Window = list[int]


def windows(text: str, tokenizer: Any, length: int, tokens: int | None = None, of: str = "the text") -> list[Window]:
    """Windows of `length` tokens that together predict at most `tokens` tokens. Each starts like a document, with the beginning-of-text
    token if the tokenizer adds one, because position 0 is unlike any other. `of`: what messages call the text."""
    prefix = tokenizer("").input_ids[:1]
    ids: list[int] = encoded(tokenizer, text)
    body = length - len(prefix)
    if length < 2 or len(ids) < body:
        raise InputError(f"{of} has {len(ids)} tokens, one window needs {body}", "give more text with `--data`, or a smaller `--length`")
    count = len(ids) // body
    if tokens is not None:
        count = min(count, max(1, tokens // (length - 1)))
    return [prefix + ids[i * body : (i + 1) * body] for i in range(count)]


def encoded(tokenizer: Any, text: str | list[str]) -> Any:
    """Ids without special tokens. The tokenizer comes with the model; its regular expressions may fail on any text, even with a panic
    in Rust, which is no Exception."""
    try:
        return tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    except BaseException as failure:
        if isinstance(failure, KeyboardInterrupt | SystemExit | MemoryError):
            raise
        raise InputError(f"the model's tokenizer fails on this text: {first_line(failure)}", "is tokenizer.json damaged?") from failure


def check_ids(ids: Iterable[Sequence[int]], config: Any) -> None:
    """Checks that every token has a row in the embedding: tokenizer and weights may come from different models."""
    rows = getattr(text_config(config), "vocab_size", None)
    largest = max((max(one, default=0) for one in ids), default=0)
    if isinstance(rows, int) and largest >= rows:
        raise InputError(f"the tokenizer gives token {largest}, and the model has {rows}", "the two do not belong together")


def window_length(config: Any, wanted: int | None) -> int:
    """`wanted` or 512 tokens, and never more than the positions of the model."""
    longest = int(getattr(text_config(config), "max_position_embeddings", None) or wanted or 512)
    if wanted is not None and wanted > longest:
        raise InputError(f"`--length {wanted}` is beyond the model's {longest} positions", f"use at most {longest}")
    return min(wanted or 512, longest)
