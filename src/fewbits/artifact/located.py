"""The artifact that a path means: the folder itself, or the one that `quantize` left beside its output."""

from __future__ import annotations

import json
from pathlib import Path

from fewbits.artifact import manifest
from fewbits.artifact.written import NAME as WRITTEN

_LARGEST = 1 << 20  # bytes of the list of hashes that is read to see whether a file is the one that was written


def located(path: Path) -> Path | None:
    """`m.gguf`, `m.gguf.work` and `m.gguf.work/artifact` mean the same. None: there is none, or the file is another by now."""
    if (path / manifest.NAME).is_file():
        return path
    work = path.with_name(f"{path.name}.work") if path.name else path
    if (work / "artifact" / manifest.NAME).is_file() and _is_what_was_written(path, work / WRITTEN):
        return work / "artifact"
    return path / "artifact" if (path / "artifact" / manifest.NAME).is_file() else None


def _is_what_was_written(path: Path, hashes: Path) -> bool:
    """By its size: reading gigabytes for a hash would take longer than to begin."""
    if not path.is_file() or not hashes.is_file() or hashes.stat().st_size > _LARGEST:
        return path.exists()
    try:
        row = json.loads(hashes.read_text(encoding="utf-8"))["files"].get(path.name)
    except (ValueError, KeyError, AttributeError):
        return False
    return isinstance(row, dict) and row.get("bytes") == path.stat().st_size
