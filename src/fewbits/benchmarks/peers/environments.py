"""Peers whose packages want versions of their own: each lives in a virtual environment apart and is run as a process, never imported.

A folder holds one environment per peer. `fewbits bench install NAME` makes it; any environment that has the packages serves as well.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import venv
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits.errors import FewbitsError, InputError, MissingError
from fewbits.progress import silent
from fewbits.store.files import Staged

if TYPE_CHECKING:
    from fewbits.progress import Progress

REQUIREMENTS = {  # versions that were tried together
    "autoround": (
        "auto-round==0.16.1",
        "transformers==5.23.0",
        "compressed-tensors==0.20.0",
        "gguf==0.19.0",
        "sentencepiece==0.2.3",
        "torch==2.13.0",
    ),
    "llmcompressor": ("llmcompressor==0.14.0.1", "torch==2.13.0"),
}
MADE = "made.json"
_RAISED = re.compile(r"[\w.]*(Error|Exception|Exit|Interrupt)\b")
_PROGRAMS = Path(__file__).with_name("programs")
_OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "PYTHONPATH": ""}


class PeerError(FewbitsError):
    """A peer's own program failed."""

    exit_code = 3


def usual_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fewbits" / "peers"


def python_of(name: str, folder: Path) -> Path:
    """The interpreter of a peer's environment; an error that says how to get one."""
    inside = Path("Scripts", "python.exe") if os.name == "nt" else Path("bin", "python")
    python = folder / name / inside
    if not python.is_file():
        where = "" if folder == usual_folder() else f" --peer-env {folder}"
        raise MissingError(f"the peer `{name}` is not installed: there is no `{python}`", f"`fewbits bench install {name}{where}` (1.5 GB)")
    return python


def install(name: str, folder: Path, progress: Progress[Any] = silent) -> Path:
    """Makes the environment of a peer, with versions that are known to work; gives its folder."""
    if name not in REQUIREMENTS:
        raise InputError(f"no peer is named `{name}`", f"known ones: {', '.join(REQUIREMENTS)}")
    place = folder / name
    if place.exists() and not (place / "pyvenv.cfg").is_file():
        raise InputError(f"`{place}` is there and is no environment of Python", "choose another `--peer-env`, or remove it first")
    for _ in progress(range(1), 1, f"installing {REQUIREMENTS[name][0]} into {place}"):
        venv.create(place, with_pip=True)
        command = [str(python_of(name, folder)), "-m", "pip", "install", "--quiet", *REQUIREMENTS[name]]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise MissingError(f"`{REQUIREMENTS[name][0]}` could not be installed: {reason}", "it comes by pip: check the network and the disk")
    return place


def run(
    python: Path,
    program: str,
    job: Mapping[str, Any],
    samples: Sequence[Sequence[int]],
    out: Path,
    log: Path,
    progress: Progress[Any] = silent,
) -> dict[str, str]:
    """Runs a program of programs/ on a job and moves what it made to `out`; gives the versions that made it. `log` keeps its output."""
    with Staged(out, marker=None if out.suffix == ".gguf" else "config.json") as staged:
        scratch = staged.with_name(f"{staged.name}.work")
        with suppress(FileNotFoundError):
            shutil.rmtree(scratch)
        scratch.mkdir()
        try:
            (scratch / "samples.json").write_text(json.dumps([list(map(int, sample)) for sample in samples]))
            whole = {**job, "samples": str(scratch / "samples.json"), "out": str(scratch)}
            (scratch / "job.json").write_text(json.dumps(whole))
            for _ in progress(_until_done(python, program, scratch, log), 1, f"{program}: making {out.name} (log: {log})"):
                pass
            made = json.loads((scratch / MADE).read_text())
            (scratch / made["path"]).rename(staged)
        finally:
            shutil.rmtree(scratch)
    return dict(made["versions"])


def _until_done(python: Path, program: str, folder: Path, log: Path) -> Iterator[None]:
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, **_OFFLINE, "AR_AUTO_SCHEME_CACHE": str(folder / "scores")}  # by default shared between other texts
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [str(python), "-P", str(_PROGRAMS / f"{program}.py"), str(folder / "job.json")],
            env=environment, stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            process.wait()
        finally:
            process.kill()
            process.wait()
    if process.returncode or not (folder / MADE).is_file():
        raise PeerError(f"{program} failed: {_reason(log)}", f"its output is in {log}")
    yield


def _reason(log: Path) -> str:
    """The line of the exception that ended it: bars of progress may follow that one."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    raised = [line for line in lines if _RAISED.match(line)]
    return (raised or lines or ["it does not say why"])[-1][:300]
