"""The runtimes that files are verified in: each runs the file itself and gives its logits. One module per runtime."""

from __future__ import annotations

import importlib
import pkgutil
from abc import ABC, abstractmethod
from functools import cache
from pathlib import Path

from fewbits.errors import InputError, MissingError
from fewbits.verification.session import Session


class Runtime(ABC):
    name: str  # as `--runtime` takes it
    extra: str  # `pip install fewbits[extra]` installs it; empty: a dependency of fewbits itself

    @abstractmethod
    def missing(self) -> str | None:
        """Why it cannot run here; None if it can."""

    @abstractmethod
    def version(self) -> str: ...

    def remark(self, path: Path) -> str:
        """What a verdict on this file adds to the version, if it is run in another way than a user would."""
        return ""

    @abstractmethod
    def takes(self, path: Path) -> bool:
        """Whether the runtime runs files of this kind."""

    @abstractmethod
    def open(self, path: Path, context: int) -> Session:
        """Load the file for sequences of up to `context` tokens."""


@cache
def all() -> dict[str, Runtime]:
    modules = sorted(m.name for m in pkgutil.iter_modules(__path__))
    return {r.name: r for r in (importlib.import_module(f"{__name__}.{name}").RUNTIME for name in modules)}


def get(name: str) -> Runtime:
    if name.lower() not in all():
        raise InputError(f"no runtime is named `{name}`", f"known runtimes: auto, {', '.join(all())}")
    return all()[name.lower()]


def for_file(path: Path) -> Runtime:
    """The runtime that this file is meant for."""
    for runtime in all().values():
        if runtime.takes(path):
            return runtime
    raise InputError(f"no runtime takes `{path}`", "give a .gguf, an .onnx, or a folder that fewbits wrote")


def needed(runtime: Runtime) -> Runtime:
    """The same runtime, or an error that says how to get it."""
    if reason := runtime.missing():
        raise MissingError(f"{runtime.name} cannot run here: {reason}", f"pip install 'fewbits[{runtime.extra}]'")
    return runtime
