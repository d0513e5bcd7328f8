"""Samples to run a file on: arrays from a .npz, text through the tokenizer beside the file, or random values of the declared shapes."""

from __future__ import annotations

import hashlib
import math
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from onnx import TensorProto, helper

from fewbits.errors import InputError
from fewbits.model.onnx import constants

if TYPE_CHECKING:
    from fewbits.model.onnx.graph import OnnxModel

_OF_TEXT = {"input_ids", "attention_mask", "token_type_ids", "position_ids"}
_LENGTH = 128  # tokens of a sample at most
_MOST = 1 << 24  # values of an input that are made up: a picture of 2365 x 2365 pixels in three colours
_BOMB, _RATIO = 64 << 20, 200  # a .npz of more than so many bytes may not unpack to more than so many times its size
_WORDS = 3  # a paragraph has more words than this, a heading may not
_SIZES = {"batch": 2, "channel": 3, "height": 64, "width": 64}  # of dimensions that a graph leaves open, by their name
_OTHER_SIZE = 16

Sample = Mapping[str, Any]  # a numpy array for every input


@dataclass(frozen=True)
class Inputs:
    samples: tuple[Sample, ...]
    about: str  # where they come from, for people
    real: bool  # not random, so that they can be calibrated with

    @property
    def sha256(self) -> str:
        digest = hashlib.sha256()
        for sample in self.samples:
            for name, array in sorted(sample.items()):
                digest.update(f"{name} {array.dtype} {array.shape}\n".encode())
                digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()

    def split(self) -> tuple[Inputs, Inputs]:
        """Samples to calibrate with, and a quarter set aside to judge on."""
        aside = max(1, len(self.samples) // 4)
        if len(self.samples) < 2:
            hint = "give more of them, in a .npz along a first axis; or use `--method rtn` and no static activations, which need none"
            raise InputError("a single sample cannot be calibrated with and judged on", hint)
        return Inputs(self.samples[aside:], self.about, self.real), Inputs(self.samples[:aside], self.about, self.real)


def gather(model: OnnxModel, data: Sequence[Path] = (), count: int = 32, seed: int = 0, calibration: bool = False) -> Inputs:
    """`count` samples at most. Without data: the embedded text where the file reads text and has its tokenizer beside it."""
    declared = declarations(model)
    if data and all(path.suffix.lower() == ".npz" for path in data):
        samples = tuple(sample for path in data for sample in of_arrays(path, declared))
        if not samples:
            raise InputError(f"`{data[0].name}` holds no samples", "its arrays have a first axis of length zero")
        return Inputs(samples[:count], ", ".join(path.name for path in data), True)
    reads_text = "input_ids" in declared and set(declared) <= _OF_TEXT
    tokenizer = next((p for p in (model.path.parent, model.path.parent.parent) if (p / "tokenizer.json").is_file()), None)
    if data and not (reads_text and tokenizer):
        why_not = "has no tokenizer.json beside it" if reads_text else f"does not read text: its inputs are {', '.join(declared)}"
        raise InputError(f"`{model.path.name}` {why_not}", "give its inputs as arrays in a .npz, named like them")
    if reads_text and tokenizer:
        from fewbits import embedded

        default = embedded.calibration_text() if calibration else embedded.verification_text()
        text = "\n\n".join(_read(path) for path in data) if data else default
        about = ", ".join(path.name for path in data) if data else "embedded text"
        return Inputs(tuple(of_text(text, tokenizer / "tokenizer.json", declared, count)), about, True)
    samples = tuple(random(model, declared, seed + index) for index in range(min(count, 8)))
    return Inputs(samples, "random values of the declared shapes", False)


def declarations(model: OnnxModel) -> dict[str, Any]:
    """The inputs that the graph declares, without those that have a stored value."""
    stored = {tensor.name for tensor in model.proto.graph.initializer}
    return {entry.name: entry.type.tensor_type for entry in model.proto.graph.input if entry.name not in stored}


def of_arrays(path: Path, declared: Mapping[str, Any]) -> Iterator[Sample]:
    """Each array has the rank that its input declares, or one more: then the first axis is the sample."""
    try:
        _check_bomb(path)
        arrays = dict(np.load(path, allow_pickle=False))
    except InputError:
        raise
    except Exception as failure:
        raise InputError(f"`{path}` cannot be read as a .npz of arrays: {failure}", "write it with numpy.savez") from failure
    if missing := sorted(set(declared) - set(arrays)):
        raise InputError(f"`{path.name}` has no array `{missing[0]}`", f"the file's inputs are {', '.join(declared)}")
    arrays = {name: _typed(arrays[name], name, entry) for name, entry in declared.items()}
    many = {name: _extra_axis(arrays[name], name, entry) for name, entry in declared.items()}
    if len(set(many.values())) > 1:
        raise InputError(f"`{path.name}` has several samples of some inputs and one of others", "give as many of each")
    counts = {len(array) for array in arrays.values()} if all(many.values()) else {1}
    if len(counts) > 1:
        raise InputError(f"`{path.name}` has {' and '.join(map(str, sorted(counts)))} samples of its inputs", "give as many of each")
    if not all(many.values()):
        yield arrays
        return
    for index in range(counts.pop()):
        yield {name: array[index] for name, array in arrays.items()}


def _check_bomb(path: Path) -> None:
    """Refuses a zip bomb. Zeros compress a thousandfold, inputs of a model hardly at all."""
    with zipfile.ZipFile(path) as file:
        size = sum(member.file_size for member in file.infolist())
    if size > max(_BOMB, _RATIO * path.stat().st_size):
        hint = "do not trust it, or save it with numpy.savez"
        raise InputError(f"`{path.name}` is more than {_RATIO} times as large as it was packed", hint)


def of_text(text: str, tokenizer: Path, declared: Mapping[str, Any], count: int) -> Iterator[Sample]:
    """One paragraph for each sample, from all over the text, cut where it is long; none is padded."""
    from tokenizers import Tokenizer

    try:
        reader = Tokenizer.from_file(str(tokenizer))
    except Exception as failure:
        raise InputError(f"`{tokenizer}` cannot be read: {failure}", "copy it from where the model came from") from failure
    reader.no_padding()
    reader.enable_truncation(_LENGTH)
    blank = r"\n\s*\n"
    paragraphs = [piece for piece in re.split(blank if re.search(blank, text) else "\n", text) if len(piece.split()) > _WORDS]
    encoded = [part.ids for whole in reader.encode_batch(paragraphs) for part in (whole, *whole.overflowing) if len(part.ids) > _WORDS]
    if not encoded:
        raise InputError(f"the text has no paragraph of more than {_WORDS} words", "give more text with `--data`")
    for ids in encoded[:: max(1, len(encoded) // count)][:count]:
        values = {"input_ids": ids, "attention_mask": [1] * len(ids), "token_type_ids": [0] * len(ids), "position_ids": range(len(ids))}
        yield {name: np.array([values[name]], helper.tensor_dtype_to_np_dtype(entry.elem_type)) for name, entry in declared.items()}


def random(model: OnnxModel, declared: Mapping[str, Any], seed: int) -> Sample:
    rng = np.random.default_rng(seed)
    bounds = _bounds(model)
    sample = {}
    for name, entry in declared.items():
        shape, dtype = [_size(dim) for dim in entry.shape.dim], helper.tensor_dtype_to_np_dtype(entry.elem_type)
        if not (min(shape, default=0) >= 0 and math.prod(shape) <= _MOST):
            problem = f"the input `{name}` has the shape {' x '.join(map(str, shape))}"
            raise InputError(f"{problem}, more than there is room for", "give inputs as a .npz with `--data`")
        if entry.elem_type == TensorProto.BOOL or "mask" in name:
            sample[name] = np.ones(shape, dtype)
        elif np.issubdtype(dtype, np.integer):
            sample[name] = rng.integers(0, bounds.get(name, 2), shape, dtype=dtype)
        elif np.issubdtype(dtype, np.floating):
            sample[name] = rng.standard_normal(shape).astype(dtype)
        else:
            raise InputError(f"there are no random values of the input `{name}`'s type", "give inputs as a .npz with `--data`")
    return sample


def _size(dim: Any) -> int:
    """Of a dimension: fixed, by its name, or by a sum of names (past_length + length)."""
    if dim.HasField("dim_value"):
        return int(dim.dim_value)
    terms = [term.strip().lower() for term in dim.dim_param.split("+")]
    return sum(int(t) if t.isdigit() else next((n for word, n in _SIZES.items() if word in t), _OTHER_SIZE) for t in terms)


def _bounds(model: OnnxModel) -> dict[str, int]:
    """How many rows the table has that an input looks up, by the name of the input."""
    tables = {tensor.name: tensor.dims[0] for tensor in model.proto.graph.initializer if tensor.dims}
    bounds: dict[str, int] = {}
    for node in model.proto.graph.node:
        if node.op_type == "Gather" and node.input[0] in tables and constants.attribute(node, "axis", 0) == 0:
            bounds[node.input[1]] = min(tables[node.input[0]], bounds.get(node.input[1], 1 << 30))
    return bounds


def _typed(array: Any, name: str, entry: Any) -> Any:
    wanted = helper.tensor_dtype_to_np_dtype(entry.elem_type)
    if array.dtype.kind not in "iufb" or not np.can_cast(array.dtype, wanted, "same_kind"):
        raise InputError(f"`{name}` is {array.dtype}, the file takes {wanted}", "convert it before it is saved")
    return np.ascontiguousarray(array.astype(wanted))


def _extra_axis(array: Any, name: str, entry: Any) -> bool:
    rank = len(entry.shape.dim) if entry.HasField("shape") else array.ndim
    if array.ndim not in (rank, rank + 1):
        raise InputError(f"`{name}` has {array.ndim} axes, the file takes {rank}", "or one more, for several samples")
    for given, dim in zip(array.shape[array.ndim - rank :], entry.shape.dim, strict=False):
        if dim.HasField("dim_value") and dim.dim_value > 0 and given != dim.dim_value:
            expected = " x ".join(str(d.dim_value) if d.HasField("dim_value") else d.dim_param or "any" for d in entry.shape.dim)
            raise InputError(
                f"`{name}` is {' x '.join(map(str, array.shape))}, the file takes {expected}", "with samples along a first axis"
            )
    return bool(array.ndim > rank)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as failure:
        raise InputError(f"`{path}` cannot be read as text: {failure}", "give text, or arrays in a .npz") from failure
