"""The content of model.onnx.data: the parts of every weight, then norms and biases, then the rotary tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from fewbits.formats import Spec
from fewbits.model.onnx import external_data
from fewbits.targets.onnx import storage
from fewbits.targets.onnx_genai import rotary

if TYPE_CHECKING:
    from torch import Tensor

    from fewbits.artifact import Artifact
    from fewbits.artifact.draft import Draft
    from fewbits.model.onnx.external_data import Array
    from fewbits.model.weights import Weight
    from fewbits.progress import Progress
    from fewbits.targets.onnx.storage import Store
    from fewbits.targets.onnx_genai.families import Decoder

FILE = "model.onnx.data"


def table(part: str, kind: str) -> str:
    """The initializer that holds the cosines or sines of a type of attention."""
    return f"rotary.{kind}.{part}" if kind else f"rotary.{part}"


def layout(artifact: Artifact | Draft, stores: Mapping[str, Store], decoder: Decoder) -> dict[str, Array]:
    return external_data.layout(dict(_specs(artifact, stores, decoder)), FILE)


def write(
    path: Path,
    artifact: Artifact,
    stores: Mapping[str, Store],
    decoder: Decoder,
    placed: Mapping[str, Array],
    progress: Progress[Weight],
) -> None:
    """One weight in memory at a time."""

    def arrays() -> Iterator[tuple[str, Tensor]]:
        yield from storage.arrays(artifact, stores, progress)
        for name in artifact.rest:
            yield name, _float32(artifact, name, decoder)
        for kind in decoder.tables:
            cos, sin = rotary.tables(artifact.config, kind, decoder.context)
            yield table("cos", kind), cos
            yield table("sin", kind), sin

    with path.open("wb") as file:
        external_data.write(file, placed, arrays())


def _specs(artifact: Artifact | Draft, stores: Mapping[str, Store], decoder: Decoder) -> Iterator[tuple[str, Spec]]:
    yield from storage.specs(stores).items()
    for name in artifact.rest:
        yield name, Spec("float32", tuple(artifact.tensor(name).shape))
    for kind in decoder.tables:
        for part in ("cos", "sin"):
            yield table(part, kind), Spec("float32", (decoder.context, decoder.head_size // 2))


def _float32(artifact: Artifact, name: str, decoder: Decoder) -> Tensor:
    tensor = artifact.tensor(name).float()
    return tensor + decoder.family.norm_offset if name.endswith("norm.weight") else tensor
