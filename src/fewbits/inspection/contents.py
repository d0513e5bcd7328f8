"""`fewbits inspect`: a file or folder in; its tensors, types, sizes, metadata and the distribution of values out."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits.devices.units import size
from fewbits.errors import InputError
from fewbits.inspection.distributions import Values, distribution
from fewbits.model import checkpoints
from fewbits.model.checkpoints import hub
from fewbits.model.checkpoints.folder import Folder
from fewbits.progress import silent
from fewbits.store.dtypes import ITEMS
from fewbits.store.untrusted import read_json

if TYPE_CHECKING:
    from fewbits.progress import Progress
    from fewbits.targets.stored_tensor import StoredTensor


@dataclass(frozen=True)
class TensorInfo:
    name: str
    type: str
    shape: tuple[int, ...]
    nbytes: int
    values: Values | None = None


@dataclass(frozen=True)
class TypeTotal:
    """All tensors of one type."""

    type: str
    tensors: int
    numbers: int
    nbytes: int


@dataclass(frozen=True)
class Inspection:
    path: str
    kind: str
    nbytes: int  # on disk
    metadata: dict[str, Any]
    tensors: tuple[TensorInfo, ...]  # as people count: layer 2 before layer 10

    @property
    def types(self) -> tuple[TypeTotal, ...]:
        """The type with most bytes first."""
        by_type: dict[str, list[TensorInfo]] = {}
        for tensor in self.tensors:
            by_type.setdefault(tensor.type, []).append(tensor)
        totals = (
            TypeTotal(name, len(same), sum(math.prod(each.shape) for each in same), sum(each.nbytes for each in same))
            for name, same in by_type.items()
        )
        return tuple(sorted(totals, key=lambda total: -total.nbytes))

    @property
    def tensor_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def __str__(self) -> str:
        types = ", ".join(f"{each.tensors} {each.type}" for each in self.types) or "none"
        infinite = sum(bool(tensor.values and tensor.values.nonfinite) for tensor in self.tensors)
        read = f"{infinite} with values that are not finite" if any(tensor.values for tensor in self.tensors) else "values were not read"
        return f"{self.path}: {self.kind}, {size(self.nbytes)}\n{len(self.tensors)} tensors: {types}\n{read}"

    def to_dict(self) -> dict[str, object]:
        return asdict(self) | {"tensor_bytes": self.tensor_bytes, "types": [asdict(each) for each in self.types]}


# a tensor, and a function that loads its values, as an array or a tensor, if they are floats
Loadable = tuple[TensorInfo, Callable[[], Any] | None]


def inspect(path: str | Path, no_values: bool = False, progress: Progress[Loadable] = silent) -> Inspection:
    """Reads headers; with `values` every tensor once, one at a time."""
    path = Path(path)
    if (path / "fewbits.json").is_file():
        kind, metadata, tensors = _artifact(path)
    elif (path / "genai_config.json").is_file():
        from fewbits.targets.onnx_genai import contents

        kind, metadata, stored = contents.contents(path)
        tensors = [_info(each) for each in stored]
    elif path.is_dir() and any(path.glob("*-00001-of-*.gguf")):
        from fewbits.targets.gguf import first_part

        kind, metadata, tensors = _gguf(first_part(path))
    elif path.is_dir():
        kind, metadata, tensors = _folder(path)
    elif path.suffix.lower() == ".gguf":
        kind, metadata, tensors = _gguf(path)
    elif path.suffix.lower() == ".onnx":
        kind, metadata, tensors = _onnx(path)
    elif path.exists():
        raise InputError(f"`{path}` is nothing that fewbits can look into", "give a model folder, a .gguf, an .onnx or a fewbits artifact")
    else:
        path = checkpoints.open(str(path)).path  # a hub id
        kind, metadata, tensors = _folder(path)
    size = sum(p.stat().st_size for p in path.iterdir() if p.is_file()) if path.is_dir() else path.stat().st_size
    tensors = sorted(tensors, key=lambda each: counted(each[0].name))
    infos = []
    for info, load in tensors if no_values else progress(tensors, len(tensors), "reading"):
        infos.append(replace(info, values=distribution(load()) if load and not no_values else None))
    return Inspection(hub.name_of(path), kind, size, metadata, tuple(infos))


def counted(name: str) -> list[tuple[int, str]]:
    """A key by which names sort as people count: 2 before 10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"([0-9]+)", name) if part]


