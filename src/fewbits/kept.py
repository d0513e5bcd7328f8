"""Results of a long run, kept as it goes: killed at any moment, the next run goes on from what is there, to the same bytes.

A result is a safetensors file, `STEP-KEY-DIGEST.safetensors`. KEY is the hash of everything that it was made from: source, text, step,
parameters, code, and how the machine adds up (its instructions and number of threads). DIGEST is the hash of the file itself: one that
is damaged or cut short counts as absent. It is written under a temporary name, flushed to the disk and renamed.

What takes seconds for a model of a billion weights is not kept but done again: planning, writing the file out of its finished weights.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from fewbits import machines
from fewbits.errors import InputError, MissingError
from fewbits.files import cannot_write, is_full_disk, remove, sha256_of, sync
from fewbits.progress import say, silent
from fewbits.tensor_files import SafetensorError, TensorFile

if TYPE_CHECKING:
    from torch import Tensor

    from fewbits.progress import Progress

_LOCK = "lock"
_RESULTS = "kept"
SHARDS = "shards"  # of a calibration, each with results of its own
_KEY = 32  # hex digits of a hash in a name: 128 bits


@dataclass(frozen=True)
class Result:
    path: Path
    values: Mapping[str, Any]

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """Mapped, not read: pages come from the file when they are touched, and are let go of when memory is short."""
        file = TensorFile(self.path)
        return {name: file.tensor(name) for name in file.keys()}  # noqa: SIM118

    def link(self, path: Path) -> None:
        """The same file under another name, which stays when this one is dropped."""
        try:
            os.link(self.path, path)
        except OSError:  # a file system without links
            shutil.copyfile(self.path, path)


class Kept:
    """The results in a folder. `of` narrows what they are made from; all narrowings share the folder."""

    def __init__(self, folder: Path, about: Mapping[str, Any] | None = None, listed: bool = True) -> None:
        """`listed` False: as if nothing were there; for a worker, which makes one result among a million and has `look`."""
        self.folder, self.about = folder, dict(about or {})
        self._used: set[str] = set()  # names: of this run, whole without another look
        self._names: dict[tuple[str, str], str] = {}  # (step, key) -> name
        for path in folder.glob("*.safetensors") if listed and folder.is_dir() else ():
            step, _, rest = path.stem.rpartition("-")[0].rpartition("-")
            self._names[step, rest] = path.name

    def of(self, **about: Any) -> Kept:
        narrowed = Kept.__new__(Kept)
        narrowed.folder, narrowed._used, narrowed._names = self.folder, self._used, self._names
        narrowed.about = self.about | about
        return narrowed

    def has(self, step: str, **parameters: Any) -> bool:
        """By its name alone: to say how much is there before any of it is read."""
        return (step, self._key(step, parameters)) in self._names

    def find(self, step: str, **parameters: Any) -> Result | None:
        """The result, if it is there and whole."""
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
        """The same, also where another process put it since."""
        for path in self.folder.glob(f"{self.stem(step, **parameters)}-*.safetensors"):
            if found := self.take(path.name, step, **parameters):
                return found
        return None

    def take(self, name: str, step: str, **parameters: Any) -> Result | None:
        """What another process made under this name, if it is what was asked for, there and whole. A name is not trusted to stay inside."""
        if not re.fullmatch(rf"{re.escape(self.stem(step, **parameters))}-[0-9a-f]{{{_KEY}}}\.safetensors", name):
            return None
        self._names[step, self._key(step, parameters)] = name
        self._used.discard(name)
        return self.find(step, **parameters)

    def stem(self, step: str, **parameters: Any) -> str:
        """How the name of a result begins: known before it is made."""
        return f"{step}-{self._key(step, parameters)}"

    def keep(self, step: str, values: Mapping[str, Any], tensors: Mapping[str, Tensor], **parameters: Any) -> Result:
        """On the disk for good when this returns."""
        from safetensors.torch import save_file

        key = self._key(step, parameters)
        temporary = self.folder / f".{step}-{key}.{secrets.token_hex(8)}.partial"  # a process of another machine may have our number
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            header = {machines.ABOUT: machines.with_maker(values, self.about)}  # one entry: safetensors writes several in any order
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
        """For files that go with this process. What a killed one leaves here is removed by the next."""
        self.folder.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryDirectory(dir=self.folder, prefix=".scratch-")

    def drop(self, step: str, **parameters: Any) -> None:
        """What nothing will ask for again."""
        name = self._names.pop((step, self._key(step, parameters)), None)
        if name is not None:
            (self.folder / name).unlink(missing_ok=True)

    def drop_step(self, step: str) -> None:
        """All results of a step, whatever they were made from."""
        for each, key in [found for found in self._names if found[0] == step]:
            (self.folder / self._names.pop((each, key))).unlink(missing_ok=True)

    def drop_all(self) -> None:
        for step in {step for step, _ in self._names}:
            self.drop_step(step)

    def forget_unused(self) -> None:
        """At the end of a run that went well: what earlier runs left and this one had no use for."""
        for path in self.folder.glob("*.safetensors"):
            if path.name not in self._used:
                path.unlink()
        for where in [where for where, name in self._names.items() if name not in self._used]:
            del self._names[where]

    def _key(self, step: str, parameters: Mapping[str, Any]) -> str:
        return hash_of([self.about, step, parameters])[:_KEY]


@contextmanager
def opened(work: Path, fresh: bool = False, progress: Progress[Any] = silent) -> Iterator[Kept]:
    """The results in a work folder, for one process at a time. `fresh`: without those of earlier runs."""
    with _locked(work):
        results = work / _RESULTS
        if fresh:
            for each in (results, work / SHARDS):
                remove(each)
        begun = [path for pattern in (".*.partial", ".fewbits-*") for path in work.glob(pattern)]
        begun += [path for path in work.glob(".*.old") if (work / path.name[1:].rsplit(".", 2)[0]).exists()]  # else it is put back
        for path in [*begun, *results.glob(".*")]:  # by processes that were killed
            remove(path)
        try:
            about = {"code": code_version(), "machine": machine()}
            if why := machines.changed(results, about):
                say(progress, why)
            yield Kept(results, about)
        finally:
            with suppress(OSError):  # is not empty
                results.rmdir()


@cache
def code_version() -> str:
    """Hash of the program itself: its sources, its native module, torch and transformers. What only shows results has no say."""
    from importlib import metadata

    import torch

    from fewbits import kernels

    package = Path(__file__).parent
    native = getattr(kernels._native() if kernels.backend() != "reference" else None, "__file__", None)
    digest = hashlib.sha256(f"{torch.__version__} {metadata.version('transformers')}\n".encode())
    sources = [path for path in sorted(package.rglob("*.py")) if not _only_shows(path.relative_to(package))]
    for path in [*sources, *([Path(native)] if native else [])]:
        digest.update(f"{path.name} {sha256_of(path)}\n".encode())
    return digest.hexdigest()


def _only_shows(path: Path) -> bool:
    """Or only carries: of the executors, what a unit does is in units.py; the others bring it there and its result back."""
    carries = path.parts[0] == "executors" and path.name != "units.py"
    return carries or path.parts[0] in {"benchmarks", "capacity", "reporting", "results"} or path.name.startswith("cli")


def hash_of(value: object) -> str:
    """Of anything that JSON can say: a long parameter, made short once."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def full(where: Path) -> MissingError:
    return MissingError(
        f"the disk is full: `{where}` could not be written", "free some space and run the same again: it goes on from there"
    )


def machine() -> list[Any]:
    """What decides the order of floating-point sums."""
    import torch

    return [torch.backends.cpu.get_cpu_capability(), torch.get_num_threads(), machines.processor()]


def _is_whole(path: Path) -> bool:
    try:
        return path.stem.rpartition("-")[2] == sha256_of(path)[:_KEY]
    except OSError:
        return False


def _values(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(TensorFile(path).metadata()[machines.ABOUT])["values"]
    return found


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """The system lets go of the lock when the process ends, however it ends: none is ever left by a dead one."""
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    file = _lock(folder)
    try:
        yield
    finally:
        (folder / _LOCK).unlink(missing_ok=True)  # while it is held: whoever opened it meanwhile sees that it is gone
        file.close()
        with suppress(OSError):  # is not empty
            for each in made or [folder]:
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
        except OSError:  # a file system without locks: nobody can tell
            return file
        with suppress(FileNotFoundError):
            if path.stat().st_ino == os.fstat(file.fileno()).st_ino:
                file.truncate(0)
                with suppress(OSError):  # a full disk: the lock holds without a name, and the first result will say what is wrong
                    file.write(str(os.getpid()))
                    file.flush()
                return file
        file.close()  # its owner removed it between the two steps
