"""The metadata of a GGUF, carried through an artifact folder into the next GGUF byte by byte, including keys that fewbits does not know.

Keys that would be false for the next file are left out: how its tensors are stored, split and aligned, and who quantized them.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fewbits.errors import InputError
from fewbits.model.gguf import header

FILE = "metadata.gguf"  # in an artifact folder: a GGUF without tensors
_STALE = ("general.file_type", "general.quantization_version", "general.quantized_by", "general.alignment")
_STALE_PREFIXES = ("split.", "quantize.imatrix.", "fewbits.")


@dataclass(frozen=True)
class Raw:
    """A value as its bytes in the file: the type, then the content."""

    content: bytes


def read(path: Path) -> dict[str, Raw]:
    """Every key that stays true for the next file, in the file's order."""
    try:
        fields = header.read(path).fields
    except (ValueError, struct.error, OSError) as failure:
        raise InputError(f"the metadata in `{path}` cannot be read: {failure}", "open the original checkpoint again") from failure
    return {name: Raw(bytes(field.raw)) for name, field in fields.items() if name not in _STALE and not name.startswith(_STALE_PREFIXES)}


def values(path: Path) -> dict[str, Any]:
    """Every key of a GGUF as a plain value."""
    try:
        return {name: field.contents() for name, field in header.read(path).fields.items()}
    except (ValueError, struct.error, OSError) as failure:
        raise InputError(f"the metadata in `{path}` cannot be read: {failure}", "make the artifact anew") from failure


def save(source: Path, folder: Path) -> None:
    writer = open_writer(folder / FILE, "")
    add(writer, read(source))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()


def add(writer: Any, values: dict[str, Raw]) -> None:
    """Adds these to a writer from `open_writer`, in place of values that it already has for the same keys."""
    import gguf

    for name, value in values.items():
        writer.kv_data[0].pop(name, None)
        writer.add_key_value(name, value, gguf.GGUFValueType.STRING)


def open_writer(path: Path, architecture: str) -> Any:
    """gguf's writer, extended to write `Raw` values unchanged."""
    import gguf

    class Writer(gguf.GGUFWriter):  # type: ignore[misc]
        def _pack_val(self, val: Any, *arguments: Any, **settings: Any) -> bytes:
            packed: bytes = val.content if isinstance(val, Raw) else super()._pack_val(val, *arguments, **settings)
            return packed

    return Writer(path, architecture)
