"""Windows that a file was judged on, kept one by one: a verification that was killed goes on at the next window, one that had ended
is not run again, and so the rounds of an accuracy budget are not either."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch

from fewbits.files import sha256_of
from fewbits.kept import hash_of
from fewbits.verification import Measured

if TYPE_CHECKING:
    from fewbits.kept import Kept, Result
    from fewbits.runtimes import Runtime
    from fewbits.texts import Window

_SERIES = ("kl", "nll", "nll_base", "agrees")


class Judged:
    """Of one file in one runtime, beside one float model. `floor`: the float file was run there too."""

    def __init__(self, kept: Kept, source: str, file: Path, runtime: Runtime, floor: bool) -> None:
        self._kept = kept.of(source=source, file=_digest(file), runtime=[runtime.name, runtime.version()], floor=floor)

    def scratch(self) -> TemporaryDirectory[str]:
        return self._kept.scratch()

    def all(self, windows: Sequence[Window]) -> dict[str, Measured] | None:
        """None: some window is still to be run."""
        if not all(self._kept.has("window", **_parameters(window)) for window in windows):
            return None
        found = [self.find(window) for window in windows]
        return joined([each for each in found if each]) if all(found) else None

    def count(self, windows: Sequence[Window]) -> int:
        return sum(self._kept.has("window", **_parameters(window)) for window in windows)

    def find(self, window: Window) -> dict[str, Measured] | None:
        result = self._kept.find("window", **_parameters(window))
        return {name: _restored(result, name) for name in result.values} if result else None

    def keep(self, window: Window, measured: dict[str, Measured]) -> None:
        tensors = {
            f"{name}:{series}": torch.tensor(getattr(each, series), dtype=torch.float64)
            for name, each in measured.items()
            for series in _SERIES
        }
        self._kept.keep("window", {name: each.max_logit_diff for name, each in measured.items()}, tensors, **_parameters(window))


def joined(windows: Sequence[dict[str, Measured]]) -> dict[str, Measured]:
    """One after the other."""
    whole = {name: Measured() for name in windows[0]}
    for window in windows:
        for name, each in window.items():
            whole[name].extend(each)
    return whole


def _restored(result: Result, name: str) -> Measured:
    kl, nll, nll_base, agrees = (result.tensors[f"{name}:{series}"].tolist() for series in _SERIES)
    return Measured(kl, nll, nll_base, [each == 1.0 for each in agrees], float(result.values[name]))


def _parameters(window: Window) -> dict[str, Any]:
    return {"window": hash_of(list(window))}


def _digest(path: Path) -> str:
    """Of a folder with all that lies in it, or of a file with the arrays that an .onnx file may have beside it."""
    files = sorted(path.rglob("*")) if path.is_dir() else [path, path.with_name(f"{path.name}.data")]
    return hash_of([[file.name, sha256_of(file)] for file in files if file.is_file()])
