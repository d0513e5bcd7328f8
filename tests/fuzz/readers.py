"""The readers of untrusted files, each as a function of bytes: they read them, or say why not by an error of ours with a hint.

The first byte of an input chooses the reader, so that one process serves all of them.
"""

from __future__ import annotations

import struct
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from fewbits import activations, inspection, planning
from fewbits.calibration import documents
from fewbits.checkpoints import folder, gguf_file, gguf_header, limits
from fewbits.errors import FewbitsError
from fewbits.model import Weight
from fewbits.onnx_files import reading
from fewbits.sensitivity import table
from fewbits.tensor_files import SafetensorError

WEIGHTS = (Weight("a", (64, 64), "mlp", "fp16"), Weight("b", (64, 32), "attention", "bf16"))


def _gguf(path: Path) -> None:
    opened = gguf_file.GgufFile(path)
    assert opened.fields is not None
    for tensor in opened._tensors.values():
        assert tensor.data.nbytes == tensor.n_bytes <= path.stat().st_size


def _inspected(path: Path) -> None:
    inspection._gguf(path)


def _header(path: Path) -> None:
    with suppress(ValueError, struct.error):  # what gguf_file makes errors of ours of
        gguf_header.read(path)


def _safetensors(path: Path) -> None:
    opened = folder.open_shard(path)
    for name in opened.keys():  # noqa: SIM118
        with suppress(SafetensorError):  # a type that torch has not: named when the model is opened
            opened.tensor(name).flatten().view(torch.uint8).sum()


def _config(path: Path) -> None:
    content = folder.read_json(path, "fetch it again")
    if isinstance(content, dict):
        limits.check(content, 10, path)


def _plan(path: Path) -> None:
    planning.read(folder.read_text(path, "fetch it again"), WEIGHTS)


def _activation(path: Path) -> None:
    activations.from_dict(folder.read_json(path, "fetch it again"))


def _onnx(path: Path) -> None:
    opened = reading.OnnxModel(path)
    for weight in opened.weights:
        opened.load(weight)


def _documents(suffix: str) -> Callable[[Path], None]:
    def read(path: Path) -> None:
        named = path.with_name(f"text{suffix}")
        path.replace(named)
        for document in documents.documents([named], None):
            document.text.encode()

    return read


READERS: tuple[Callable[[Path], Any], ...] = (
    _gguf, _header, _safetensors, _config, _plan, _activation, table.read, _onnx,
    _documents(".txt"), _documents(".jsonl"), _documents(".json"), _documents(".txt.gz"), _inspected,
)  # fmt: skip


def scratch() -> tempfile.TemporaryDirectory[str]:
    """For the files that are read: in memory, where there is such a place."""
    fast = Path("/dev/shm")
    return tempfile.TemporaryDirectory(prefix="fewbits-fuzz-", dir=fast if fast.is_dir() else None)


def reader(folder: Path) -> Callable[[bytes], None]:
    """What a fuzzer calls: an exception that comes out of it is a find."""
    path = folder / "input"

    def one(content: bytes) -> None:
        if not content:
            return
        path.write_bytes(content[1:])
        try:
            READERS[content[0] % len(READERS)](path)
        except FewbitsError as failure:
            assert failure.hint, failure

    return one
