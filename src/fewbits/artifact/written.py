"""Hashes of exported files, by which `fewbits verify` sees whether a file was changed after fewbits wrote it.

An artifact stores the hashes of its own files. For a .gguf or an .onnx they are in OUT.work/written.json, in the folder that quantizing
leaves beside OUT. Without that folder nothing is known about the file, and `check` returns False.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits.artifact import Artifact, manifest
from fewbits.errors import InputError
from fewbits.progress import silent
from fewbits.store.files import Staged, beside, sha256_of, to_json
from fewbits.store.untrusted import read_json

if TYPE_CHECKING:
    from fewbits.progress import Progress

NAME = "written.json"
SCHEMA = 1
_HINT = "write it anew with `fewbits quantize`, or remove the .work folder beside it if the change is yours"


def record(path: Path) -> None:
    """The hashes of a file and of its data file, or of all files in a folder. An artifact has its own."""
    if (path / manifest.NAME).is_file():
        return
    hashes = {name: {"bytes": file.stat().st_size, "sha256": sha256_of(file)} for name, file in _files(path).items()}
    with Staged(_place(path)) as staged:
        staged.write_text(to_json({"schema": SCHEMA, "files": hashes}))


def forget(path: Path) -> None:
    """Called before another file takes its place, whose hash is recorded later."""
    _place(path).unlink(missing_ok=True)


def check(path: Path, progress: Progress[Any] = silent) -> bool:
    """Whether hashes are recorded. Raises an InputError if a file is missing, added or changed; in an artifact also if a weight is not
    finite."""
    if (path / manifest.NAME).is_file():
        Artifact(path).check(progress)
        return True
    place = _place(path)
    if not place.is_file():
        return False
    content = read_json(place, _HINT)
    try:
        if content["schema"] != SCHEMA:
            return False  # of another version
        known = {str(name): (int(row["bytes"]), str(row["sha256"])) for name, row in content["files"].items()}
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as failure:
        raise InputError(f"`{place}` is damaged: {failure!r}", "remove it") from failure
    files = _files(path)
    if other := sorted(files.keys() ^ known.keys()):
        said = "is not there any more" if other[0] in known else "was not there"
        raise InputError(f"`{path}` was changed after it was written: `{other[0]}` {said}", _HINT)
    for name, (size, sha256) in known.items():
        if files[name].stat().st_size != size or sha256_of(files[name]) != sha256:
            raise InputError(f"`{files[name]}` was changed after it was written", _HINT)
    return True


def _files(path: Path) -> dict[str, Path]:
    if path.is_dir():
        return {file.relative_to(path).as_posix(): file for file in sorted(path.rglob("*")) if file.is_file()}
    return {file.name: file for file in (path, beside(path)) if file.is_file()}


def _place(path: Path) -> Path:
    return path.with_name(f"{path.name}.work") / NAME
