"""Which of the files that were named, or that a folder holds, a runtime takes. What none takes is listed with the reason."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from fewbits.errors import FewbitsError, InputError, MissingError
from fewbits.inspection.contents import counted
from fewbits.verification import runtimes
from fewbits.verification.comparison.figures import Refused
from fewbits.verification.runtimes import Runtime

_MODELS = {".gguf", ".ggml", ".onnx", ".safetensors", ".bin", ".pt", ".pth", ".tflite", ".llamafile"}  # files that somebody may mean as one
_PART = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
_HINT = "give .gguf or .onnx files, folders for MLX, onnxruntime-genai or transformers, or a folder that holds some"


class Candidate(NamedTuple):
    name: str  # short, and different from those of all others
    path: Path
    runtime: Runtime


def find(paths: Sequence[str | Path], model: Path | None = None) -> tuple[list[Candidate], list[Refused]]:
    """`model`: what they are compared with, which is no candidate itself."""
    found: list[tuple[Path, Runtime]] = []
    refused: list[Refused] = []
    for path in map(Path, paths):
        if not path.exists():
            raise InputError(f"there is nothing at `{path}`", _HINT)
        for each in _within(path):
            try:
                if each not in [known for known, _ in found]:
                    found.append((each, _taken(each, model)))
            except FewbitsError as failure:
                refused.append(Refused(str(each), failure.args[0], isinstance(failure, MissingError)))
    names = _names([path for path, _ in found])
    return [Candidate(name, path, runtime) for name, (path, runtime) in zip(names, found, strict=True)], refused


def check(refused: Sequence[Refused]) -> None:
    """Called where nothing is left to compare."""
    if not refused:
        raise InputError("there is no file to compare", _HINT)
    more = f" (and {len(refused) - 1} more)" if len(refused) > 1 else ""
    message = f"no file could be run: {refused[0].reason}{more}"
    if all(each.missing for each in refused):
        raise MissingError(message, "`fewbits doctor` says which runtimes are here, and how to get the others")
    raise InputError(message, _HINT)


def _names(paths: Sequence[Path]) -> list[str]:
    """As few of the last words of each path as tell it from the others."""
    for words in range(1, max((len(path.parts) for path in paths), default=0)):
        names = ["/".join(path.parts[-words:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def _taken(path: Path, model: Path | None) -> Runtime:
    if model is not None and model.exists() and path.samefile(model):
        raise InputError(f"`{path}` is the model that the others are compared with")
    if path.is_file() and _PART.search(path.name):
        raise InputError(f"`{path}` is one part of a model in several files: they need a folder of their own")
    return runtimes.needed(runtimes.for_file(path))


def _within(path: Path, deep: int = 2) -> Iterator[Path]:
    """The path itself, or where it is a folder that no runtime takes as a whole, what is in it, as people count."""
    if not path.is_dir() or _is_one(path):
        yield path
        return
    inside = [each for each in path.iterdir() if not (each.name.startswith(".") or each.name.endswith(".work"))]
    models = [each for each in inside if each.is_dir() or each.suffix.lower() in _MODELS]
    if not models or not deep:
        yield path
    for each in sorted(models, key=lambda each: counted(each.name)) if deep else ():
        yield from _within(each, deep - 1)


def _is_one(folder: Path) -> bool:
    if any(runtime.takes(folder) for runtime in runtimes.all().values() if runtime.name != "llama.cpp"):
        return True
    files = list(folder.glob("*.gguf"))
    stems = {_PART.sub("", file.name) for file in files}
    return len(files) > 1 and len(stems) == 1  # the parts of one model, and nothing beside them
