"""Outputs appear whole or not at all: written under a temporary name beside the destination, flushed to the disk, then renamed.

The arrays of an .onnx file may be in a second file, NAME.onnx.data. The pair is replaced as one output: no reader ever sees a graph with
another graph's arrays.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import shutil
from pathlib import Path
from types import TracebackType
from typing import Any

from fewbits.errors import InputError, MissingError

_PLACES, _PLACE = 16, 1 << 16  # places of a file that `sampled` reads, and the bytes at each
_TEMPORARY = re.compile(r"\.(?P<name>.+)\.(?P<process>\d+)\.(?P<kind>partial|old)")


class Staged:
    """`with Staged(path) as temporary: ...` makes `path` out of what was written to `temporary`, or leaves nothing.

    An existing output is replaced if it is of the same kind: a file, or a folder that holds `marker`. Anything else is refused.
    For an .onnx file, what was written to `beside(temporary)` is moved along with it, and the arrays of an earlier graph are removed.
    """

    def __init__(self, path: Path, marker: str | None = None) -> None:
        self.path, self._marker = path, marker
        self._data = beside(path) if path.suffix.lower() == ".onnx" and marker is None else None
        self._temporary = _named(path, os.getpid(), "partial")
        self._made: list[Path] = []

    def check(self) -> None:
        """Refuses a destination that is neither free nor replaceable."""
        if self.path.is_dir() and not (self._marker and ((self.path / self._marker).is_file() or not any(self.path.iterdir()))):
            raise InputError(f"`{self.path}` is a folder that fewbits did not make", "choose another `-o`, or remove it first")
        if self.path.exists() and not self.path.is_dir() and self._marker:
            raise InputError(f"`{self.path}` is a file", "choose another `-o`, or remove it first")

    def __enter__(self) -> Path:
        self.check()
        try:
            self._made = [p for p in self.path.parents if not p.exists()]
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._remove_abandoned()
            self._temporary.touch()  # a place that cannot be written to is reported before the work, not after
            self._temporary.unlink()
        except OSError as failure:
            self._clean()
            raise self._full() if is_full_disk(failure) else cannot_write(self.path.parent, failure) from failure
        return self._temporary

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            try:
                for place in self._places:
                    if (new := _named(place, os.getpid(), "partial")).exists():
                        sync(new)
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

    @property
    def _places(self) -> list[Path]:
        """The graph comes last: until it is there, the output does not exist."""
        return [self._data, self.path] if self._data else [self.path]

    def _take_the_place(self) -> None:
        arrays = beside(self._temporary) if self._data else None
        if arrays is None or not arrays.exists():
            if self.path.is_dir():
                self._replace_in_two_steps()
            else:
                self._temporary.replace(self.path)
            if self._data:
                self._data.unlink(missing_ok=True)  # arrays of an earlier graph
        elif self._data and self.path.exists() and self._data.exists():
            self._replace_in_two_steps()
        elif self._data:
            arrays.replace(self._data)  # an existing graph has no such file, and does not read it
            try:
                sync(self.path.parent, contents=False)
                self._temporary.replace(self.path)
            except OSError:
                self._data.unlink()
                raise

    def _replace_in_two_steps(self) -> None:
        """Neither a folder nor a pair of files can be replaced in one step: the old one is moved aside before the new one appears, and is
        removed when the new one is complete."""
        process = os.getpid()
        try:
            for place in reversed(self._places):
                place.replace(_named(place, process, "old"))
                sync(self.path.parent, contents=False)
            for place in self._places:
                _named(place, process, "partial").replace(place)
                sync(self.path.parent, contents=False)
        finally:
            self._put_back(process)

    def _put_back(self, process: int) -> None:
        """Restores what this process had moved aside if nothing took its place, and removes it otherwise."""
        wanted = not self.path.exists() and _named(self.path, process, "old").exists()
        for place in self._places:
            old = _named(place, process, "old")
            if wanted and old.exists():
                old.replace(place)
            remove(old)

    def _remove_abandoned(self) -> None:
        """Temporary files of killed processes. One that was killed between the two steps of replacing also left the old output, which is
        restored."""
        names = {place.name for place in self._places}
        matches = (_TEMPORARY.fullmatch(path.name) for path in self.path.parent.iterdir())
        processes = {int(match["process"]) for match in matches if match and match["name"] in names}
        for process in sorted(process for process in processes if process == os.getpid() or not _is_alive(process)):
            self._put_back(process)
            for place in self._places:
                remove(_named(place, process, "partial"))

    def _clean(self) -> None:
        for place in self._places:
            remove(_named(place, os.getpid(), "partial"))
        for folder in self._made:
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()

    def _full(self) -> MissingError:
        hint = "free some space and run the same again, or choose another `-o`"
        return MissingError(f"the disk is full: `{self.path}` could not be written", hint)


def beside(path: Path) -> Path:
    """The file for arrays that do not fit into an .onnx file. Beside a temporary file it has a temporary name as well."""
    if match := _TEMPORARY.fullmatch(path.name):
        return _named(path.with_name(f"{match['name']}.data"), int(match["process"]), match["kind"])
    return path.with_name(f"{path.name}.data")


def final_name(path: Path) -> str:
    """The name that a file will have once it is complete."""
    match = _TEMPORARY.fullmatch(path.name)
    return match["name"] if match else path.name


def _named(path: Path, process: int, kind: str) -> Path:
    return path.with_name(f".{path.name}.{process}.{kind}")


def sync(path: Path, contents: bool = True) -> None:
    """Flushes a file, or a folder with everything in it, from the system's memory to the disk."""
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


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # it exists, and belongs to another user
        return True
    return True


def sha256_of(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def sampled(path: Path) -> str:
    """A hash of its size and of 16 places in it: cheap, and different for two models of the same shape."""
    size = path.stat().st_size
    digest = hashlib.sha256(f"{size} ".encode())
    with path.open("rb") as stream:
        for place in range(_PLACES):
            stream.seek(size * place // _PLACES)
            digest.update(stream.read(_PLACE))
    return digest.hexdigest()


def to_json(value: object) -> str:
    """JSON that every parser accepts: numbers that are not finite become null."""
    return json.dumps(_finite(value), indent=1, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    return [_finite(entry) for entry in value] if isinstance(value, list | tuple) else value


def is_full_disk(error: BaseException) -> bool:
    """Libraries wrap the system's error in their own, and some keep only its text."""
    text = str(error).lower()
    return getattr(error, "errno", None) in {errno.ENOSPC, errno.EDQUOT} or "no space left" in text or "disk quota" in text
