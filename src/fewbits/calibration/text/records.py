"""Records from JSON lines, JSON arrays and Parquet, one at a time, each with its file and line for messages."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import ijson
from ijson.backends import python as python_backend

from fewbits.errors import InputError, MissingError

LONGEST = 16 << 20  # bytes of a record, and of a line that is read at once
# Compressed data of more than BOMB bytes that grows by more than RATIO is refused: text is compressed to a third or a tenth.
BOMB, RATIO = 4 << 20, 100
_PIECE = 1 << 16  # characters parsed at once: bounds the list of what was found in them
_DEEPEST = 500  # lists and objects in each other; Python's own parser ends at about 1,000
_NESTING = {"start_map": 1, "start_array": 1, "end_map": -1, "end_array": -1}
_ROWS = 16  # of a Parquet file read at once: all of them may be the same long cell of its dictionary
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
    """The elements of one array, parsed one at a time: neither the text nor the objects are all in memory.

    ijson's Python backend, because the C one writes `?` for half of a surrogate pair where this must be an error."""
    events = ijson.sendable_list()
    parser = python_backend.basic_parse_coro(events, use_float=True)
    builder, place, depth, size, number = ijson.ObjectBuilder(), name, 0, 0, 1

    def wrong(reason: str) -> InputError:
        return InputError(f"{name}:{number}: not JSON: {reason[:200]}", f"an array of records; {RECORD}")

    try:
        for number, line in lines:
            silent = True
            for piece in (line[at : at + _PIECE] for at in range(0, len(line), _PIECE)):
                parser.send(piece.encode())
                silent, size = silent and not events, size + len(piece.strip())
                if size > LONGEST:
                    raise InputError(f"{place}: a record of more than {LONGEST >> 20} MB", f"an array of records; {RECORD}")
                for event, value in events:
                    outside, depth = depth, depth + _NESTING.get(event, 0)
                    if depth > _DEEPEST:
                        raise wrong(f"more than {_DEEPEST} lists and objects in each other")
                    if not outside or not depth:
                        continue  # the brackets of the array itself
                    if outside == 1:
                        builder, place = ijson.ObjectBuilder(), f"{name}:{number}"
                    builder.event(event, value)
                    if depth == 1:
                        yield place, builder.value
                        size = 0
                events.clear()
            if silent and line.endswith("\n") and line.strip(" \t\n,:"):  # the parser would look for the closing quote from its start again
                raise wrong("a string goes beyond the end of its line")
        parser.close()
    except (ijson.JSONError, ValueError) as failure:
        raise wrong(failure.msg if isinstance(failure, json.JSONDecodeError) else str(failure)) from failure
    finally:
        with suppress(ijson.JSONError, ValueError):  # of a file that is not read to its end
            parser.close()


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
