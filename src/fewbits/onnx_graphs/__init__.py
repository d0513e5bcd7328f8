"""A float .onnx file in, the same graph with packed weights out. Weights are found in the graph; all else stays as it is, byte for byte.

verbs.py       `fewbits quantize` and `fewbits verify` for an .onnx file
target.py      which formats and activations the weights of this graph can have, and in how many bytes
inputs.py      samples to run a file on: a .npz, text through its tokenizer, or random values of the declared shapes
statistics.py  what calibration needs, from the values that flow through the float file: scales of activations, second moments
rewrite.py     nodes that read packed weights in place of those that read float ones
save.py        one .onnx file, with a data file beside it where the tensors exceed what a protobuf holds
outputs.py     two files side by side in ONNX Runtime

model/onnx/ reads the graph and finds its weights; targets/onnx/ has the layout of packed weights.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from fewbits.errors import MissingError

if TYPE_CHECKING:
    from fewbits.model.onnx.graph import OnnxModel


def open(path: str | Path) -> OnnxModel:
    for package in ("onnx", "onnxruntime"):
        if not find_spec(package):
            raise MissingError(f"ONNX files need the package `{package}`", "pip install 'fewbits[onnx]'")
    from fewbits.model.onnx import graph

    return graph.OnnxModel(Path(path))
