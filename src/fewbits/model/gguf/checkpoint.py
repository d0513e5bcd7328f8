"""A GGUF, memory-mapped, in one file or in parts: its tensors under the names and in the layout of the transformers module.

Quantized tensors are decoded one at a time to float32, exactly. Their `dtype` is nevertheless fp16, the format of an unquantized copy:
float32 would double the size for digits that the file never had.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits import formats
from fewbits.errors import FewbitsError, InputError, UnknownKindError
from fewbits.model import limits
from fewbits.model.gguf import architectures, header, metadata, vocabularies
from fewbits.model.gguf.header import Field, Header
from fewbits.model.gguf.quantized import StoredTypes, stored_types
from fewbits.store.untrusted import first_line

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from fewbits.model.gguf.architectures import Place
    from fewbits.model.gguf.types import Type

    Array = np.ndarray[Any, Any]

_DAMAGED = "the file is truncated or damaged; fetch it again"
_FLOATS = {"F32": "fp32", "F16": "fp16", "BF16": "bf16"}
_POOLER = "pooler.dense"  # of BERT: llama.cpp's converter leaves it out, because embeddings do not use it


class GgufFile:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._reader = open_reader(path)
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}

    @cached_property
    def fields(self) -> dict[str, Any]:
        """The metadata as plain values."""
        try:
            return {name: field.contents() for name, field in self._reader.fields.items()}
        except Exception as failure:
            raise InputError(f"the metadata of `{self.path}` cannot be read: {failure}", _DAMAGED) from failure

    @cached_property
    def source_quantization(self) -> StoredTypes | None:
        return stored_types(self._tensors.values())

    @cached_property
    def config(self) -> Any:
        prefix = f"{self.fields.get('general.architecture')}."  # anybody may add other keys, and no module is built from them
        described = {name: value for name, value in self.fields.items() if name.startswith(prefix)}
        limits.check(described, len(self._tensors), self.path)
        factors = {name: self._tensors[name].data.tolist() for name in architectures.FACTORS if name in self._tensors}
        try:
            return architectures.config_of(self.fields, self._tensors.keys(), factors)
        except FewbitsError:
            raise
        except Exception as failure:  # transformers raises its own errors when it checks a config
            said = f"{type(failure).__name__}: {first_line(failure)}"
            raise InputError(f"the metadata of `{self.path}` does not describe a model: {said}", _DAMAGED) from failure

    def names(self) -> list[str]:
        return [*self._stored, *self._absent]

    def shape(self, name: str) -> tuple[int, ...]:
        expected = self._shapes[name]
        if name in self._absent:
            return expected
        shapes = [tuple(int(size) for size in reversed(tensor.shape)) for tensor, _ in self._stored[name]]  # GGUF gives the columns first
        shape = shapes[0] if len(shapes) == 1 else (*shapes[0][:-2], sum(shape[-2] for shape in shapes), shapes[0][-1])
        shape = shape[::-1] if name in self._transposed else shape
        return expected if (1, *shape) == expected else shape  # llama.cpp's converter drops the dimension of a matrix with one row

    def dtype(self, name: str) -> str:
        return "fp32" if name in self._absent else _FLOATS.get(self._stored[name][0][0].tensor_type.name, "fp16")

    def load(self, name: str) -> Tensor:
        return self._load(name, None)

    def load_slice(self, name: str, index: int) -> Tensor:
        return self._load(name, index)

    def save_assets(self, folder: Path) -> None:
        self.config.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        metadata.save(self.path, folder)

    def files(self) -> list[Path]:
        return list(self._reader.paths)

    @cached_property
    def tokenizer(self) -> Any:
        try:
            return vocabularies.to_tokenizer(vocabularies.of_fields(self.fields))
        except (FewbitsError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as failure:  # a panic in Rust is no Exception
            said = f"{type(failure).__name__}: {first_line(failure)}"
            raise InputError(f"the vocabulary of `{self.path}` makes no tokenizer: {said}", _DAMAGED) from failure

    def _load(self, name: str, expert: int | None) -> Tensor:
        """For one expert only its rows are decoded."""
        import torch

        if name in self._absent:
            return torch.zeros(self.shape(name))
        pieces = [(decoded(tensor, expert), place) for tensor, place in self._stored[name]]
        rows_at = -2 if pieces[0][0].dim() > 1 else 0
        joined = torch.cat([piece - place.added if place.added else piece for piece, place in pieces], rows_at)
        orders = [place.rows for _, place in pieces]
        if orders[0] is not None:
            order = torch.tensor([row for rows in orders if rows is not None for row in rows])
            joined = joined.index_select(rows_at, order.argsort())
        whole = joined.T if name in self._transposed else joined
        return whole if expert is not None else whole.reshape(self.shape(name))

    def packed_type(self, name: str) -> str | None:
        """The GGUF type of a matrix; None: its pieces have several, or their values are not those of the module."""
        kinds = {tensor.tensor_type.name for tensor, _ in self._stored[name]}
        changed = name in self._absent or any(place.added for _, place in self._stored[name])
        return kinds.pop() if len(kinds) == 1 and not changed else None

    def packed_rows(self, name: str, expert: int | None = None) -> Tensor | None:
        """(rows, bytes or numbers) as they are stored, in the order of the module; None where `packed_type` is."""
        import numpy as np
        import torch

        if (kind := self.packed_type(name)) is None:
            return None
        pieces, orders = [], []
        for tensor, place in self._stored[name]:
            data = np.array(tensor.data if expert is None else tensor.data[expert])  # a copy: torch refuses read-only memory
            pieces.append(torch.from_numpy(data.reshape(-1, data.shape[-1])))
            orders.append(place.rows)
        joined = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
        if orders[0] is not None:
            joined = joined[torch.tensor([row for rows in orders if rows is not None for row in rows]).argsort()]
        return joined.view(torch.bfloat16) if kind == "BF16" else joined

    @cached_property
    def _stored(self) -> dict[str, list[tuple[Any, Place]]]:
        """Parameter -> its tensors. A tensor that the module has no place for is an error: without it the model computes something else."""
        places = architectures.Places(self.config)
        places_of = {name: places.find(name) or () for name in self._shapes}
        stored = {
            name: [(self._tensors[place.tensor], place) for place in all_places]
            for name, all_places in places_of.items()
            if all_places and all(place.tensor in self._tensors for place in all_places)
        }
        used = {place.tensor for name in stored for place in places_of[name]} | {*architectures.FACTORS}
        if unused := [name for name in self._tensors if name not in used]:
            kind = architectures.of(self.config).class_name
            raise UnknownKindError(
                f"`{self.path}` holds `{unused[0]}`, which {kind} has no place for", "open the original checkpoint instead"
            )
        return stored

    @cached_property
    def _absent(self) -> list[str]:
        return [name for name in self._shapes if name.startswith(_POOLER) and name not in self._stored]

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Of every parameter of the module."""
        return {name: tuple(tensor.shape) for name, tensor in self._skeleton.state_dict().items()}

    @cached_property
    def _transposed(self) -> set[str]:
        from transformers.pytorch_utils import Conv1D

        return {f"{name}.weight" for name, module in self._skeleton.named_modules() if isinstance(module, Conv1D)}

    @cached_property
    def _skeleton(self) -> Any:
        import torch
        import transformers

        try:
            with torch.device("meta"), limits.building(len(self._tensors)):
                return getattr(transformers, architectures.of(self.config).class_name)(self.config)
        except Exception as failure:
            said = f"{type(failure).__name__}: {first_line(failure)}"
            raise InputError(f"the metadata of `{self.path}` does not describe a model: {said}", _DAMAGED) from failure


