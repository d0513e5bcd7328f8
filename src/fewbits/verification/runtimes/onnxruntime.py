"""ONNX Runtime on the CPU, with the threads that torch uses."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits.errors import InputError
from fewbits.store.untrusted import first_line
from fewbits.verification.runtimes import Runtime
from fewbits.verification.session import Session

if TYPE_CHECKING:
    from torch import Tensor


class _Logits(Session):
    def __init__(self, session: Any) -> None:
        self._session = session
        self.vocabulary = int(session.get_outputs()[0].shape[-1])

    def logits(self, tokens: list[int]) -> Tensor:
        import numpy as np
        import torch

        (logits,) = self._session.run(["logits"], {"input_ids": np.array([tokens], np.int64)})
        return torch.from_numpy(logits[0]).float()

    def close(self) -> None:
        self._session = None


class OnnxRuntime(Runtime):
    name = "onnxruntime"
    extra = "onnx"

    def missing(self) -> str | None:
        from importlib.util import find_spec

        return None if find_spec("onnxruntime") else "the package `onnxruntime` is not installed"

    def version(self) -> str:
        from importlib.metadata import version

        return f"onnxruntime {version('onnxruntime')}"

    def takes(self, path: Path) -> bool:
        return path.suffix.lower() == ".onnx"

    def open(self, path: Path, context: int) -> Session:
        import onnxruntime
        import torch

        if not path.is_file():
            raise InputError(f"there is no file `{path}`", "give an .onnx file that `fewbits export --to onnx` wrote")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = 4  # errors are raised all the same
        try:
            session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        except Exception as failure:
            hint = "the file is damaged, or needs a newer onnxruntime; write it anew"
            raise InputError(f"onnxruntime cannot load `{path}`: {first_line(failure)}", hint) from failure
        inputs, outputs = [i.name for i in session.get_inputs()], [o.name for o in session.get_outputs()]
        if inputs != ["input_ids"] or "logits" not in outputs:
            hint = (
                "verify takes a language model with the input `input_ids` and the output `logits`, as `fewbits export --to onnx` writes it"
            )
            raise InputError(f"`{path}` has the inputs {inputs} and the outputs {outputs}", hint)
        return _Logits(session)


RUNTIME = OnnxRuntime()
