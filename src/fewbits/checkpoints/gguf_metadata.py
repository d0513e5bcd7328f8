"""The metadata of a GGUF, carried through an artifact folder into the next GGUF byte by byte: keys that nobody here knows too.

Left out is what would not be true of the next file: how its tensors are stored, cut into parts and aligned, and who made them.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fewbits.checkpoints import gguf_header
from fewbits.errors import InputError

FILE = "metadata.gguf"  # in an artifact folder: a GGUF without tensors
_SAID_ANEW = ("general.file_type", "general.quantization_version", "general.quantized_by", "general.alignment")
_SAID_ANEW_OF = ("split.", "quantize.imatrix.", "fewbits.")


@dataclass(frozen=True)
class Raw:
    """A value as it lies in a file: its type, then its content."""

    content: bytes


def read(path: Path) -> dict[str, Raw]:
    """Every key that stays true, in the file's order."""
    try:
        fields = gguf_header.read(path).fields
    except (ValueError, struct.error, OSError) as failure:
        raise InputError(f"the metadata in `{path}` cannot be read: {failure}", "open the original checkpoint again") from failure
    return {name: Raw(bytes(field.raw)) for name, field in fields.items() if name not in _SAID_ANEW and not name.startswith(_SAID_ANEW_OF)}


def save(source: Path, folder: Path) -> None:
    kept = read(source)
    writer = open_writer(folder / FILE, "")
    add(writer, kept)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()


def add(writer: Any, kept: dict[str, Raw]) -> None:
    """Into a writer of `open_writer`. What it has already gives way."""
    import gguf

    for name, value in kept.items():
        writer.kv_data[0].pop(name, None)
        writer.add_key_value(name, value, gguf.GGUFValueType.STRING)


def open_writer(path: Path, architecture: str) -> Any:
    """gguf's writer, which takes `Raw` values as they are."""
    import gguf

    class Writer(gguf.GGUFWriter):  # type: ignore[misc]
        def _pack_val(self, val: Any, *arguments: Any, **settings: Any) -> bytes:
            packed: bytes = val.content if isinstance(val, Raw) else super()._pack_val(val, *arguments, **settings)
            return packed

    return Writer(path, architecture)
