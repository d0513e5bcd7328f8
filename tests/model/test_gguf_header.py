"""Our reader of GGUF headers against gguf's own."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from fewbits.model.gguf import header

KINDS = [kind for kind in gguf.GGMLQuantizationType if kind.name not in {"Q8_1", "Q8_K"}]  # what a file may hold


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("header") / "odd.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(128)
    random = np.random.default_rng(0)
    for kind, letter in {
        "UINT8": "B",
        "INT8": "b",
        "UINT16": "H",
        "INT16": "h",
        "UINT32": "I",
        "INT32": "i",
        "UINT64": "Q",
        "INT64": "q",
    }.items():
        numbers = np.frombuffer(random.bytes(5 * struct.calcsize(letter)), np.dtype(letter)).tolist()
        writer.add_key_value(f"one.{kind}", numbers[0], gguf.GGUFValueType[kind])
        writer.add_key_value(f"many.{kind}", numbers, gguf.GGUFValueType.ARRAY, gguf.GGUFValueType[kind])
    for kind in ("FLOAT32", "FLOAT64"):
        writer.add_key_value(f"one.{kind}", 0.1, gguf.GGUFValueType[kind])
        writer.add_key_value(f"many.{kind}", [0.1, -3e8], gguf.GGUFValueType.ARRAY, gguf.GGUFValueType[kind])
    writer.add_bool("one.truth", True)
    writer.add_array("many.truths", [True, False, True])
    writer.add_string("one.text", "")
    writer.add_array("many.texts", ["", "ä", "a" * 300, "🙂"])
    for i, kind in enumerate(KINDS):
        block, size = gguf.GGML_QUANT_SIZES[kind]
        shape = [(2, 3, 4), (3, 4), (4,)][i % 3]
        stored = random.integers(0, 256, (*shape[:-1], shape[-1] * size), dtype=np.uint8)
        writer.add_tensor_info(kind.name, (*shape[:-1], shape[-1] * block), None, stored.nbytes, kind)
        writer.tensors[-1][kind.name].tensor = stored
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_every_key_is_read_as_gguf_reads_it(file: Path) -> None:
    theirs = {name: field.contents() for name, field in gguf.GGUFReader(file).fields.items() if not name.startswith("GGUF.")}
    ours = {name: field.contents() for name, field in header.read(file).fields.items()}
    assert ours == theirs and list(ours) == list(theirs)
    assert [type(value) for value in ours.values()] == [type(value) for value in theirs.values()]


def test_every_tensor_is_read_as_gguf_reads_it(file: Path) -> None:
    ours = header.read(file).tensors
    for one, other in zip(ours, gguf.GGUFReader(file).tensors, strict=True):
        assert (one.name, one.tensor_type.number, list(one.shape), one.n_bytes) == (
            other.name,
            other.tensor_type,
            other.shape.tolist(),
            other.n_bytes,
        )
        assert one.data.shape == other.data.shape and one.data.dtype == other.data.dtype, one.name
        assert one.data.tobytes() == other.data.tobytes()


HEAD = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"GGUF", "too short"),
        (b"GGML" + bytes(40), "magic"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(40), "other byte order"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(40), "version 1"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), None),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), None),
        (HEAD + struct.pack("<IQ", 8, 2**63) + b"text", "beyond its end"),
        (HEAD + struct.pack("<IIQ", 9, 4, 2**62), "beyond its end"),
        (HEAD + struct.pack("<IIQ", 9, 9, 1) + bytes(16), "unknown type 9"),
        (HEAD + struct.pack("<I", 77) + bytes(16), "unknown type 77"),
    ],
)
def test_a_damaged_header_is_an_error_at_once(content: bytes, reason: str | None, tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(content)
    with pytest.raises((ValueError, struct.error), match=reason):
        header.read(tmp_path / "x.gguf")