def _artifact(path: Path) -> tuple[str, dict[str, Any], list[Loadable]]:
    from fewbits.artifact import Artifact

    artifact = Artifact(path)
    tensors: list[Loadable] = []
    for weight in artifact.weights:
        entry = artifact.plan[weight.name]
        nbytes = sum(part.nbytes for part in artifact.parts(weight).values())
        tensors.append((TensorInfo(weight.name, entry.format, weight.shape, nbytes), partial(artifact.decoded, weight)))
    for name in artifact.rest:
        tensor = artifact.tensor(name)
        info = TensorInfo(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor.nbytes)
        tensors.append((info, partial(artifact.tensor, name)))
    said = asdict(artifact.provenance) | {"target": artifact.plan.target}
    machine = said.pop("machine") or {}
    return "fewbits artifact", said | {f"machine.{key}": value for key, value in machine.items()}, tensors


def _info(stored: StoredTensor) -> Loadable:
    return TensorInfo(stored.name, stored.type, stored.shape, stored.nbytes), stored.load


def _folder(path: Path) -> tuple[str, dict[str, Any], list[Loadable]]:
    from fewbits.targets.compressed_tensors import contents
    from fewbits.targets.mlx import contents as mlx

    if mlx.is_mlx(path):
        return "mlx", read_json(path / "config.json", ""), [_info(each) for each in mlx.contents(path)]
    if contents.is_compressed(path):
        return "compressed-tensors", read_json(path / "config.json", ""), [_info(each) for each in contents.contents(path)]
    checkpoint = checkpoints.open(path)
    if isinstance(checkpoint, Folder):  # floats: neither torch nor transformers is needed
        return "checkpoint", checkpoint.config_file(), [_info_of_floats(checkpoint, name) for name in checkpoint.names()]
    itemsize = {"fp16": 2, "bf16": 2, "fp32": 4}
    tensors: list[Loadable] = []
    storage = getattr(checkpoint, "storage", lambda _: None)  # of one that is published quantized
    for name in checkpoint.names():
        shape, dtype = checkpoint.shape(name), checkpoint.dtype(name)
        kind, nbytes = storage(name) or (dtype, math.prod(shape) * itemsize[dtype])
        tensors.append((TensorInfo(name, kind, shape, nbytes), partial(checkpoint.load, name)))
    quantized = getattr(checkpoint, "source_quantization", None)
    return "checkpoint", checkpoint.config.to_diff_dict() | ({"source_quantization": quantized} if quantized else {}), tensors


def _info_of_floats(folder: Folder, name: str) -> Loadable:
    shape, dtype = folder.shape(name), folder.dtype(name)
    nbytes = math.prod(shape) * dict(ITEMS.values())[folder.stored(name)]
    return TensorInfo(name, dtype, shape, nbytes), partial(folder.array, name)


def _gguf(path: Path) -> tuple[str, dict[str, Any], list[Loadable]]:
    from fewbits.model.gguf.checkpoint import as_float32, open_reader

    reader = open_reader(path)
    metadata = {}
    for key, entry in reader.fields.items():
        try:
            value = entry.contents()
        except ValueError as failure:
            raise InputError(f"`{key}` of `{path}` cannot be read: {failure}", "the file is damaged; fetch it again") from failure
        metadata[key] = value if not isinstance(value, list) or len(value) <= 8 else f"[{len(value)} values]"

    tensors: list[Loadable] = [
        (
            TensorInfo(t.name, t.tensor_type.name.lower(), tuple(int(n) for n in reversed(t.shape)), int(t.n_bytes)),
            partial(as_float32, t.data, t.tensor_type),
        )
        for t in reader.tensors
    ]
    return "gguf", metadata, tensors


def _onnx(path: Path) -> tuple[str, dict[str, Any], list[Loadable]]:
    try:
        import onnx
    except ImportError:
        from fewbits.errors import MissingError

        raise MissingError("the `onnx` package is not here", "pip install 'fewbits[onnx]'") from None
    from fewbits.model.onnx.graph import array_of, check_graph

    check_graph(path)
    try:
        model = onnx.load(path)
    except Exception as failure:
        raise InputError(f"`{path}` cannot be read as ONNX: {failure}", "the file is truncated or damaged; fetch it again") from failure

    def each() -> Iterator[Loadable]:
        for tensor in model.graph.initializer:
            array = array_of(tensor, path)
            kind = onnx.TensorProto.DataType.Name(tensor.data_type).lower()
            is_float = array.dtype.kind == "f"
            info = TensorInfo(tensor.name, kind, tuple(array.shape), array.nbytes)
            yield info, partial(array.astype, "float32") if is_float else None

    metadata: dict[str, Any] = {prop.key: prop.value for prop in model.metadata_props}
    metadata["operators"] = dict(sorted(Counter(node.op_type for node in model.graph.node).items()))
    return "onnx", metadata, list(each())
