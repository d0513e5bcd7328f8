"""The cache of a long run: each result is written as soon as it is made, so that a run killed at any moment resumes to the same bytes.

A result is a safetensors file, `STEP-KEY-DIGEST.safetensors`. KEY is the hash of everything that the result depends on: source, text, step,
parameters, code, and what decides the order of floating-point sums (instruction set, number of threads). DIGEST is the hash of the file
itself: a file that is damaged or cut short counts as absent. It is written under a temporary name, flushed to the disk and renamed.

Steps that take only seconds for a model of a billion weights (planning, writing the file out of finished weights) are not cached.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import re
import secrets
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from fewbits.errors import InputError, MissingError
from fewbits.progress import say, silent
from fewbits.store import maker
from fewbits.store.files import cannot_write, is_full_disk, remove, sha256_of, sync
from fewbits.store.tensor_file import SafetensorError, TensorFile

if TYPE_CHECKING:
    from torch import Tensor

    from fewbits.progress import Progress

_LOCK = "lock"
_RESULTS = "cache"  # folder names inside a work folder
SHARDS = "shards"  # of a calibration; each shard has a cache of its own
_KEY = 32  # hex digits of a hash in a file name: 128 bits


@dataclass(frozen=True)
class Result:
    path: Path
    values: Mapping[str, Any]

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """Mapped, not read: the system loads pages when they are touched, and drops them when memory is short."""
        file = TensorFile(self.path)
        return {name: file.tensor(name) for name in file.keys()}  # noqa: SIM118

    def link(self, path: Path) -> None:
        """A hard link to the file, which stays when the result is dropped from the cache."""
        try:
            os.link(self.path, path)
        except OSError:  # the file system has no hard links
            shutil.copyfile(self.path, path)


class Cache:
    """The results in a folder. `about` is part of every key; `of` gives a view of the same folder with more added to `about`."""

    def __init__(self, folder: Path, about: Mapping[str, Any] | None = None, listed: bool = True) -> None:
        """`listed`: read the names in the folder now. A worker, which makes one result among a million, does not; it calls `look`."""
        self.folder, self.about = folder, dict(about or {})
        self._used: set[str] = set()  # file names that this run wrote or has checked
        self._names: dict[tuple[str, str], str] = {}  # (step, key) -> file name
        for path in folder.glob("*.safetensors") if listed and folder.is_dir() else ():
            step, _, key = path.stem.rpartition("-")[0].rpartition("-")
            self._names[step, key] = path.name

    def of(self, **about: Any) -> Cache:
        narrowed = Cache.__new__(Cache)
        narrowed.folder, narrowed._used, narrowed._names = self.folder, self._used, self._names
        narrowed.about = self.about | about
        return narrowed

    def results(self) -> Counter[str]:
        """How many there are of each step, of this run or an earlier one; they are not read."""
        return Counter(step for step, _ in self._names)

    def has(self, step: str, **parameters: Any) -> bool:
        """Whether a file has the right name; it is not read. Tells how much is done before a run resumes."""
        return (step, self._key(step, parameters)) in self._names

    def find(self, step: str, **parameters: Any) -> Result | None:
        """The result, or None if it is absent or damaged. A damaged file is removed."""
        key = self._key(step, parameters)
        name = self._names.get((step, key))
        if name is None:
            return None
        path = self.folder / name
        if name not in self._used and not _is_whole(path):
            path.unlink(missing_ok=True)
            del self._names[step, key]
            return None
        self._used.add(name)
        return Result(path, _values(path))

    def look(self, step: str, **parameters: Any) -> Result | None:
        """As `find`, but looks into the folder again: another process may have written the result since it was listed."""
        for path in self.folder.glob(f"{self.stem(step, **parameters)}-*.safetensors"):
            if result := self.take(path.name, step, **parameters):
                return result
        return None

    def take(self, name: str, step: str, **parameters: Any) -> Result | None:
        """The result that another process wrote under this name, or None. The name must be that of this very result: a worker's answer is
        not trusted, and must not lead out of the folder."""
        if not re.fullmatch(rf"{re.escape(self.stem(step, **parameters))}-[0-9a-f]{{{_KEY}}}\.safetensors", name):
            return None
        self._names[step, self._key(step, parameters)] = name
        self._used.discard(name)
        return self.find(step, **parameters)

    def stem(self, step: str, **parameters: Any) -> str:
        """The beginning of a result's file name, which is known before the result is made."""
        return f"{step}-{self._key(step, parameters)}"

    def keep(self, step: str, values: Mapping[str, Any], tensors: Mapping[str, Tensor], **parameters: Any) -> Result:
        """Writes a result. It is flushed to the disk when this returns."""
        from safetensors.torch import save_file

        key = self._key(step, parameters)
        temporary = self.folder / f".{step}-{key}.{secrets.token_hex(8)}.partial"  # process ids repeat on other machines
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            header = {maker.ABOUT: maker.with_maker(values, self.about)}  # one entry: safetensors writes several in varying order
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temporary, header)
            path = self.folder / f"{step}-{key}-{sha256_of(temporary)[:_KEY]}.safetensors"
            sync(temporary)
            temporary.replace(path)
            sync(self.folder, contents=False)
        except (OSError, SafetensorError) as failure:
            temporary.unlink(missing_ok=True)
            if is_full_disk(failure):
                raise full(self.folder) from failure
            raise
        self._names[step, key] = path.name
        self._used.add(path.name)
        return Result(path, json.loads(json.dumps(values)))

    def scratch(self) -> tempfile.TemporaryDirectory[str]:
        """A temporary folder. `open_cache` removes those that killed processes left."""
        self.folder.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryDirectory(dir=self.folder, prefix=".scratch-")

    def drop(self, step: str, **parameters: Any) -> None:
        """Removes one result that will not be needed again."""
        name = self._names.pop((step, self._key(step, parameters)), None)
        if name is not None:
            (self.folder / name).unlink(missing_ok=True)

    def drop_step(self, step: str) -> None:
        """Removes all results of a step, whatever their keys."""
        for entry in [entry for entry in self._names if entry[0] == step]:
            (self.folder / self._names.pop(entry)).unlink(missing_ok=True)

    def drop_all(self) -> None:
        for step in {step for step, _ in self._names}:
            self.drop_step(step)

    def forget_unused(self) -> None:
        """Called at the end of a run that succeeded: removes results of earlier runs that this one did not use."""
        for path in self.folder.glob("*.safetensors"):
            if path.name not in self._used:
                path.unlink()
        for entry in [entry for entry, name in self._names.items() if name not in self._used]:
            del self._names[entry]

    def _key(self, step: str, parameters: Mapping[str, Any]) -> str:
        return hash_of([self.about, step, parameters])[:_KEY]


