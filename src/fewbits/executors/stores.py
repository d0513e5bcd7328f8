"""A folder that fsspec reaches (`s3://...`, `gs://...`, `file:///...`): for results and inputs of machines that share no other.

    kept/STEP-KEY-DIGEST.safetensors    results, on their way to the coordinator, which removes what it has
    blobs/SHA256                        inputs, by the hash of their bytes

What arrives is compared with the hash in its name; an upload that was cut short is never taken for a whole one.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from fewbits.errors import InputError, MissingError
from fewbits.files import is_full_disk, sha256_of
from fewbits.scratch import scratch_folder


class Damaged(Exception):  # noqa: N818 - not an error of the user's: worth another try
    """What arrived is not what was sent, or nothing arrived."""


@contextmanager
def _carrying(name: str) -> Iterator[None]:
    try:
        yield
    except OSError as failure:
        if is_full_disk(failure):
            raise
        raise Damaged(f"`{name}` could not be carried: {type(failure).__name__}: {failure}") from failure


class Store:
    def __init__(self, system: Any, root: str) -> None:
        self._system, self._root = system, root.rstrip("/")
        self._in_place = "file" in (system.protocol if isinstance(system.protocol, tuple | list) else (system.protocol,))

    def put(self, path: Path, name: str) -> None:
        """Whole or not at all: an object store shows no object before its last byte, and a file is renamed when it is whole."""
        target = f"{self._root}/{name}"
        with _carrying(name):
            if not self._in_place:
                self._system.put_file(str(path), target)
                return
            partial = f"{target}.{secrets.token_hex(8)}.partial"
            self._system.makedirs(target.rpartition("/")[0], exist_ok=True)
            self._system.put_file(str(path), partial)
            self._system.mv(partial, target)

    def get(self, name: str, path: Path) -> None:
        with _carrying(name):
            self._system.get_file(f"{self._root}/{name}", str(path))

    def put_blob(self, path: Path) -> str:
        digest = sha256_of(path)
        if not self._system.exists(f"{self._root}/blobs/{digest}"):
            self.put(path, f"blobs/{digest}")
        return digest

    def get_blob(self, digest: str, path: Path) -> None:
        """Whole or not at all: what lies at `path` afterwards has been compared."""
        partial = path.with_name(f"{path.name}.{secrets.token_hex(8)}.partial")
        try:
            self.get(f"blobs/{digest}", partial)
            if sha256_of(partial) != digest:
                self.remove(f"blobs/{digest}")  # whoever has it puts it there again
                raise Damaged(f"blob {digest} was damaged on the way")
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)

    def find(self, beginning: str) -> str | None:
        found = [str(each) for each in self._system.glob(f"{self._root}/{beginning}*.safetensors")]
        return sorted(found)[0].removeprefix(f"{self._root}/") if found else None

    def remove(self, name: str) -> None:
        if self._system.exists(f"{self._root}/{name}"):
            self._system.rm_file(f"{self._root}/{name}")


def check(url: str) -> None:
    """Before any work: what is put there can be fetched again."""
    if url.startswith("memory:"):
        raise InputError(f"`--store {url}` lies in the memory of one process", "such as s3://bucket/folder or file:///shared/folder")
    store, name, content = open(url), f"trial-{secrets.token_hex(8)}", secrets.token_bytes(16)
    with scratch_folder() as folder:
        there, back = Path(folder) / "there", Path(folder) / "back"
        there.write_bytes(content)
        try:
            store.put(there, name)
            store.get(name, back)
            store.remove(name)
        except Exception as failure:  # whatever the package for this kind of store raises
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
