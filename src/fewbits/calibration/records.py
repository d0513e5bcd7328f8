"""Records out of JSON lines, JSON arrays and Parquet, one at a time, each with its place for people."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from fewbits.errors import InputError, MissingError

LONGEST = 16 << 20  # bytes of a record, or of a line that is read at once
BOMB, RATIO = 4 << 20, 100  # bytes that are more than so many times what they were packed in: text is packed to a third or a tenth
_ROWS = 16  # of a Parquet file at once: they may all be one long cell of its dictionary
FIELDS = ("text", "messages", "conversations")
RECORD = 'a record is `{"text": "..."}` or `{"messages": [{"role": "user", "content": "..."}, ...]}`'


def json_lines(name: str, lines: Iterable[tuple[int, str]]) -> Iterator[tuple[str, Any]]:
    for number, line in lines:
        if line.strip():
            place = f"{name}:{number}"
            try:
                yield place, json.loads(line)
            except (ValueError, RecursionError) as failure:
                reason = failure.msg if isinstance(failure, json.JSONDecodeError) else str(failure)
                raise InputError(f"{place}: not JSON: {reason}", f"one record per line; {RECORD}") from failure


def json_array(name: str, lines: Iterable[tuple[int, str]]) -> Iterator[tuple[str, Any]]:
    """The elements of one array, parsed one at a time: neither the text nor the objects are all in memory."""
    numbered = iter(lines)
    number, buffer = next(numbered)
    source = (text for _, text in numbered)
    decoder, where = json.JSONDecoder(), 0

    def more(wanted: int) -> bool:
        """So many characters from `where` on, if there are; what was parsed is let go."""
        nonlocal number, buffer, where
        if len(buffer) - where >= wanted:
            return True
        pieces = [buffer[where:]]
        number, where = number + buffer.count("\n", 0, where), 0
        size = len(pieces[0])
        while size < wanted and (line := next(source, None)) is not None:
            pieces.append(line)
            size += len(line)
        buffer = "".join(pieces)
        return size >= wanted

    def skip_space() -> str:
        """The character that follows; empty: none."""
        nonlocal where
        while more(1):
            if not buffer[where].isspace():
                return buffer[where]
            where += 1
        return ""

    def wrong(at: int, reason: str) -> InputError:
        line = number + buffer.count("\n", 0, at)
        return InputError(f"{name}:{line}: not JSON: {reason}", f"an array of records; {RECORD}")

    skip_space()
    where += 1  # the bracket
    follows = skip_space()
    while follows != "]":
        start, wanted = f"{name}:{number + buffer.count(chr(10), 0, where)}", 1 << 16
        while True:
            whole = not more(wanted)
            try:
                record, end = decoder.raw_decode(buffer, where)
                break
            except (ValueError, RecursionError) as failure:
                if whole or wanted > LONGEST or isinstance(failure, RecursionError):
                    at = failure.pos if isinstance(failure, json.JSONDecodeError) else where
                    raise wrong(at, failure.msg if isinstance(failure, json.JSONDecodeError) else str(failure)) from failure
                wanted *= 4  # it may only be cut off
        where = end
        yield start, record
        follows = skip_space()
        if follows == ",":
            where += 1
            skip_space()
        elif follows != "]":
            raise wrong(where, "a comma or `]` is missing")
    where += 1
    if skip_space():
        raise wrong(where, "more text after the array")


def parquet(path: Path, name: str) -> Iterator[tuple[str, Any]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as failure:
        raise MissingError(f"`{name}` needs pyarrow, which is not installed", "pip install 'fewbits[parquet]'") from failure
    try:
        with pyarrow.parquet.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as table:
            named = table.schema_arrow.names
            _check_parquet(name, table.metadata)
            columns = [field for field in FIELDS if field in named]
            if not columns:
                listed = ", ".join(f"`{column}`" for column in named[:6]) or "none"
                raise InputError(
                    f"`{name}` has neither a `text` nor a `messages` column, but {listed}", "rename the column that holds text"
                )
            row = 0
            for group in range(table.num_row_groups):
                for batch in table.iter_batches(batch_size=_ROWS, row_groups=[group], columns=columns):
                    for record in batch.to_pylist():
                        row += 1
                        yield f"{name}: row {row}", record
    except pyarrow.ArrowException as failure:
        raise InputError(f"`{name}` cannot be read as Parquet: {str(failure).splitlines()[0]}", "write or download it again") from failure


def _check_parquet(name: str, metadata: Any) -> None:
    for group in range(metadata.num_row_groups):
        for column in range(metadata.num_columns):
            chunk = metadata.row_group(group).column(column)
            if chunk.total_uncompressed_size > max(BOMB, RATIO * chunk.total_compressed_size):
                raise bomb(name)
            if chunk.total_uncompressed_size > LONGEST * max(1, chunk.num_values):
                raise InputError(f"`{name}` has cells of more than {LONGEST >> 20} MB", "cut such texts into several rows")


def bomb(name: str) -> InputError:
    return InputError(f"`{name}` is more than {RATIO} times as large as it was packed: no text is", "do not trust it, or unpack it first")
