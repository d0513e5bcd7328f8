"""Documents from what a person gives: text, JSON lines, JSON arrays, Parquet, gzip of the first three, folders, standard input.

Everything is read as a stream, a line or a record at a time, and every error names the file and the line.
"""

from __future__ import annotations

import gzip
import json
import os
import sys
import zlib
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path, PurePath
from typing import IO, Any

from fewbits.errors import InputError, MissingError

_PIECE = 1_000_000  # characters of plain text in one Document: a longer one comes in pieces, so that no file is held whole
_SPLIT = "<|endoftext|>"  # alone on a line, or a form feed anywhere: the next document of a plain text begins
_LINES = {".jsonl", ".ndjson"}
_FIELDS = ("text", "messages", "conversations")
_ROLES = {
    "system": "system", "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant",
    "model": "assistant", "function_call": "assistant", "tool": "tool", "function": "tool", "observation": "tool",
}  # fmt: skip
_RECORD = 'a record is `{"text": "..."}` or `{"messages": [{"role": "user", "content": "..."}, ...]}`'


@dataclass(frozen=True)
class Document:
    source: str  # for people: the file's name relative to what was given, or `stdin`
    text: str
    continues: bool = False  # the rest of the document before it, which was too long for one piece


@dataclass(frozen=True)
class _File:
    path: Path
    name: str
    found: bool  # in a folder, rather than given by name: it may be skipped


class Documents(Iterator[Document]):
    """A stream of documents that also knows, once it has been read, what it left out and why."""

    def __init__(self, paths: Sequence[str | Path], tokenizer: Any) -> None:
        if not paths:
            raise InputError("no data given", "name a file, a folder or `-` for standard input with `--data`")
        self.skipped: Counter[str] = Counter()  # reason -> files
        self._tokenizer = tokenizer
        self._stream = chain.from_iterable(map(self._read, self._files([str(path) for path in paths])))

    def __next__(self) -> Document:
        return next(self._stream)

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(f"{count} {'file' if count == 1 else 'files'} skipped: {reason}" for reason, count in sorted(self.skipped.items()))

    def _files(self, given: list[str]) -> list[_File]:
        found: list[tuple[Path, str, str, bool]] = []  # path, short name, name that tells apart, in a folder
        for place in given:
            path = Path(place)
            if place == "-":
                found.append((path, "stdin", "stdin", False))
            elif path.is_dir():
                inside = self._walk(path)
                if not inside:
                    raise InputError(f"`{place}` holds no files to read", "hidden files are left out")
                found += [(path / name, name, f"{path.name or place}/{name}", True) for name in inside]
            elif path.exists():
                found.append((path, path.name, f"{path.parent.name or '.'}/{path.name}", False))
            else:
                raise InputError(f"`{place}` does not exist", "name a file, a folder or `-` for standard input with `--data`")
        often = Counter(short for _, short, _, _ in found)
        return [_File(path, short if often[short] == 1 else longer, inside) for path, short, longer, inside in found]

    def _walk(self, folder: Path) -> list[str]:
        names = []
        for place, folders, files in os.walk(folder):
            here = Path(place).relative_to(folder)
            hidden = [name for name in folders if name.startswith(".")]
            self.skipped["hidden folders, with all that is in them"] += len(hidden)
            folders[:] = sorted(set(folders) - set(hidden))
            for name in files:
                if name.startswith("."):
                    self.skipped["hidden"] += 1
                elif (Path(place) / name).is_file():
                    names.append((here / name).as_posix())
                else:
                    self.skipped["not regular files"] += 1
        self.skipped = +self.skipped
        return sorted(names)

    def _read(self, file: _File) -> Iterator[Document]:
        kind = _kind(file.path)
        try:
            if kind == ".parquet":
                yield from self._records(file.name, _parquet(file))
            elif file.name == "stdin" and str(file.path) == "-":
                yield from self._standard_input()
            elif file.found and not _is_text(file.path):
                self.skipped["not UTF-8 text"] += 1
            else:
                with _open(file.path) as stream:
                    yield from self._text_or_records(file.name, kind, stream)
        except (gzip.BadGzipFile, EOFError, zlib.error) as failure:
            raise InputError(f"`{file.name}` is not a whole gzip file: {failure}", "download or compress it again") from failure
        except OSError as failure:
            raise InputError(
                f"`{file.name}` cannot be read: {failure.strerror or failure}", "check the path and its permissions"
            ) from failure

    def _text_or_records(self, name: str, kind: str, stream: IO[bytes]) -> Iterator[Document]:
        lines = _decoded(name, stream)
        if kind in _LINES:
            yield from self._records(name, _json_lines(name, lines))
        elif kind == ".json":
            first = next((line for line in lines if line[1].strip()), None)
            if first is not None:
                array = first[1].lstrip().startswith("[")
                rest = chain([first], lines)
                yield from self._records(name, _json_array(name, rest) if array else _json_lines(name, rest))
        else:
            yield from _plain(name, (text for _, text in lines))

    def _standard_input(self) -> Iterator[Document]:
        """JSON lines when the first line is a record, plain text otherwise: a pipe has no file name to tell by."""
        lines = _decoded("stdin", sys.stdin.buffer)
        first = next(lines, None)
        if first is None:
            raise InputError("standard input is empty", "pipe text into it, or name a file with `--data`")
        lines = chain([first], lines)
        try:
            record = json.loads(first[1])
        except ValueError:
            record = None
        if isinstance(record, dict) and any(field in record for field in _FIELDS):
            yield from self._records("stdin", _json_lines("stdin", lines))
        else:
            yield from _plain("stdin", (text for _, text in lines))

    def _records(self, name: str, records: Iterable[tuple[str, Any]]) -> Iterator[Document]:
        for place, record in records:
            yield Document(name, self._text(place, record))

    def _text(self, place: str, record: Any) -> str:
        if not isinstance(record, dict):
            raise InputError(f"{place}: a record must be an object, this is {_called(record)}", _RECORD)
        field = next((field for field in _FIELDS if record.get(field) is not None), None)
        if field is None:
            named = ", ".join(f"`{key}`" for key in list(record)[:6]) or "nothing"
            raise InputError(f"{place}: neither `text` nor `messages` in the record, which has {named}", _RECORD)
        value = record[field]
        if field != "text":
            return self._chat(place, field, value)
        if not isinstance(value, str):
            raise InputError(f"{place}: `text` must be a string, this is {_called(value)}", _RECORD)
        return value

    def _chat(self, place: str, field: str, turns: Any) -> str:
        if not isinstance(turns, list) or not turns:
            raise InputError(f"{place}: `{field}` must be a list of turns, this is {_called(turns)}", _RECORD)
        if not getattr(self._tokenizer, "chat_template", None):
            raise InputError(f"{place}: chat messages, but the model has no chat template", "give plain text, or records with a `text`")
        messages = [_message(place, field, number, turn) for number, turn in enumerate(turns, 1)]
        try:
            return str(self._tokenizer.apply_chat_template(messages, tokenize=False))
        except Exception as failure:  # a template is a program of the model's maker and may raise what it likes
            reason = str(failure).strip().splitlines()[0] if str(failure).strip() else type(failure).__name__
            raise InputError(
                f"{place}: the model's chat template refuses the messages: {reason}", "check roles and their order"
            ) from failure


