"""The header of a GGUF file: its metadata and its tensors, which are views of the mapped file.

The gguf package's reader makes two objects for every token and merge: 10 s for a vocabulary like Llama 3's, 0.3 s here. It checks the
files that fewbits writes; this reader opens the files that others wrote, and trusts nothing in them.

    "GGUF", uint32 version, uint64 tensors, uint64 keys       a string: uint64 length, bytes
    keys      string name, uint32 type, value                 an array: uint32 type of its items, uint64 count, items
    tensors   string name, uint32 dimensions, uint64 sizes (columns first), uint32 type, uint64 offset after the header's padding
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits.model import limits
from fewbits.model.gguf.types import BY_NUMBER, Type

if TYPE_CHECKING:
    import numpy as np

_ITEMS = "BbHhIif?__Qqd"  # struct's letter of each type by its number; 8 is a string, 9 an array
_STRING, _ARRAY = 8, 9
_LETTERS = {number: letter for number, letter in enumerate(_ITEMS) if letter != "_"}
_FLOATS = {"F32": "<f4", "F16": "<f2", "F64": "<f8", "I8": "<i1", "I16": "<i2", "I32": "<i4", "I64": "<i8"}


@dataclass(frozen=True)
class Field:
    raw: memoryview  # type and value, as in the file

    def contents(self) -> Any:
        return _value(self.raw)


@dataclass(frozen=True)
class Tensor:
    name: str
    tensor_type: Type
    shape: tuple[int, ...]  # columns first
    n_bytes: int
    data: np.ndarray[Any, Any]  # rows first; the bytes of each row if the type is quantized


@dataclass(frozen=True)
class Header:
    fields: dict[str, Field]
    tensors: tuple[Tensor, ...]


def read(path: Path) -> Header:
    """Raises ValueError, struct.error or UnicodeDecodeError where the file is damaged, OSError where it cannot be read."""
    import numpy as np

    if path.stat().st_size < 24:
        raise ValueError("it is too short to have a header")
    with path.open("rb") as file:
        whole = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    content = whole[: limits.HEADER]
    magic, version, tensor_count, key_count = struct.unpack_from("<4sIQQ", content)
    if magic != b"GGUF":
        raise ValueError("it does not begin with GGUF's magic number")
    if not version & 0xFFFF:
        raise ValueError("it has the other byte order: convert it with gguf-py's `gguf-convert-endian`")
    if version not in (2, 3):
        raise ValueError(f"it has version {version}, only 2 and 3 are known")
    if (most := max(tensor_count, key_count)) > limits.TENSORS:
        raise ValueError(f"it says that it has {most:,} tensors or keys, more than {limits.TENSORS:,}")
    at, items, fields = 24, 0, {}
    for _ in range(key_count):
        name, at = _string(content, at)
        end, count = _end(content, at, limits.ITEMS - items)
        if name in fields:
            raise ValueError(f"the key `{name}` is there twice")
        fields[name], at, items = Field(content[at:end]), end, items + count
    infos = []
    for _ in range(tensor_count):
        info, at = _info(content, at)
        infos.append(info)
    align = fields["general.alignment"].contents() if "general.alignment" in fields else 32
    if not isinstance(align, int) or align < 1 or align & (align - 1):
        raise ValueError(f"its alignment is {align}")
    start = -(-at // align) * align
    tensors = tuple(_tensors(np.frombuffer(whole, np.uint8), start, infos, align))
    _check_apart(infos, tensors)
    return Header(fields, tensors)


@dataclass(frozen=True)
class _Info:
    name: str
    shape: tuple[int, ...]
    type: int
    offset: int


def _info(content: memoryview, at: int) -> tuple[_Info, int]:
    name, at = _string(content, at)
    (dimensions,) = struct.unpack_from("<I", content, at)
    if not 1 <= dimensions <= 4:
        raise ValueError(f"`{name}` has {dimensions} dimensions")
    shape = struct.unpack_from(f"<{dimensions}Q", content, at + 4)
    if not all(shape):
        raise ValueError(f"`{name}` has the shape {shape}")
    at += 4 + 8 * dimensions
    number, offset = struct.unpack_from("<IQ", content, at)
    return _Info(name, shape, number, offset), at + 12


def _check_apart(infos: list[_Info], tensors: tuple[Tensor, ...]) -> None:
    """Tensors must not overlap: ten thousand names for one megabyte would take 10 GB once loaded. Names must differ: of two tensors with
    one name, two readers may take different ones."""
    names: set[str] = set()
    end, last = 0, ""
    for info, tensor in sorted(zip(infos, tensors, strict=True), key=lambda both: both[0].offset):
        if info.name in names:
            raise ValueError(f"the tensor `{info.name}` is there twice")
        if info.offset < end:
            raise ValueError(f"`{info.name}` and `{last}` overlap")
        names.add(info.name)
        end, last = info.offset + tensor.n_bytes, info.name


def _tensors(octets: np.ndarray[Any, Any], start: int, infos: list[_Info], align: int) -> Iterator[Tensor]:
    for info in infos:
        if (kind := BY_NUMBER.get(info.type)) is None:
            raise ValueError(f"`{info.name}` is of ggml's type {info.type}, which is not known here")
        if info.offset % align:
            raise ValueError(f"`{info.name}` lies at byte {info.offset}, which is no multiple of {align}")
        rows = info.shape[:0:-1]
        if info.shape[0] % kind.block:
            raise ValueError(f"`{info.name}` has {info.shape[0]} columns, not a whole number of {kind.name}'s blocks")
        nbytes = math.prod(info.shape) // kind.block * kind.nbytes
        if start + info.offset + nbytes > len(octets):
            raise ValueError(f"it ends before `{info.name}` does")
        data = octets[start + info.offset : start + info.offset + nbytes]
        data = data.view(_FLOATS[kind.name]) if kind.name in _FLOATS else data
        yield Tensor(info.name, kind, info.shape, nbytes, data.reshape(*rows, -1))


def _string(content: memoryview, at: int) -> tuple[str, int]:
    (length,) = struct.unpack_from("<Q", content, at)
    _check_end(content, at + 8 + length)
    return str(content[at + 8 : at + 8 + length], "utf-8"), at + 8 + length


def _end(content: memoryview, at: int, most: int) -> tuple[int, int]:
    """Where the value at `at` ends (its type comes first), and how many items it has, at most `most`. Strings are skipped, not decoded."""
    (kind,) = struct.unpack_from("<I", content, at)
    count, at = 1, at + 4
    if kind == _ARRAY:
        kind, count = struct.unpack_from("<IQ", content, at)
        at += 12
    if kind != _STRING and kind not in _LETTERS:
        raise ValueError(f"a value at byte {at} is of the unknown type {kind}")
    _check_end(content, at + count * (8 if kind == _STRING else struct.calcsize(f"<{_LETTERS[kind]}")))
    if count > most:
        raise ValueError(f"its arrays have more than {limits.ITEMS:,} items")
    if kind != _STRING:
        return at + count * struct.calcsize(f"<{_LETTERS[kind]}"), count
    length_at = struct.Struct("<Q").unpack_from
    for _ in range(count):
        if at > len(content):  # lengths of 2^64 would make `at` too large for struct
            break
        at += 8 + length_at(content, at)[0]
    _check_end(content, at)
    return at, count


def _check_end(content: memoryview, end: int) -> None:
    if end > len(content):
        where = "its end" if len(content) < limits.HEADER else f"the {limits.HEADER:,} bytes that a header may have"
        raise ValueError(f"a value goes beyond {where}")


def _value(content: memoryview) -> Any:
    (kind,) = struct.unpack_from("<I", content)
    if kind == _STRING:
        return _string(content, 4)[0]
    if kind != _ARRAY:
        return struct.unpack_from(f"<{_LETTERS[kind]}", content, 4)[0]
    kind, count = struct.unpack_from("<IQ", content, 4)
    if kind != _STRING:
        return list(struct.unpack_from(f"<{count}{_LETTERS[kind]}", content, 16))
    at, texts, length_at = 16, [], struct.Struct("<Q").unpack_from
    for _ in range(count):
        start = at + 8
        at = start + length_at(content, at)[0]
        texts.append(str(content[start:at], "utf-8"))
    return texts
