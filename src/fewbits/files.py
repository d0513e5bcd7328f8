"""Outputs appear whole or not at all: written under a temporary name beside the destination, flushed to the disk, then renamed."""

from __future__ import annotations

import errno
import glob
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
        self._old = self._temporary.with_suffix(".old")
        self._made: list[Path] = []

    def __enter__(self) -> Path:
        if self.path.is_dir() and not (self._marker and ((self.path / self._marker).is_file() or not any(self.path.iterdir()))):
            raise InputError(f"`{self.path}` is a folder that fewbits did not make", "choose another `-o`, or remove it first")
        if self.path.exists() and not self.path.is_dir() and self._marker:
            raise InputError(f"`{self.path}` is a file", "choose another `-o`, or remove it first")
        try:
            self._made = [p for p in self.path.parents if not p.exists()]
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._clean_after_the_dead()
            self._temporary.touch()  # what cannot be written to is said before the work, not after
            self._temporary.unlink()
        except OSError as failure:
            self._clean()
            raise self._full() if is_full_disk(failure) else cannot_write(self.path.parent, failure) from failure
        return self._temporary

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            try:
                sync(self._temporary)
                self._take_the_place()
                sync(self.path.parent, contents=False)
                return
            except OSError as failure:
                error = failure
        self._clean()
        if is_full_disk(error):
            raise self._full() from error
        if kind is None:
            raise error

    def _take_the_place(self) -> None:
        if not self.path.is_dir():
            self._temporary.replace(self.path)
            return
        self.path.replace(self._old)  # a folder is not replaced in one step: the old one goes when the new one is there
        try:
            self._temporary.replace(self.path)
        except OSError:
            self._old.replace(self.path)
            raise
        shutil.rmtree(self._old)

    def _clean_after_the_dead(self) -> None:
        """A process that was killed left its temporary; if it was killed between the two steps of replacing a folder, the old one too."""
        pattern = f".{glob.escape(self.path.name)}.*"
        for old in [self._old, *self.path.parent.glob(f"{pattern}.old")]:
            if old == self._old or not _is_alive(old):
                if old.exists() and not self.path.exists():
                    old.replace(self.path)
                remove(old)
        for temporary in [self._temporary, *self.path.parent.glob(f"{pattern}.partial")]:
            if temporary == self._temporary or not _is_alive(temporary):
                remove(temporary)

    def _clean(self) -> None:
        remove(self._temporary)
        for folder in self._made:
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()

    def _full(self) -> MissingError:
        hint = "free some space and run the same again, or choose another `-o`"
        return MissingError(f"the disk is full: `{self.path}` could not be written", hint)


def sync(path: Path, contents: bool = True) -> None:
    """On the disk for good, not just in the system's memory: a file, or a folder with everything in it."""
    if contents and path.is_dir():
        for inside in path.iterdir():
            sync(inside)
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def cannot_write(folder: Path, failure: OSError) -> InputError:
    return InputError(f"cannot write to `{folder}`: {failure.strerror}", "choose another `-o`")


def _is_alive(temporary: Path) -> bool:
    """Does the process whose number is in this temporary's name still run?"""
    try:
        os.kill(int(temporary.stem.rpartition(".")[2]), 0)
    except (ProcessLookupError, ValueError, OverflowError):
        return False
    except PermissionError:  # somebody else's
        return True
    return True


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
