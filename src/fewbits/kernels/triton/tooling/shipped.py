"""Compiled kernels to take to another machine: a folder with an index, which is copied into Triton's cache so that launches find them.

    index.json   schema, Triton's version, a hash of these sources; for each kernel its case, format, architecture, and the hash of every
                 file
    KEY/...      the files of one kernel, as in Triton's cache

An entry that does not fit (another Triton, other sources, another architecture, a damaged file) is skipped with a reason, and its kernel
is compiled at its first launch. The key is Triton's: it covers the source, the types and alignment of the arguments, the options and the
target.

FEWBITS_TRITON_KERNELS=FOLDER copies such a folder into Triton's cache when the first weight is put on a GPU, and logs what was skipped.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from fewbits.errors import InputError
from fewbits.kernels.triton.tooling.compiler import CompiledKernel, compile_all

SCHEMA = 1
_INDEX = "index.json"
_FOLDER = "FEWBITS_TRITON_KERNELS"
_NAME = re.compile(r"[\w.-]+")  # of a folder or a file, so that no path leads out of the cache


@dataclass(frozen=True)
class Skipped:
    case: str
    architecture: str
    reason: str


@dataclass(frozen=True)
class Seeded:
    taken: int
    skipped: tuple[Skipped, ...]


def source_hash() -> str:
    """A hash of all sources that kernels are compiled from."""
    digest = hashlib.sha256()
    package = Path(str(resources.files("fewbits.kernels.triton")))
    for path in sorted(file for file in package.rglob("*") if file.suffix in {".py", ".csv"}):
        digest.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def write(folder: Path, jobs: Sequence[tuple[str, str]]) -> list[CompiledKernel]:
    """Compiles (case, architecture) pairs into a folder."""
    if folder.exists():
        raise InputError(f"`{folder}` is there already", "name a folder that is not")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as made:
        cache, staged = Path(made) / "cache", Path(made) / "kernels"
        rows = list(compile_all(jobs, cache))
        entries = []
        for row in rows:
            files = [path for path in sorted((cache / row.key).iterdir()) if path.is_file() and not path.name.startswith("__grp__")]
            target = staged / row.key
            target.mkdir(parents=True, exist_ok=True)
            for path in files:
                shutil.copyfile(path, target / path.name)
            hashes = {path.name: _hash(path) for path in files}
            entries.append({"case": row.case, "architecture": row.architecture, "key": row.key, "files": hashes})
        index = {"schema": SCHEMA, "triton": _triton(), "sources": source_hash(), "kernels": entries}
        (staged / _INDEX).write_text(json.dumps(index, indent=1, sort_keys=True) + "\n")
        staged.rename(folder)
    return rows


def seed(folder: Path, architecture: str, cache: Path) -> Seeded:
    """Copies the kernels that fit this machine into a Triton cache. Files that are there already stay."""
    index = _read(folder)
    taken, skipped = 0, []
    for entry in index["kernels"]:
        reason = _foreign(index) or _unfit(entry, architecture, folder)
        if reason:
            known = entry if isinstance(entry, dict) else {}
            skipped.append(Skipped(str(known.get("case")), str(known.get("architecture")), reason))
            continue
        _place(folder / entry["key"], entry, cache / entry["key"])
        taken += 1
    return Seeded(taken, tuple(skipped))


@cache
def seed_from_environment(architecture: str) -> Seeded | None:
    """Once per process and architecture; None if FEWBITS_TRITON_KERNELS is not set."""
    if not (named := os.environ.get(_FOLDER)):
        return None
    from triton import knobs

    seeded = seed(Path(named), architecture, Path(knobs.cache.dir))
    for reason, count in Counter(entry.reason for entry in seeded.skipped).items():
        logging.getLogger(__name__).warning("%d of the kernels in `%s` are compiled anew: %s", count, named, reason)
    return seeded


def _read(folder: Path) -> dict[str, Any]:
    try:
        index = json.loads((folder / _INDEX).read_text())
    except (OSError, ValueError) as error:
        raise InputError(
            f"`{folder}` holds no compiled kernels: {error}", "`fewbits.kernels.triton.tooling.shipped.write` makes such a folder"
        ) from None
    if not isinstance(index, dict) or not isinstance(index.get("schema"), int) or not isinstance(index.get("kernels"), list):
        raise InputError(f"`{folder / _INDEX}` is no index of compiled kernels", "make the folder anew")
    if index["schema"] > SCHEMA:
        raise InputError(
            f"the kernels in `{folder}` are of schema {index['schema']}, this fewbits reads up to {SCHEMA}",
            "update fewbits, or make the folder anew",
        )
    return index


def _foreign(index: dict[str, Any]) -> str | None:
    """Why nothing of it fits."""
    if index.get("triton") != _triton():
        return f"compiled by Triton {index.get('triton')}, {_triton()} is installed"
    return None if index.get("sources") == source_hash() else "compiled from other sources than these"


def _unfit(entry: Any, architecture: str, folder: Path) -> str | None:
    if not isinstance(entry, dict) or not isinstance(entry.get("files"), dict) or not _NAME.fullmatch(str(entry.get("key"))):
        return "its entry is damaged"
    if not any(str(name).endswith(".json") for name in entry["files"]):
        return "its entry is damaged: it names no description of the kernel"
    if entry.get("architecture") != architecture:
        return f"compiled for {entry.get('architecture')}, this is {architecture}"
    for name, wanted in entry["files"].items():
        path = folder / entry["key"] / name
        if not _NAME.fullmatch(name) or not path.is_file() or _hash(path) != wanted:
            return f"`{name}` is missing or damaged"
    return None


def _place(source: Path, entry: dict[str, Any], target: Path) -> None:
    """Copies a kernel's files and writes the list of their absolute paths by which Triton finds them, which differ between machines."""
    target.mkdir(parents=True, exist_ok=True)
    for name in entry["files"]:
        if not (target / name).exists():
            staged = target / f"{name}.part"
            shutil.copyfile(source / name, staged)
            staged.rename(target / name)
    index = next(name for name in entry["files"] if name.endswith(".json"))
    listed = {"child_paths": {name: str(target / name) for name in entry["files"]}}
    staged = target / f"__grp__{index}.part"
    staged.write_text(json.dumps(listed))
    staged.rename(target / f"__grp__{index}")


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _triton() -> str:
    from importlib.metadata import version

    return version("triton")