def documents(paths: Sequence[str | Path], tokenizer: Any) -> Documents:
    """All documents under these paths, in order (folders sorted by name); `-` is standard input."""
    return Documents(paths, tokenizer)


def _kind(path: PurePath) -> str:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    return (suffixes[:-1] or [""])[-1] if suffixes[-1:] == [".gz"] else (suffixes or [""])[-1]


def _open(path: Path) -> IO[bytes]:
    return gzip.open(path, "rb") if path.suffix.lower() == ".gz" else path.open("rb")  # type: ignore[return-value]


def _is_text(path: Path) -> bool:
    """Whether all of it is UTF-8 without a NUL; read through once, because a picture may start like text."""
    from codecs import getincrementaldecoder

    decoder = getincrementaldecoder("utf-8")()
    try:
        with _open(path) as stream:
            while block := stream.read(1 << 20):
                if b"\0" in block:
                    return False
                decoder.decode(block)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return False
    return True


def _decoded(name: str, stream: IO[bytes]) -> Iterator[tuple[int, str]]:
    """(line number, line); decoded one by one, so that a wrong byte has a line number."""
    for number, line in enumerate(stream, 1):
        if number == 1:
            line = line.removeprefix(BOM_UTF8)
        try:
            text = line.decode("utf-8")
        except UnicodeDecodeError as failure:
            hint = "convert it to UTF-8 (`iconv -f LATIN1 -t UTF-8`), or leave the file out"
            raise InputError(f"{name}:{number}: not UTF-8 text, byte 0x{line[failure.start]:02x}", hint) from failure
        yield number, text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text


def _plain(name: str, lines: Iterable[str]) -> Iterator[Document]:
    """One document, or several where a form feed or a line `<|endoftext|>` says so; long ones in pieces that end with a line."""
    kept: list[str] = []
    size = 0
    continues = False
    for part in chain(_parts(lines), [None]):
        if part is None or size + len(part) > _PIECE:
            text = "".join(kept)
            if continues or text.strip():
                yield from [Document(name, text, continues)] if text else []
                continues = True
            kept, size = [], 0
        if part is None:
            continues = False
        else:
            kept.append(part)
            size += len(part)


