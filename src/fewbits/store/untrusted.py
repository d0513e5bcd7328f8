"""Text and JSON from files that may come from anybody: what is too large, nested too deep or not text is refused before it is decoded.

Limits on JSON count values, because a value takes some 64 bytes in memory, however few bytes it has in the file."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from fewbits.errors import InputError

VALUES = 3_000_000  # in a JSON file of no special kind
CONFIG = 300_000  # in a config.json, which transformers parses again; the names of all layers of a large mixture are 50,000
TOKENIZER = 4_000_000  # in a tokenizer.json: 262,144 tokens and half a million merges, each a list of two, are 2.6 million
TABLES = 30_000_000  # in a file with a row for every weight: a mixture of 70,000 experts in two dozen formats
TEXT = 64 << 20  # bytes of a JSON file: the tokenizer of the largest vocabulary (262,144 tokens) has 33 MB
TABLE = 512 << 20  # bytes of a table of sensitivities, which has a row for every weight and format
_DECODED = 160 << 20  # bytes that a text may take in memory, unless its file alone has more
_ROOM = {",": 1, ":": 1, "[": 2, "{": 3}  # memory behind each sign of a JSON text, in values of 64 bytes, by Python 3.11's objects
_HINT = "no honest file says so: do not trust it"
_PIECE = 1 << 20  # bytes read at once
_LONGEST_NAME = 255  # bytes in the name of a file, on every file system in use


def read_text(path: Path, hint: str, longest: int = TABLE) -> str:
    """A UTF-8 file of at most `longest` bytes. `hint` says what to do if it is missing or no text."""
    try:
        if path.exists() and not path.is_file():  # reading a pipe would block
            raise InputError(f"`{path}` is not a file", hint)
        content = bytearray()
        with path.open("rb") as file:
            if (size := os.fstat(file.fileno()).st_size) > longest:
                raise InputError(f"`{path}` has {size:,} bytes, more than {longest:,}", "no honest file of this kind is so large")
            while (piece := file.read(_PIECE)) and len(content) <= size:
                if b"\0" in piece:  # text has no zeros, and a sparse file of gigabytes has nothing else
                    raise InputError(f"`{path}` is not UTF-8 text: it holds zeros", hint)
                content += piece
        check_decoded(content, path)
        return content.decode("utf-8")
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(f"`{path}` is missing", hint) from None
    except OSError as failure:
        raise InputError(f"`{path}` cannot be read: {failure.strerror}", hint) from failure
    except UnicodeDecodeError as failure:
        raise InputError(f"`{path}` is not UTF-8 text", hint) from failure


def read_json(path: Path, hint: str, values: int = VALUES) -> Any:
    """A JSON file of at most `values` values."""
    text = read_text(path, hint, TEXT if values < TABLES else TABLE)
    if (count := values_in(text)) > values:
        raise InputError(f"`{path}` holds {count:,} values, more than {values:,}", "no honest file of this kind is so large")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as failure:
        raise InputError(f"`{path}` is not valid JSON: {failure}", "the file is damaged; fetch it again") from failure


def plain(name: str) -> bool:
    """Whether this is the name of a file in the same folder: no path, and a name that a file system accepts."""
    try:
        return Path(name).name == name and name != ".." and "\0" not in name and len(name.encode()) <= _LONGEST_NAME
    except UnicodeEncodeError:  # half of a surrogate pair
        return False


def inside(folder: Path, file: Path) -> Path:
    """The same file, unless it is a link that leads out of the folder: a secret behind it would be copied into a model and published.
    Links of the hub's cache are allowed; they lead into the `blobs` beside its `snapshots`."""
    home = folder.resolve()
    cache = home.parents[1] / "blobs" if len(home.parents) > 1 and home.parent.name == "snapshots" else home
    target = file.resolve()
    if not (target.is_relative_to(home) or target.is_relative_to(cache)):
        raise InputError(f"`{file}` is a link that leads out of its folder", "put a copy in its place if you trust what it leads to")
    return file


def first_line(failure: BaseException) -> str:
    """The first line of a library's message, without the pages of advice that may follow."""
    message = str(failure).strip()
    return message.splitlines()[0] if message else type(failure).__name__


def values_in(text: str | bytes) -> int:
    """How many values a JSON text holds at most; a list or an object counts as several, for the memory that it takes itself."""
    return sum(room * (text.count(sign) if isinstance(text, str) else text.count(sign.encode())) for sign, room in _ROOM.items())


def check_decoded(content: bytes | bytearray, path: Path) -> None:
    """Refuses a text that would take far more memory than its file: Python stores every character in 4 bytes if one of them needs 4."""
    each = 1 if content.isascii() else 4 if content.translate(None, bytes(range(0xF0))) else 2
    if (room := each * len(content)) > max(_DECODED, len(content)):
        raise InputError(f"`{path}` is a text that takes {room:,} bytes in memory", _HINT)