@dataclass(frozen=True)
class Opened:
    """The content of a GGUF: one file, or all its parts together."""

    paths: tuple[Path, ...]
    fields: dict[str, Field]  # of the first file
    tensors: tuple[Any, ...]


def open_reader(path: Path) -> Opened:
    first = _open_one(path)
    count = _number(first, "split.count")
    if count <= 1:
        return Opened((path,), first.fields, first.tensors)
    paths = _part_names(path, count, _number(first, "split.no"))
    tensors, expected = list(first.tensors), _number(first, "split.tensors.count")
    for number, part in enumerate(paths[1:], 1):
        reader = _open_one(part)
        if _number(reader, "split.no") != number or _number(reader, "split.count") != count:
            raise InputError(f"`{part}` is not part {number + 1} of {count}", "the parts do not belong together; fetch them again")
        tensors += reader.tensors
        if len(tensors) > limits.TENSORS:  # checked here, because there may be thousands of parts
            raise InputError(f"`{path}` and its other parts hold more than {limits.TENSORS:,} tensors", _DAMAGED)
    if len(tensors) != expected:
        raise InputError(f"`{path}` and its other parts hold {len(tensors)} tensors of {expected}", _DAMAGED)
    return Opened(tuple(paths), first.fields, tuple(tensors))


