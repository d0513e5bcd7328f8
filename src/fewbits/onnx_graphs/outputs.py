"""Two files side by side in ONNX Runtime on the same inputs: how far every output of the quantized one is from the float one."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fewbits.errors import InputError
from fewbits.model.onnx import graph
from fewbits.progress import silent

if TYPE_CHECKING:
    from fewbits.onnx_graphs.inputs import Inputs, Sample
    from fewbits.progress import Progress

_HINT = "the file is damaged, or needs a newer onnxruntime; write it anew"


@dataclass(frozen=True)
class OutputError:
    name: str
    cosine: float  # over all samples
    cosine_least: float  # of one sample
    max_abs_diff: float
    relative_error: float  # norm of the difference over the norm of the float output


@dataclass(frozen=True)
class FileVerdict:
    outputs: tuple[OutputError, ...]
    samples: int
    inputs: str  # what both were run on
    bytes: int
    bytes_float: int
    runtime: str
    min_cosine: float | None
    max_error: float | None
    failures: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return not self.failures

    def to_dict(self) -> dict[str, object]:
        return asdict(self) | {"passed": self.passed}


@dataclass
class _Compared:
    """Sums over samples, in double precision."""

    dot: float = 0.0
    base: float = 0.0
    test: float = 0.0
    difference: float = 0.0
    largest: float = 0.0
    cosines: list[float] = field(default_factory=list)
    finite: bool = True

    def add(self, base: Any, test: Any) -> None:
        base, test = np.asarray(base, np.float64).ravel(), np.asarray(test, np.float64).ravel()
        both = np.isfinite(base) & np.isfinite(test)
        # an infinity of the float file (a mask) must be the same here, a number must be a number, and NaN always fails
        self.finite &= base.shape == test.shape and bool((both | (base == test)).all())
        if base.shape != test.shape:
            return
        base, test = base[both], test[both]
        dot, one, other = float(base @ test), float(base @ base), float(test @ test)
        self.dot, self.base, self.test = self.dot + dot, self.base + one, self.test + other
        self.difference += float(((base - test) ** 2).sum())
        self.largest = max(self.largest, float(np.abs(base - test).max(initial=0.0)))
        self.cosines.append(_cosine(dot, one, other))

    def result(self, name: str) -> OutputError:
        error = math.sqrt(self.difference / self.base) if self.base else 0.0 if not self.difference else math.inf
        least = min(self.cosines, default=math.nan)
        return OutputError(name, _cosine(self.dot, self.base, self.test), least, self.largest, error)


def verify(
    quantized: Path,
    against: Path,
    inputs: Inputs,
    min_cosine: float | None = None,
    max_error: float | None = None,
    progress: Progress[Sample] = silent,
) -> FileVerdict:
    check_thresholds(min_cosine, max_error)
    base, test = (session(path, path) for path in (against, quantized))
    names = [entry.name for entry in base.get_outputs()]
    if (other := [entry.name for entry in test.get_outputs()]) != names:
        difference = f"`{quantized.name}` gives {', '.join(other)}, the float file {', '.join(names)}"
        raise InputError(difference, "is it the file of another model?")
    compared = {name: _Compared() for name in names}
    for sample in progress(inputs.samples, len(inputs.samples), "verifying"):
        try:
            both = [each.run(names, dict(sample)) for each in (base, test)]
        except Exception as failure:
            reason = str(failure).strip().splitlines()[0]
            hint = "give their inputs as a .npz with `--data`"
            raise InputError(f"the files cannot be run on {inputs.about}: {reason}", hint) from failure
        for name, one, two in zip(names, *both, strict=True):
            compared[name].add(one, two)
    results = tuple(each.result(name) for name, each in compared.items())
    failures = [f"`{name}` is NaN, or not finite where the float file is" for name, each in compared.items() if not each.finite]
    for result in results:
        figures = (result.cosine, result.cosine_least, result.max_abs_diff, result.relative_error)
        if compared[result.name].finite and not all(map(math.isfinite, figures)):  # the float file gives zeros, or squares overflow
            failures.append(f"how far `{result.name}` is from the float file cannot be said in numbers")
        if min_cosine is not None and not result.cosine >= min_cosine:
            failures.append(f"cosine {result.cosine:.5f} of `{result.name}` is below {min_cosine:g}")
        if max_error is not None and not result.relative_error <= max_error:
            failures.append(f"relative error {result.relative_error:.5f} of `{result.name}` is above {max_error:g}")
    return FileVerdict(
        results,
        len(inputs.samples),
        inputs.about,
        graph.size_of(quantized),
        graph.size_of(against),
        _version(),
        min_cosine,
        max_error,
        tuple(failures),
    )


def session(model: Path | bytes, path: Path) -> Any:
    """`model`: a file, or a graph in memory whose data files are beside `path`."""
    import onnxruntime
    import torch

    if isinstance(model, Path) and not model.is_file():
        raise InputError(f"there is no file `{model}`", "give an .onnx file")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 4  # errors are raised anyway
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(path.parent.absolute()))
    try:
        return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    except Exception as failure:
        raise InputError(f"onnxruntime cannot load `{path}`: {str(failure).strip().splitlines()[0]}", _HINT) from failure


def check_thresholds(min_cosine: float | None, max_error: float | None) -> None:
    if min_cosine is not None and not -1 <= min_cosine <= 1:
        raise InputError(f"`--min-cosine {min_cosine}` is no threshold", "a cosine is at most 1")
    if max_error is not None and not 0 <= max_error < math.inf:
        raise InputError(f"`--max-error {max_error}` is no threshold", "a relative error is at least 0")


def _cosine(dot: float, one: float, two: float) -> float:
    if one == two == 0:
        return 1.0  # nothing on both sides
    return dot / math.sqrt(one * two) if one and two else 0.0


def _version() -> str:
    from importlib.metadata import version

    return f"onnxruntime {version('onnxruntime')}"
