"""Outputs appear whole or not at all: written under a temporary name beside the destination, then renamed."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import shutil
from pathlib import Path
from types import TracebackType
from typing import Any

from fewbits.errors import InputError, MissingError


class Staged:
    """`with Staged(path) as temporary: ...` makes `path` out of what was written to `temporary`, or leaves nothing.

    What is there already is replaced if it is of the same kind: a file, or a folder that holds `marker`. Anything else is somebody's.
    """

    def __init__(self, path: Path, marker: str | None = None) -> None:
        self.path, self._marker = path, marker
        self._temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
        self._made: list[Path] = []

    def __enter__(self) -> Path:
        if self.path.is_dir() and not (self._marker and ((self.path / self._marker).is_file() or not any(self.path.iterdir()))):
            raise InputError(f"`{self.path}` is a folder that fewbits did not make", "choose another `-o`, or remove it first")
        if self.path.exists() and not self.path.is_dir() and self._marker:
            raise InputError(f"`{self.path}` is a file", "choose another `-o`, or remove it first")
        try:
            self._made = [p for p in self.path.parents if not p.exists()]
            self.path.parent.mkdir(parents=True, exist_ok=True)
            _remove(self._temporary)
            self._temporary.touch()  # what cannot be written to is said before the work, not after
            self._temporary.unlink()
        except OSError as failure:
            self._clean()
            if is_full_disk(failure):
                raise self._full() from failure
            raise InputError(f"cannot write to `{self.path.parent}`: {failure.strerror}", "choose another `-o`") from failure
        return self._temporary

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self._take_the_place()
            return
        self._clean()
        if is_full_disk(error):
            raise self._full() from error

    def _take_the_place(self) -> None:
        if not self.path.is_dir():
            self._temporary.replace(self.path)
            return
        old = self._temporary.with_suffix(".old")  # a folder is not replaced in one step: the old one goes when the new one is there
        _remove(old)
        self.path.replace(old)
        try:
            self._temporary.replace(self.path)
        except OSError:
            old.replace(self.path)
            self._clean()
            raise
        shutil.rmtree(old)

    def _clean(self) -> None:
        _remove(self._temporary)
        for folder in self._made:
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()

    def _full(self) -> MissingError:
        return MissingError(f"the disk is full: `{self.path}` could not be written", "free some space or choose another `-o`")


def sha256_of(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def to_json(value: object) -> str:
    """JSON that every parser takes: a number that is not finite is null."""
    return json.dumps(_finite(value), indent=1, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    return [_finite(entry) for entry in value] if isinstance(value, list | tuple) else value


def is_full_disk(error: BaseException) -> bool:
    """Libraries wrap the system's error in their own, some keeping only its text."""
    text = str(error).lower()
    return getattr(error, "errno", None) in {errno.ENOSPC, errno.EDQUOT} or "no space left" in text or "disk quota" in text


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
