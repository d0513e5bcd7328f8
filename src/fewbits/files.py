"""Outputs appear whole or not at all: written under a temporary name beside the destination, then renamed."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from types import TracebackType

from fewbits.errors import InputError, MissingError


class Staged:
    """`with Staged(path) as temporary: ...` makes `path` out of what was written to `temporary`, or leaves nothing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")

    def __enter__(self) -> Path:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as failure:
            raise InputError(f"cannot write to `{self.path.parent}`: {failure.strerror}", "choose another `-o`") from failure
        _remove(self._temporary)
        return self._temporary

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            _remove(self.path)
            self._temporary.rename(self.path)
            return
        _remove(self._temporary)
        if is_full_disk(error):
            raise MissingError(f"the disk is full: `{self.path}` could not be written", "free some space or choose another `-o`") from error


def is_full_disk(error: BaseException) -> bool:
    """Libraries wrap the system's error in their own, some keeping only its text."""
    text = str(error).lower()
    return getattr(error, "errno", None) in {errno.ENOSPC, errno.EDQUOT} or "no space left" in text or "disk quota" in text


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
