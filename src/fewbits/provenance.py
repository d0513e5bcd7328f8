"""What was written, by hash: `fewbits verify` tells a file that was changed afterwards from one that is as fewbits left it.

An artifact says the hashes of its files itself. A .gguf or an .onnx cannot, so OUT.work/written.json does, in the folder that quantizing
leaves beside OUT. Where that folder is gone, or the file came from elsewhere, nothing is known and nothing is claimed.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits import manifest
from fewbits.artifact import Artifact
from fewbits.checkpoints.folder import read_json
from fewbits.errors import InputError
from fewbits.files import Staged, beside, sha256_of, to_json
from fewbits.progress import silent

if TYPE_CHECKING:
    from fewbits.progress import Progress

NAME = "written.json"
SCHEMA = 1
_HINT = "write it anew with `fewbits quantize`, or remove the .work folder beside it if the change is yours"


def record(path: Path) -> None:
    """Of a file with what lies beside it under its name, or of all files in a folder. An artifact has its own."""
    if (path / manifest.NAME).is_file():
        return
    hashes = {name: {"bytes": file.stat().st_size, "sha256": sha256_of(file)} for name, file in _files(path).items()}
    with Staged(_place(path)) as staged:
        staged.write_text(to_json({"schema": SCHEMA, "files": hashes}))


def forget(path: Path) -> None:
    """Before another takes its place: until that is recorded, nothing is known."""
    _place(path).unlink(missing_ok=True)


def check(path: Path, progress: Progress[Any] = silent) -> bool:
    """Whether anything is known about it. Raises an InputError where a file is missing, added or changed; of an artifact also where a
    weight is not finite."""
    if (path / manifest.NAME).is_file():
        Artifact(path).check(progress)
        return True
    place = _place(path)
    if not place.is_file():
        return False
    content = read_json(place, _HINT)
    try:
        if content["schema"] != SCHEMA:
            return False  # another version's: nothing is known
        known = {str(name): (int(row["bytes"]), str(row["sha256"])) for name, row in content["files"].items()}
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as failure:
        raise InputError(f"`{place}` is damaged: {failure!r}", "remove it") from failure
    found = _files(path)
    if other := sorted(found.keys() ^ known.keys()):
        said = "is not there any more" if other[0] in known else "was not there"
        raise InputError(f"`{path}` was changed after it was written: `{other[0]}` {said}", _HINT)
    for name, (size, sha256) in known.items():  # sizes first: they cost nothing
        if found[name].stat().st_size != size or sha256_of(found[name]) != sha256:
            raise InputError(f"`{found[name]}` was changed after it was written", _HINT)
    return True


def _files(path: Path) -> dict[str, Path]:
    if path.is_dir():
        return {file.relative_to(path).as_posix(): file for file in sorted(path.rglob("*")) if file.is_file()}
    return {file.name: file for file in (path, beside(path)) if file.is_file()}


def _place(path: Path) -> Path:
    return path.with_name(f"{path.name}.work") / NAME
