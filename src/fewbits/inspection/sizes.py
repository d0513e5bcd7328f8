"""The size of a written file: on the disk, of its tensors, and in bits per weight."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fewbits.inspection.contents import inspect
from fewbits.model.gguf import architectures
from fewbits.model.gguf.matrices import GgufMatrices
from fewbits.model.onnx import graph
from fewbits.targets import card
from fewbits.targets.onnx_genai import contents as onnx_genai

if TYPE_CHECKING:
    from fewbits.model import Model


def tensor_bytes(path: Path) -> int:
    """Read from the headers of the file."""
    return inspect(path, no_values=True).tensor_bytes


def bits_per_weight(path: Path, source: Model) -> float:
    """Of the weights, as a plan counts them: without norms and biases, which are float32 in every target."""
    if path.is_file() and path.suffix.lower() == ".gguf" and (source.layout or architectures.unsupported(source.config)):
        return _as_laid_out(path)
    elements = sum(rows * cols for rows, cols in (w.shape for w in source.weights))
    if (path / "genai_config.json").is_file():  # it has rotary tables too
        return 8 * onnx_genai.weight_bytes(path) / elements
    rest = sum((4 if path.is_file() else tensor.element_size()) * tensor.numel() for tensor in map(source.tensor, source.rest))
    return 8 * (tensor_bytes(path) - rest) / elements


def _as_laid_out(path: Path) -> float:
    """Of the matrices that llama-quantize would quantize, whatever else the file holds."""
    file = GgufMatrices(path)
    elements = sum(weight.shape[0] * weight.shape[1] for weight in file.weights)
    return 8 * sum(file.nbytes(name) for name in {weight.parameter for weight in file.weights}) / elements


def size_of(path: Path) -> int:
    """Without the model card, which is for people and loaded by nobody."""
    if path.suffix.lower() == ".onnx" and path.is_file():  # its weights may be in a data file
        return graph.size_of(path)
    return path.stat().st_size if path.is_file() else sum(p.stat().st_size for p in path.iterdir() if p.name != card.NAME)
