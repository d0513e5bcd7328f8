"""What lies in model.onnx.data: the parts of every weight, then the tensors that were kept, then the rotary tables, one after another.

Beside the graph and not in it, because protobuf ends at 2 GiB. Sizes are known from shapes, so that the graph can be written first
and its file is the same whether or not the arrays exist yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx
import torch

from fewbits.formats import Spec
from fewbits.targets.onnx_genai import rotary

if TYPE_CHECKING:
    from torch import Tensor

    from fewbits.artifact import Artifact
    from fewbits.drafting import Draft
    from fewbits.model import Weight
    from fewbits.progress import Progress
    from fewbits.targets.onnx.storage import Store
    from fewbits.targets.onnx_genai.families import Decoder

FILE = "model.onnx.data"
_ALIGNMENT = 64  # a cache line: arrays are read where the file is mapped
TYPES: dict[str, int] = {
    "uint8": onnx.TensorProto.UINT8,
    "float16": onnx.TensorProto.FLOAT16,
    "bfloat16": onnx.TensorProto.BFLOAT16,
    "float32": onnx.TensorProto.FLOAT,
}


@dataclass(frozen=True)
class Array:
    name: str
    spec: Spec
    offset: int

    @property
    def end(self) -> int:
        return self.offset + self.spec.nbytes

    def initializer(self) -> Any:
        """Its name, type and place, without its values."""
        proto = onnx.TensorProto(name=self.name, data_type=TYPES[self.spec.dtype], dims=self.spec.shape)
        proto.data_location = onnx.TensorProto.EXTERNAL
        for key, value in (("location", FILE), ("offset", str(self.offset)), ("length", str(self.spec.nbytes))):
            proto.external_data.add(key=key, value=value)
        return proto


def table(part: str, kind: str) -> str:
    """The initializer that holds the cosines or sines of a type of attention."""
    return f"rotary.{kind}.{part}" if kind else f"rotary.{part}"


def layout(artifact: Artifact | Draft, stores: Mapping[str, Store], decoder: Decoder) -> dict[str, Array]:
    placed: dict[str, Array] = {}
    end = 0
    for name, spec in _specs(artifact, stores, decoder):
        offset = -(-end // _ALIGNMENT) * _ALIGNMENT
        placed[name] = Array(name, spec, offset)
        end = placed[name].end
    return placed


def nbytes(placed: Mapping[str, Array]) -> int:
    return max(array.end for array in placed.values())


def write(
    path: Path,
    artifact: Artifact,
    stores: Mapping[str, Store],
    decoder: Decoder,
    placed: Mapping[str, Array],
    progress: Progress[Weight],
) -> None:
    """One weight in memory at a time."""
    with path.open("wb") as file:

        def put(arrays: Iterable[tuple[str, Tensor]]) -> None:
            for name, tensor in arrays:
                array = placed[name]
                assert (tuple(tensor.shape), str(tensor.dtype)) == (array.spec.shape, f"torch.{array.spec.dtype}"), name
                file.write(bytes(array.offset - file.tell()))
                file.write(tensor.contiguous().view(torch.uint8).numpy().data)

        for weight in progress(artifact.weights, len(artifact.weights), "writing onnx"):
            put((f"{weight.name}.{part}", tensor) for part, tensor in stores[weight.name].arrays(artifact.parts(weight)).items())
        put((name, _kept(artifact, name, decoder)) for name in artifact.rest)
        for kind in decoder.tables:
            cos, sin = rotary.tables(artifact.config, kind, decoder.context)
            put([(table("cos", kind), cos), (table("sin", kind), sin)])
        assert file.tell() == nbytes(placed)


def _specs(artifact: Artifact | Draft, stores: Mapping[str, Store], decoder: Decoder) -> Iterator[tuple[str, Spec]]:
    for weight in artifact.weights:
        for part, spec in stores[weight.name].specs().items():
            yield f"{weight.name}.{part}", spec
    for name in artifact.rest:
        yield name, Spec("float32", tuple(artifact.tensor(name).shape))
    for kind in decoder.tables:
        for part in ("cos", "sin"):
            yield table(part, kind), Spec("float32", (decoder.context, decoder.head_size // 2))


def _kept(artifact: Artifact, name: str, decoder: Decoder) -> Tensor:
    tensor = artifact.tensor(name).float()
    return tensor + decoder.family.norm_offset if name.endswith("norm.weight") else tensor
