"""Any float ONNX file as a model: its matrices are found in the graph and stored by plan, the rest stays as it is, byte for byte.

finding.py      which tensors are weights, who reads them, and why some must stay in float
reading.py      the file itself: weights, values, hash
carrying.py     what a plan may say of these weights, and at what price
rewriting.py    nodes that read the packed weights in place of those that read the float ones
saving.py       one .onnx, with its tensors beside it where they take more than a protobuf holds
inputs.py       what to run a file on: a .npz, text through its tokenizer, or random values of the declared shapes
calibrating.py  scales for static activations and statistics for methods, from the values that flow through the float file
verifying.py    the two files side by side in ONNX Runtime
command.py      all of it for the command line
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from fewbits.errors import MissingError
from fewbits.progress import silent

if TYPE_CHECKING:
    from fewbits.onnx_files.inputs import Inputs
    from fewbits.onnx_files.reading import OnnxModel
    from fewbits.onnx_files.verifying import FileVerdict
    from fewbits.outcomes import Known, Stream
    from fewbits.planning import Plan
    from fewbits.progress import Progress


def needed() -> None:
    """An error that says how to get what reading ONNX needs, or nothing."""
    from importlib.util import find_spec

    for package in ("onnx", "onnxruntime"):
        if not find_spec(package):
            raise MissingError(f"ONNX files need the package `{package}`", "pip install 'fewbits[onnx]'")


def open(path: str | Path) -> OnnxModel:
    needed()
    from fewbits.onnx_files import reading

    return reading.OnnxModel(Path(path))


def quantize(
    model: OnnxModel,
    plan: Plan,
    out: str | Path,
    progress: Progress[Any] = silent,
    *,
    accuracy_level: int | None = None,
    statistics: Known | None = None,
    calibration: str | None = None,
) -> dict[str, dict[str, object]]:
    """The file by its plan; how each weight's codes were chosen is returned. `accuracy_level` as MatMulNBits takes it; None: that of
    the ONNX target. `calibration`: the hash of the inputs that statistics or the scales of activations were taken from."""
    from fewbits import outcomes
    from fewbits.onnx_files import rewriting, saving
    from fewbits.targets.onnx import ACCURACY_LEVEL

    how: dict[str, dict[str, object]] = {}

    def noted(stream: Stream) -> Stream:
        for weight, outcome in stream:
            how[weight.name] = {key: value for key, value in vars(outcome).items() if key not in {"parts", "bias"} and value}
            yield weight, outcome

    stream = outcomes.independent(cast(Any, model), plan, statistics, progress)
    level = ACCURACY_LEVEL if accuracy_level is None else accuracy_level
    proto = rewriting.rewritten(model, plan, level, noted(stream), calibration)
    saving.save(proto, model, Path(out))
    return how


def verify(
    quantized: str | Path,
    against: str | Path,
    inputs: Inputs,
    min_cosine: float | None = None,
    max_error: float | None = None,
    progress: Progress[Any] = silent,
) -> FileVerdict:
    needed()
    from fewbits.onnx_files import verifying

    return verifying.verify(Path(quantized), Path(against), inputs, min_cosine, max_error, progress)
