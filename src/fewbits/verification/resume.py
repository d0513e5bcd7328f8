"""Caches each window that a file was judged on: a verification that was killed resumes at the next window, and one that had ended is not
run again, nor are the rounds of an accuracy budget."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch

from fewbits.store.cache import hash_of
from fewbits.store.files import sha256_of
from fewbits.verification.metrics import MeasuredLogits

if TYPE_CHECKING:
    from fewbits.calibration.text.windows import Window
    from fewbits.store.cache import Cache, Result
    from fewbits.verification.runtimes import Runtime

_SERIES = ("kl", "nll", "nll_base", "agrees")


class CachedWindows:
    """The windows of one file in one runtime, judged beside one float model. `floor`: the float file was run there too."""

    def __init__(self, cache: Cache, source: str, file: Path, runtime: Runtime, floor: bool) -> None:
        self.results = cache.of(source=source, file=_digest(file), runtime=[runtime.name, runtime.version()], floor=floor)

    def scratch(self) -> TemporaryDirectory[str]:
        return self.results.scratch()

    def all(self, windows: Sequence[Window]) -> dict[str, MeasuredLogits] | None:
        """The numbers of all windows; None if some window has still to be run."""
        if not all(self.results.has("window", **_parameters(window)) for window in windows):
            return None
        results = [self.find(window) for window in windows]
        return joined([result for result in results if result]) if all(results) else None

    def count(self, windows: Sequence[Window]) -> int:
        return sum(self.results.has("window", **_parameters(window)) for window in windows)

    def find(self, window: Window) -> dict[str, MeasuredLogits] | None:
        result = self.results.find("window", **_parameters(window))
        return {name: _restored(result, name) for name in result.values} if result else None

    def keep(self, window: Window, measured: dict[str, MeasuredLogits]) -> None:
        tensors = {
            f"{name}:{series}": torch.tensor(getattr(each, series), dtype=torch.float64)
            for name, each in measured.items()
            for series in _SERIES
        }
        self.results.keep("window", {name: each.max_logit_diff for name, each in measured.items()}, tensors, **_parameters(window))


def joined(windows: Sequence[dict[str, MeasuredLogits]]) -> dict[str, MeasuredLogits]:
    """The numbers of all windows in one list."""
    whole = {name: MeasuredLogits() for name in windows[0]}
    for window in windows:
        for name, each in window.items():
            whole[name].extend(each)
    return whole


def _restored(result: Result, name: str) -> MeasuredLogits:
    kl, nll, nll_base, agrees = (result.tensors[f"{name}:{series}"].tolist() for series in _SERIES)
    return MeasuredLogits(kl, nll, nll_base, [each == 1.0 for each in agrees], float(result.values[name]))


def _parameters(window: Window) -> dict[str, Any]:
    return {"window": hash_of(list(window))}


def _digest(path: Path) -> str:
    """Hash of all files in a folder, or of a file and the arrays that an .onnx file may have beside it."""
    files = sorted(path.rglob("*")) if path.is_dir() else [path, path.with_name(f"{path.name}.data")]
    return hash_of([[file.name, sha256_of(file)] for file in files if file.is_file()])
