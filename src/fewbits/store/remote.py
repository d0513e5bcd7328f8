"""The `--store`: a folder that fsspec reaches (`s3://...`, `gs://...`, `file:///...`), for machines that share no file system.

    cache/STEP-KEY-DIGEST.safetensors    results on their way to the coordinator, which removes those it has fetched
    blobs/SHA256                        inputs, named by the hash of their bytes

A download is compared with the hash in its name, so that an upload that was cut short is never taken for a whole one.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from fewbits.errors import InputError, MissingError
from fewbits.store.files import is_full_disk, sha256_of
from fewbits.store.scratch import scratch_folder


class Damaged(Exception):  # noqa: N818 - not the user's error: the unit is tried again
    """A transfer failed, or delivered other bytes than were sent."""


@contextmanager
def _transfer(name: str) -> Iterator[None]:
    try:
        yield
    except OSError as failure:
        if is_full_disk(failure):
            raise
        raise Damaged(f"`{name}` could not be transferred: {type(failure).__name__}: {failure}") from failure


class Store:
    def __init__(self, system: Any, root: str) -> None:
        self._system, self._root = system, root.rstrip("/")
        self._in_place = "file" in (system.protocol if isinstance(system.protocol, tuple | list) else (system.protocol,))

    def put(self, path: Path, name: str) -> None:
        """It appears whole or not at all: an object store shows no object before its last byte, and a file is renamed when complete."""
        target = f"{self._root}/{name}"
        with _transfer(name):
            if not self._in_place:
                self._system.put_file(str(path), target)
                return
            partial = f"{target}.{secrets.token_hex(8)}.partial"
            self._system.makedirs(target.rpartition("/")[0], exist_ok=True)
            self._system.put_file(str(path), partial)
            self._system.mv(partial, target)

    def get(self, name: str, path: Path) -> None:
        with _transfer(name):
            self._system.get_file(f"{self._root}/{name}", str(path))

    def put_blob(self, path: Path) -> str:
        digest = sha256_of(path)
        if not self._system.exists(f"{self._root}/blobs/{digest}"):
            self.put(path, f"blobs/{digest}")
        return digest

    def get_blob(self, digest: str, path: Path) -> None:
        """The file appears at `path` only after its hash was compared."""
        partial = path.with_name(f"{path.name}.{secrets.token_hex(8)}.partial")
        try:
            self.get(f"blobs/{digest}", partial)
            if sha256_of(partial) != digest:
                self.remove(f"blobs/{digest}")  # the coordinator uploads it again
                raise Damaged(f"blob {digest} was damaged on the way")
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)

    def find(self, beginning: str) -> str | None:
        names = sorted(map(str, self._system.glob(f"{self._root}/{beginning}*.safetensors")))
        return names[0].removeprefix(f"{self._root}/") if names else None

    def remove(self, name: str) -> None:
        if self._system.exists(f"{self._root}/{name}"):
            self._system.rm_file(f"{self._root}/{name}")


def check(url: str) -> None:
    """Before any work: writes a few bytes to the store and reads them back."""
    if url.startswith("memory:"):
        raise InputError(f"`--store {url}` lies in the memory of one process", "such as s3://bucket/folder or file:///shared/folder")
    store, name, content = open(url), f"trial-{secrets.token_hex(8)}", secrets.token_bytes(16)
    with scratch_folder() as folder:
        sent, back = Path(folder) / "sent", Path(folder) / "back"
        sent.write_bytes(content)
        try:
            store.put(sent, name)
            store.get(name, back)
            store.remove(name)
        except Exception as failure:  # each kind of store raises its own
            hint = "is the address right, and may you write there?"
            raise InputError(f"`--store {url}` cannot be used: {failure}", hint) from failure
        if back.read_bytes() != content:
            raise InputError(f"`--store {url}` gives back other bytes than it was given", "use another one")


@cache
def open(url: str) -> Store:
    import fsspec

    if "://" not in url:
        raise InputError(f"`--store {url}` is no address", "such as s3://bucket/folder or file:///shared/folder")
    try:
        system, root = fsspec.core.url_to_fs(url)
    except ImportError as failure:
        raise MissingError(f"`--store {url}` needs a package: {failure}", "install it here and on all nodes") from failure
    except ValueError as failure:
        raise InputError(f"`--store {url}` is of no kind that fsspec knows: {failure}", "such as s3://bucket/folder") from failure
    return Store(system, root)
