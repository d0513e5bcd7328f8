"""One file, or several parts as llama.cpp splits them: `model-00001-of-00003.gguf`, all the metadata in the first."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fewbits.model.gguf import architectures, metadata, types
from fewbits.targets.gguf.header import add_metadata

if TYPE_CHECKING:
    from fewbits.artifact import Artifact
    from fewbits.artifact.draft import Draft
    from fewbits.progress import Progress
    from fewbits.targets.gguf.tensors import FileTensor


@dataclass(frozen=True)
class Part:
    tensors: tuple[FileTensor, ...]
    number: int = 0
    count: int = 0  # of all parts; 0: the file is not split

    def name(self, stem: str) -> str:
        """By this pattern llama.cpp finds the other parts."""
        return f"{stem}-{self.number + 1:05}-of-{self.count:05}.gguf"


def split(tensors: list[FileTensor], limit: int) -> list[Part]:
    """In order, each part with as many bytes of tensors as the limit allows; a tensor that is larger is alone."""
    groups: list[list[FileTensor]] = [[]]
    held = 0
    for tensor in tensors:
        if groups[-1] and held + padded(tensor.nbytes) > limit:
            groups.append([])
            held = 0
        groups[-1].append(tensor)
        held += padded(tensor.nbytes)
    return [Part(tuple(group), number, len(groups)) for number, group in enumerate(groups)]


def write(artifact: Artifact | Draft, files: list[tuple[Path, Part]], progress: Progress[Any]) -> None:
    tensors = [tensor for _, part in files for tensor in part.tensors]
    steps = iter(progress(tensors, len(tensors), "writing gguf"))
    for path, part in files:
        with _writer(path, artifact) as writer:
            _write_header(writer, artifact, part, tensors)
            for _ in part.tensors:
                writer.write_tensor_data(_Pieces(next(steps)))
            writer.flush()
    next(steps, None)  # so that the progress bar ends


@dataclass(frozen=True)
class _Pieces:
    """Stands for the array that gguf's writer asks for, whose size it compares with the header before it calls `tofile`.

    numpy's `tofile` is not used: on a full disk it loses an array of less than 4 KB without an error."""

    tensor: FileTensor

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes

    def tofile(self, file: Any) -> None:
        written = 0
        for piece in self.tensor.load():
            file.write(np.ascontiguousarray(piece.numpy()).reshape(-1).view(np.uint8).data)
            written += piece.nbytes
        assert written == self.nbytes, f"{self.tensor.name} has {written} bytes, its header says {self.nbytes}"


def header_bytes(draft: Draft, parts: list[Part], scratch: Path) -> int:
    """Of all files together, with the padding before the tensors. They are written to `scratch` to find out."""
    tensors = [tensor for part in parts for tensor in part.tensors]
    total = 0
    for part in parts:
        path = scratch / f"{part.number}.gguf"
        with _writer(path, draft) as writer:
            _write_header(writer, draft, part, tensors)
        total += padded(path.stat().st_size)
    return total


def padded(nbytes: int) -> int:
    import gguf

    return int(gguf.GGUFWriter.ggml_pad(nbytes, gguf.GGUF_DEFAULT_ALIGNMENT))


def _write_header(writer: Any, artifact: Artifact | Draft, part: Part, all_tensors: list[FileTensor]) -> None:
    if part.number == 0:
        add_metadata(writer, artifact, all_tensors)
    if part.count:
        writer.add_uint16("split.no", part.number)
        writer.add_uint16("split.count", part.count)
        writer.add_int32("split.tensors.count", len(all_tensors))
    for tensor in part.tensors:
        writer.add_tensor_info(tensor.name, tensor.shape, None, tensor.nbytes, types.BY_NAME[tensor.type].number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()


@contextmanager
def _writer(path: Path, artifact: Artifact | Draft) -> Iterator[Any]:
    copied = artifact.layout is not None  # the name of the architecture too, with all other metadata
    writer = metadata.open_writer(path, "" if copied else architectures.of(artifact.config).gguf)
    try:
        yield writer
    except BaseException:
        with suppress(OSError):  # buffered bytes that no longer fit must not hide the error that is on its way
            writer.close()
        raise
    writer.close()