def _parts(lines: Iterable[str]) -> Iterator[str | None]:
    """Lines, with None where a document ends; a line longer than a piece is cut where it must be."""
    for line in lines:
        if line.strip() == _SPLIT:
            yield None
        elif "\f" in line:
            first, *rest = line.split("\f")
            yield first
            for part in rest:
                yield None
                yield part
        else:
            yield from [line] if len(line) <= _PIECE else (line[at : at + _PIECE] for at in range(0, len(line), _PIECE))


def _json_lines(name: str, lines: Iterable[tuple[int, str]]) -> Iterator[tuple[str, Any]]:
    for number, line in lines:
        if line.strip():
            place = f"{name}:{number}"
            try:
                yield place, json.loads(line)
            except ValueError as failure:
                reason = failure.msg if isinstance(failure, json.JSONDecodeError) else str(failure)
                raise InputError(f"{place}: not JSON: {reason}", f"one record per line; {_RECORD}") from failure


def _json_array(name: str, lines: Iterable[tuple[int, str]]) -> Iterator[tuple[str, Any]]:
    """The elements of one array, parsed one at a time: the text is in memory, the objects are not."""
    numbered = iter(lines)
    line, first = next(numbered)
    text = first + "".join(line for _, line in numbered)
    decoder = json.JSONDecoder()
    counted = 0

    def place(where: int) -> str:
        nonlocal line, counted
        line, counted = line + text.count("\n", counted, where), where
        return f"{name}:{line}"

    def wrong(where: int, reason: str) -> InputError:
        return InputError(f"{place(where)}: not JSON: {reason}", f"an array of records; {_RECORD}")

    where = _after_space(text, text.index("[") + 1)
    more = not text.startswith("]", where)
    while more:
        start = place(where)
        try:
            record, where = decoder.raw_decode(text, where)
        except json.JSONDecodeError as failure:
            raise wrong(failure.pos, failure.msg) from failure
        yield start, record
        where = _after_space(text, where)
        more = text.startswith(",", where)
        if more:
            where = _after_space(text, where + 1)
        elif not text.startswith("]", where):
            raise wrong(where, "a comma or `]` is missing")
    where = _after_space(text, where + 1)
    if where < len(text):
        raise wrong(where, "more text after the array")


def _after_space(text: str, where: int) -> int:
    while where < len(text) and text[where].isspace():
        where += 1
    return where


def _parquet(file: _File) -> Iterator[tuple[str, Any]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as failure:
        raise MissingError(f"`{file.name}` needs pyarrow, which is not installed", "pip install 'fewbits[parquet]'") from failure
    try:
        with pyarrow.parquet.ParquetFile(file.path) as table:
            named = table.schema_arrow.names
            columns = [field for field in _FIELDS if field in named]
            if not columns:
                listed = ", ".join(f"`{name}`" for name in named[:6]) or "none"
                raise InputError(
                    f"`{file.name}` has neither a `text` nor a `messages` column, but {listed}", "rename the column that holds text"
                )
            row = 0
            for group in range(table.num_row_groups):
                for batch in table.iter_batches(batch_size=1024, row_groups=[group], columns=columns):
                    for record in batch.to_pylist():
                        row += 1
                        yield f"{file.name}: row {row}", record
    except pyarrow.ArrowException as failure:
        raise InputError(
            f"`{file.name}` cannot be read as Parquet: {str(failure).splitlines()[0]}", "write or download it again"
        ) from failure


def _message(place: str, field: str, number: int, turn: Any) -> dict[str, Any]:
    """One turn in the form that templates read; the `from` / `value` form of ShareGPT is translated."""
    if isinstance(turn, dict) and "role" in turn and "content" in turn:
        return turn
    if isinstance(turn, dict) and "from" in turn and "value" in turn:
        if turn["from"] not in _ROLES:
            known = ", ".join(sorted(_ROLES))
            raise InputError(f"{place}: turn {number} of `{field}` is from `{turn['from']}`", f"known are {known}")
        return {"role": _ROLES[turn["from"]], "content": turn["value"]}
    raise InputError(f"{place}: turn {number} of `{field}` has no `role` and `content`", _RECORD)


def _called(value: Any) -> str:
    names = {
        dict: "an object",
        list: "an empty list" if value == [] else "a list",
        str: "a string",
        bool: "true or false",
        type(None): "null",
    }
    return names.get(type(value), "a number" if isinstance(value, int | float) else type(value).__name__)