def _part_names(path: Path, count: int, number: int) -> list[Path]:
    match = re.fullmatch(r"(.+)-(\d{5})-of-(\d{5})\.gguf", path.name)
    if match is None or int(match[3]) != count:
        raise InputError(f"`{path}` is one of {count} parts, but not named as one", f"llama.cpp names them NAME-00001-of-{count:05}.gguf")
    if number != 0:
        raise InputError(f"`{path}` is part {number + 1} of {count}", f"open the first: {match[1]}-00001-of-{match[3]}.gguf")
    paths = [path.with_name(f"{match[1]}-{i:05}-of-{match[3]}.gguf") for i in range(1, count + 1)]
    if missing := next((part for part in paths if not part.is_file()), None):
        raise InputError(f"`{missing}` is missing", f"all {count} parts must lie in one folder")
    return paths


def _number(opened: Header, key: str) -> int:
    try:
        return int(opened.fields[key].contents()) if key in opened.fields else 0
    except (TypeError, ValueError, OverflowError) as failure:
        raise InputError(f"`{key}` is not a number", _DAMAGED) from failure


def _open_one(path: Path) -> Header:
    try:
        return header.read(path)
    except (ValueError, struct.error, OverflowError) as failure:
        raise InputError(f"`{path}` is not a GGUF file that can be read: {failure}", _DAMAGED) from failure
    except OSError as failure:
        raise InputError(f"`{path}` cannot be read: {failure.strerror}", "check the path and its permissions") from failure


def decoded(tensor: header.Tensor, expert: int | None) -> Tensor:
    """The values of a tensor, or of one slice of a stack: floats as they are, a quantized type as float32."""
    import numpy as np
    import torch

    data = np.array(tensor.data if expert is None else tensor.data[expert])  # a copy: torch refuses read-only memory
    if data.dtype != np.uint8:  # floats of 16 and 32 bits, integers
        return torch.from_numpy(data)
    if tensor.tensor_type.name == "BF16":
        return torch.from_numpy(data).view(torch.bfloat16)
    return torch.from_numpy(as_float32(data, tensor.tensor_type))


def as_float32(data: Array, kind: Type) -> Array:
    """The numbers of a tensor, by numpy alone where the gguf package can: torch takes seconds to import."""
    import gguf
    import numpy as np

    try:
        values: Array = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind.name])
    except (KeyError, NotImplementedError):  # integers; and gguf 0.19 does not know Q2_0, and of Q1_0 no more than its size
        if data.dtype != np.uint8:
            return data.astype(np.float32)
        import torch

        fmt = formats.get(kind.name)
        rows = torch.from_numpy(np.array(data).reshape(-1, data.shape[-1]))
        values = fmt.decode(*fmt.unpack({"blocks": rows})).numpy().reshape(*data.shape[:-1], -1)
    return values
