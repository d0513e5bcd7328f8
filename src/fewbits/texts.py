"""Text to token windows, the same for the model, the file under test and every runtime."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fewbits.errors import InputError

Window = list[int]


def read(paths: Sequence[str | Path]) -> str:
    pieces = []
    for path in map(Path, paths):
        try:
            pieces.append(path.read_text(encoding="utf-8"))
        except OSError as failure:
            raise InputError(f"`{path}` cannot be read: {failure.strerror}", "give a text file with `--data`") from failure
        except UnicodeDecodeError as failure:
            raise InputError(f"`{path}` is not UTF-8 text", "give plain text with `--data`") from failure
    return "\n\n".join(pieces)


def windows(text: str, tokenizer: Any, length: int, tokens: int | None = None) -> list[Window]:
    """Windows of `length` tokens that together predict at most `tokens` ones; each starts as a document does, with the
    beginning-of-text token where the tokenizer puts one, because position 0 is unlike any other."""
    prefix = tokenizer("").input_ids[:1]
    ids: list[int] = encoded(tokenizer, text)
    body = length - len(prefix)
    if length < 2 or len(ids) < body:
        raise InputError(
            f"the text has {len(ids)} tokens, one window needs {body}", "give more text with `--data`, or a smaller `--length`"
        )
    count = len(ids) // body
    if tokens is not None:
        count = min(count, max(1, tokens // (length - 1)))
    return [prefix + ids[i * body : (i + 1) * body] for i in range(count)]


def encoded(tokenizer: Any, text: str | list[str]) -> Any:
    """Ids without special tokens. A tokenizer comes with the model, and its expressions may fail on any text, by a panic in Rust too."""
    try:
        return tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    except BaseException as failure:
        if isinstance(failure, KeyboardInterrupt | SystemExit | MemoryError):
            raise
        said = str(failure).strip().splitlines()[0] if str(failure).strip() else type(failure).__name__
        raise InputError(f"the model's tokenizer fails on this text: {said}", "is tokenizer.json damaged?") from failure


def check_ids(ids: Iterable[Sequence[int]], config: Any) -> None:
    """That every token has a row in the embedding: a tokenizer and a model from two places may differ."""
    rows = getattr(config, "vocab_size", None)
    largest = max((max(one, default=0) for one in ids), default=0)
    if isinstance(rows, int) and largest >= rows:
        raise InputError(f"the tokenizer gives token {largest}, and the model has {rows}", "the two do not belong together")


def window_length(config: Any, wanted: int | None) -> int:
    """512 unless told otherwise, and never more than the model was made for."""
    longest = int(getattr(config, "max_position_embeddings", None) or wanted or 512)
    if wanted is not None and wanted > longest:
        raise InputError(f"`--length {wanted}` is beyond the model's {longest} positions", f"use at most {longest}")
    return min(wanted or 512, longest)
