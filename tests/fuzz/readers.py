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

from fewbits import planning
from fewbits.calibration.text import documents
from fewbits.errors import FewbitsError
from fewbits.formats.runtime import activations
from fewbits.inspection import contents
from fewbits.model import limits
from fewbits.model.checkpoints import folder
from fewbits.model.gguf import checkpoint, header
from fewbits.model.onnx import graph
from fewbits.model.weights import Weight
from fewbits.sensitivity import table
from fewbits.store import untrusted
from fewbits.store.tensor_file import SafetensorError

WEIGHTS = (Weight("a", (64, 64), "mlp", "fp16"), Weight("b", (64, 32), "attention", "bf16"))


def _gguf(path: Path) -> None:
    opened = checkpoint.GgufFile(path)
    assert opened.fields is not None
    for tensor in opened._tensors.values():
        assert tensor.data.nbytes == tensor.n_bytes <= path.stat().st_size


def _inspected(path: Path) -> None:
    contents._gguf(path)


def _header(path: Path) -> None:
    with suppress(ValueError, struct.error):  # what gguf_file makes errors of ours of
        header.read(path)


def _safetensors(path: Path) -> None:
    opened = folder.open_shard(path)
    for name in opened.keys():  # noqa: SIM118
        with suppress(SafetensorError):  # a type that torch has not: named when the model is opened
            opened.tensor(name).flatten().view(torch.uint8).sum()


def _config(path: Path) -> None:
    content = untrusted.read_json(path, "fetch it again")
    if isinstance(content, dict):
        limits.check(content, 10, path)


def _plan(path: Path) -> None:
    planning.read(untrusted.read_text(path, "fetch it again"), WEIGHTS)


def _activation(path: Path) -> None:
    activations.from_dict(untrusted.read_json(path, "fetch it again"))


def _onnx(path: Path) -> None:
    opened = graph.OnnxModel(path)
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
