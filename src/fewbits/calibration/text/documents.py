"""Documents from the paths that a user gives: text, JSON lines, JSON arrays, Parquet, gzip of the first three, folders, standard input.

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
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path, PurePath
from typing import IO, Any

from fewbits.calibration.text import domains
from fewbits.calibration.text.records import BOMB, FIELDS, LONGEST, RATIO, RECORD, bomb, json_array, json_lines, parquet
from fewbits.errors import InputError
from fewbits.store.untrusted import first_line

_PIECE = 1_000_000  # characters of plain text in one Document: longer ones come in pieces, so that no file is in memory as a whole
_SPLIT = "<|endoftext|>"  # on a line by itself it begins the next document of a plain text, and so does a form feed anywhere
_LINES = {".jsonl", ".ndjson"}
_ROLES = {
    "system": "system", "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant",
    "model": "assistant", "function_call": "assistant", "tool": "tool", "function": "tool", "observation": "tool",
}  # fmt: skip


@dataclass(frozen=True)
class Document:
    source: str  # for messages: the file's name relative to the path that was given, or `stdin`
    text: str
    continues: bool = False  # another piece of the document before it
    domain: str = ""  # the kind of text: of the path that was given


@dataclass(frozen=True)
class _File:
    path: Path
    name: str
    in_folder: bool  # rather than given by name: it may be skipped
    domain: str


class Documents(Iterator[Document]):
    """A stream of documents that says, once it has been read, which files were skipped and why."""

    def __init__(self, paths: Sequence[str | Path], tokenizer: Any, domain: str | None = None) -> None:
        if not paths:
            raise InputError("no data given", "name a file, a folder or `-` for standard input with `--data`")
        self.skipped: Counter[str] = Counter()  # reason -> files
        self._tokenizer = tokenizer
        files = [file for file in self._files(domains.named(paths), domain) if domain in (None, file.domain)]
        self._stream = chain.from_iterable(map(self._of_domain, files))

    def __next__(self) -> Document:
        return next(self._stream)

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(f"{count} {'file' if count == 1 else 'files'} skipped: {reason}" for reason, count in sorted(self.skipped.items()))

    def _of_domain(self, file: _File) -> Iterator[Document]:
        return (replace(document, domain=file.domain) for document in self._read(file))

    def _files(self, paths: Iterable[domains.Given], domain: str | None) -> list[_File]:
        """All files: what one of them is called depends on the others."""
        files: list[tuple[Path, str, str, bool, str]] = []  # path, short name, longer name if several share it, in a folder, kind of text
        for given in paths:
            place, path = given.path, Path(given.path)
            if place == "-":
                files.append((path, "stdin", "stdin", False, given.domain))
            elif path.is_dir():
                inside = self._walk(path, counted=domain in (None, given.domain))
                if not inside:
                    raise InputError(f"`{place}` holds no files to read", "hidden files are left out")
                files += [(path / name, name, f"{path.name or place}/{name}", True, given.domain) for name in inside]
            elif path.exists():
                files.append((path, path.name, f"{path.parent.name or '.'}/{path.name}", False, given.domain))
            else:
                raise InputError(f"`{place}` does not exist", "name a file, a folder or `-` for standard input with `--data`")
        count = Counter(short for _, short, *_ in files)
        return [_File(path, short if count[short] == 1 else longer, inside, domain) for path, short, longer, inside, domain in files]

    def _walk(self, folder: Path, counted: bool) -> list[str]:
        names = []
        skipped: Counter[str] = Counter()
        for place, folders, files in os.walk(folder):
            here = Path(place).relative_to(folder)
            hidden = [name for name in folders if name.startswith(".")]
            skipped["hidden folders, with all that is in them"] += len(hidden)
            folders[:] = sorted(set(folders) - set(hidden))
            for name in files:
                if name.startswith("."):
                    skipped["hidden"] += 1
                elif (Path(place) / name).is_file():
                    names.append((here / name).as_posix())
                else:
                    skipped["not regular files"] += 1
        self.skipped += skipped if counted else Counter()
        return sorted(names)

    def _read(self, file: _File) -> Iterator[Document]:
        kind = _kind(file.path)
        try:
            if kind == ".parquet":
                yield from self._records(file.name, parquet(file.path, file.name))
            elif file.name == "stdin" and str(file.path) == "-":
                yield from self._standard_input()
            elif file.in_folder and not _is_text(file.path):
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
        lines = _decoded(name, stream, kind in _LINES or kind == ".json")
        if kind in _LINES:
            yield from self._records(name, json_lines(name, lines))
        elif kind == ".json":
            first = next((line for line in lines if line[1].strip()), None)
            if first is not None:
                array = first[1].lstrip().startswith("[")
                rest = chain([first], lines)
                yield from self._records(name, json_array(name, rest) if array else json_lines(name, rest))
        else:
            yield from _plain(name, (text for _, text in lines))

    def _standard_input(self) -> Iterator[Document]:
        """JSON lines if the first line is a record, plain text otherwise: a pipe has no file name that would tell."""
        lines = _decoded("stdin", sys.stdin.buffer)
        first = next(lines, None)
        if first is None:
            raise InputError("standard input is empty", "pipe text into it, or name a file with `--data`")
        lines = chain([first], lines)
        try:
            record = json.loads(first[1])
        except (ValueError, RecursionError):
            record = None
        if isinstance(record, dict) and any(field in record for field in FIELDS):
            yield from self._records("stdin", json_lines("stdin", lines))
        else:
            yield from _plain("stdin", (text for _, text in lines))

    def _records(self, name: str, records: Iterable[tuple[str, Any]]) -> Iterator[Document]:
        for place, record in records:
            text = self._text(place, record)
            try:
                text.encode()
            except UnicodeEncodeError as failure:  # JSON allows half of a surrogate pair, tokenizers do not
                reason = f"character {failure.start} is half of a surrogate pair"
                raise InputError(f"{place}: {reason}", "leave the record out, or mend it") from failure
            yield Document(name, text)

    def _text(self, place: str, record: Any) -> str:
        if not isinstance(record, dict):
            raise InputError(f"{place}: a record must be an object, this is {_called(record)}", RECORD)
        field = next((field for field in FIELDS if record.get(field) is not None), None)
        if field is None:
            named = ", ".join(f"`{key}`" for key in list(record)[:6]) or "nothing"
            raise InputError(f"{place}: neither `text` nor `messages` in the record, which has {named}", RECORD)
        value = record[field]
        if field != "text":
            return self._chat(place, field, value)
        if not isinstance(value, str):
            raise InputError(f"{place}: `text` must be a string, this is {_called(value)}", RECORD)
        return value

    def _chat(self, place: str, field: str, turns: Any) -> str:
        if not isinstance(turns, list) or not turns:
            raise InputError(f"{place}: `{field}` must be a list of turns, this is {_called(turns)}", RECORD)
        if not getattr(self._tokenizer, "chat_template", None):
            raise InputError(f"{place}: chat messages, but the model has no chat template", "give plain text, or records with a `text`")
        messages = [_message(place, field, number, turn) for number, turn in enumerate(turns, 1)]
        try:
            return str(self._tokenizer.apply_chat_template(messages, tokenize=False))
        except Exception as failure:  # a template comes with the model and may raise anything
            reason = f"the model's chat template refuses the messages: {first_line(failure)}"
            raise InputError(f"{place}: {reason}", "check roles and their order") from failure


def documents(paths: Sequence[str | Path], tokenizer: Any, domain: str | None = None) -> Documents:
    """All documents under these paths, or those of one kind, in order (folders sorted by name); `-` is standard input."""
    return Documents(paths, tokenizer, domain)


def _kind(path: PurePath) -> str:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    return (suffixes[:-1] or [""])[-1] if suffixes[-1:] == [".gz"] else (suffixes or [""])[-1]


def _open(path: Path) -> IO[bytes]:
    return gzip.open(path, "rb") if path.suffix.lower() == ".gz" else path.open("rb")  # type: ignore[return-value]


def _is_text(path: Path) -> bool:
    """Whether the whole file is UTF-8 without a NUL. All of it is read, because a picture may start like text."""
    from codecs import getincrementaldecoder

    decoder = getincrementaldecoder("utf-8")()
    seen = 0
    try:
        with _open(path) as stream:
            while block := stream.read(1 << 20):
                seen += len(block)
                _check_ratio(path.name, stream, seen)
                if b"\0" in block:
                    return False
                decoder.decode(block)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return False
    return True


def _check_ratio(name: str, stream: IO[bytes], seen: int) -> None:
    """Compares the bytes decompressed so far with those read for them: a bomb is recognised long before its end."""
    if isinstance(stream, gzip.GzipFile) and seen > BOMB and seen > RATIO * stream.fileobj.tell():
        raise bomb(name)


def _decoded(name: str, stream: IO[bytes], records: bool = False) -> Iterator[tuple[int, str]]:
    """(line number, line). Lines are decoded one by one, so that a wrong byte has a line number. A very long line comes in pieces, unless
    it should be a record."""
    number, seen, due, held = 1, 0, BOMB, b""
    while line := stream.readline(LONGEST):
        seen += len(line)
        if seen > due:
            _check_ratio(name, stream, seen)
            due = seen + (1 << 20)
        ended = line.endswith(b"\n")
        if records and not ended and len(line) == LONGEST:
            raise InputError(f"{name}:{number}: a line of more than {LONGEST >> 20} MB", f"one record per line; {RECORD}")
        line, held = held + (line.removeprefix(BOM_UTF8) if seen == len(line) else line), b""
        try:
            text = line.decode("utf-8")
        except UnicodeDecodeError as failure:
            if ended or failure.end < len(line) or len(line) < LONGEST:
                hint = "convert it to UTF-8 (`iconv -f LATIN1 -t UTF-8`), or leave the file out"
                raise InputError(f"{name}:{number}: not UTF-8 text, byte 0x{line[failure.start]:02x}", hint) from failure
            text, held = line[: failure.start].decode("utf-8"), line[failure.start :]  # cut in the middle of a character
        yield number, text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text
        number += ended


def _plain(name: str, lines: Iterable[str]) -> Iterator[Document]:
    """One document, or several separated by form feeds or lines `<|endoftext|>`; long ones in pieces that end with a line."""
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
    """Lines, with None where a document ends; a line longer than a piece is cut."""
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


def _message(place: str, field: str, number: int, turn: Any) -> dict[str, Any]:
    """One turn in the form that chat templates read; ShareGPT's `from` and `value` are translated."""
    if isinstance(turn, dict) and "role" in turn and "content" in turn:
        return turn
    if isinstance(turn, dict) and "from" in turn and "value" in turn:
        if turn["from"] not in _ROLES:
            known = ", ".join(sorted(_ROLES))
            raise InputError(f"{place}: turn {number} of `{field}` is from `{turn['from']}`", f"known are {known}")
        return {"role": _ROLES[turn["from"]], "content": turn["value"]}
    raise InputError(f"{place}: turn {number} of `{field}` has no `role` and `content`", RECORD)


def _called(value: Any) -> str:
    names = {
        dict: "an object",
        list: "an empty list" if value == [] else "a list",
        str: "a string",
        bool: "true or false",
        type(None): "null",
    }
    return names.get(type(value), "a number" if isinstance(value, int | float) else type(value).__name__)