@contextmanager
def open_cache(work: Path, fresh: bool = False, progress: Progress[Any] = silent) -> Iterator[Cache]:
    """The cache in a work folder, locked for this process. `fresh`: results of earlier runs are removed first."""
    with _locked(work):
        results = work / _RESULTS
        if fresh:
            for folder in (results, work / SHARDS):
                remove(folder)
        begun = [path for pattern in (".*.partial", ".fewbits-*") for path in work.glob(pattern)]
        begun += [path for path in work.glob(".*.old") if (work / path.name[1:].rsplit(".", 2)[0]).exists()]  # else it is restored
        for path in [*begun, *results.glob(".*")]:  # left by processes that were killed
            remove(path)
        try:
            about = {"code": code_version(), "machine": machine()}
            if why := maker.changed(results, about):
                say(progress, why)
            yield Cache(results, about)
        finally:
            with suppress(OSError):  # not empty
                results.rmdir()


@cache
def code_version() -> str:
    """Hash of what computes results: sources, native module, versions of torch and transformers. Code that only shows them is left out."""
    from importlib import metadata

    import torch

    package = Path(__file__).parents[1]
    native = importlib.util.find_spec("fewbits._native")
    digest = hashlib.sha256(f"{torch.__version__} {metadata.version('transformers')}\n".encode())
    sources = [path for path in sorted(package.rglob("*.py")) if not _only_shows(path.relative_to(package))]
    for path in [*sources, *([Path(native.origin)] if native and native.origin else [])]:
        digest.update(f"{path.name} {sha256_of(path)}\n".encode())
    return digest.hexdigest()


def _only_shows(path: Path) -> bool:
    """Code that only presents results, or carries units to workers: what a unit computes is in the package that its function belongs to."""
    return path.parts[:2] == ("store", "executors") or path.parts[0] in {"benchmarks", "cli", "inspection", "reporting"}


def hash_of(value: object) -> str:
    """Hash of any JSON value, such as a parameter that is too long for a key."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def full(where: Path) -> MissingError:
    return MissingError(
        f"the disk is full: `{where}` could not be written", "free some space and run the same again: it resumes from there"
    )


def machine() -> list[Any]:
    """What decides the order of floating-point sums: instruction set, threads, processor."""
    import torch

    return [torch.backends.cpu.get_cpu_capability(), torch.get_num_threads(), maker.processor_name()]


def _is_whole(path: Path) -> bool:
    try:
        return path.stem.rpartition("-")[2] == sha256_of(path)[:_KEY]
    except OSError:
        return False


def _values(path: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(TensorFile(path).metadata()[maker.ABOUT])["values"]
    return values


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """The system releases the lock when the process ends, however it ends: a dead process never holds one."""
    created = [each for each in (folder, *folder.parents) if not each.exists()]
    file = _lock(folder)
    try:
        yield
    finally:
        (folder / _LOCK).unlink(missing_ok=True)  # while it is held: a process that opened it meanwhile notices
        file.close()
        with suppress(OSError):  # not empty
            for each in created or [folder]:
                each.rmdir()


def _lock(folder: Path) -> IO[str]:
    path = folder / _LOCK
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file = path.open("a+")
        except OSError as failure:
            raise full(folder) if is_full_disk(failure) else cannot_write(folder, failure) from failure
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as failure:
            file.seek(0)
            who = file.read().strip() or "another"
            file.close()
            raise InputError(f"`{folder}` is in use by process {who}", "wait for it to end, or choose another `-o`") from failure
        except OSError:  # the file system has no locks: two processes cannot be told apart
            return file
        with suppress(FileNotFoundError):
            if path.stat().st_ino == os.fstat(file.fileno()).st_ino:
                file.truncate(0)
                with suppress(OSError):  # a full disk: the lock holds all the same, and writing the first result reports it
                    file.write(str(os.getpid()))
                    file.flush()
                return file
        file.close()  # its owner removed it after we opened it: try again
