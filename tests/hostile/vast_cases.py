"""Files that are vast and take no room on a disk, because they are holes; and texts that are larger in memory than in their file."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import artifact_cases
import onnx
from artifact_cases import SHARD, resealed
from benign import Benign
from cases import case
from folder_cases import INDEX, copied, safetensors
from gguf_cases import ARRAY, STRING, header, info, key, saved, text

_GIGABYTE = 1 << 30


def hollow(path: Path, size: int = _GIGABYTE) -> Path:
    """As it is, followed by zeros that nobody wrote."""
    with path.open("ab") as file:
        file.truncate(size)
    return path


@case("folder")
def config_with_a_hole(folder: Path, benign: Benign) -> None:
    """a config.json of a gigabyte"""
    hollow(copied(folder, benign) / "config.json")


@case("folder")
def config_with_a_small_hole(folder: Path, benign: Benign) -> None:
    """a config.json of 60 MB, which an honest file might have"""
    hollow(copied(folder, benign) / "config.json", 60 << 20)


@case("folder")
def config_of_wide_letters(folder: Path, benign: Benign) -> None:
    """a config.json of 60 MB with one letter that makes Python give four bytes to each of them"""
    said = json.loads((copied(folder, benign) / "config.json").read_text()) | {"comment": "x" * (60 << 20) + "\N{GRINNING FACE}"}
    (folder / "config.json").write_text(json.dumps(said, ensure_ascii=False), encoding="utf-8")


@case("folder")
def index_with_a_hole(folder: Path, benign: Benign) -> None:
    """an index of a gigabyte"""
    copied(folder, benign)
    (folder / INDEX).write_text("{")
    hollow(folder / INDEX)


@case("folder")
def header_that_is_a_hole(folder: Path, benign: Benign) -> None:
    """a safetensors header of a gigabyte, all of which is there"""
    safetensors(copied(folder, benign), b"{", length=_GIGABYTE)
    hollow(folder / "model.safetensors", 2 * _GIGABYTE)


@case("tokenizer")
def tokenizer_with_a_hole(folder: Path, benign: Benign) -> None:
    """a tokenizer.json of a gigabyte"""
    hollow(copied(folder, benign) / "tokenizer.json")


@case("plan")
def plan_with_a_hole(folder: Path, benign: Benign) -> Path:
    """a plan.json of a gigabyte"""
    (folder / "plan.json").write_bytes(benign.plan.read_bytes())
    return hollow(folder / "plan.json")


@case("sensitivity")
def sensitivity_with_a_hole(folder: Path, benign: Benign) -> Path:
    """a table of sensitivities of 400 MB, which that of a large model may have"""
    (folder / "sensitivity.json").write_bytes(benign.sensitivity.read_bytes())
    return hollow(folder / "sensitivity.json", 400 << 20)


@case("gguf")
def texts_of_nothing(folder: Path, _: Benign) -> Path:
    """an array of 100 million texts without a letter, all of which are there: each is a step of a loop"""
    count = 100_000_000
    content = header(0, 1) + key("k", ARRAY, struct.pack("<IQ", STRING, count))
    return hollow(saved(folder, content), len(content) + 8 * count)


@case("gguf")
def texts_of_nothing_in_many_arrays(folder: Path, _: Benign) -> Path:
    """a hundred arrays of a million texts, each of which is sound"""
    content = header(0, 100)
    for number in range(3):
        content += key(f"k{number}", ARRAY, struct.pack("<IQ", STRING, 1_000_000) + bytes(8_000_000))
    return saved(folder, content)


@case("gguf")
def numbers_without_end(folder: Path, _: Benign) -> Path:
    """an array of 200 million bytes, all of which are there: a list of them takes 1.6 GB"""
    content = header(0, 1) + key("k", ARRAY, struct.pack("<IQ", 0, 200_000_000))
    return hollow(saved(folder, content), len(content) + 200_000_000)


@case("gguf")
def text_of_a_gigabyte(folder: Path, _: Benign) -> Path:
    """a text of a gigabyte that is there"""
    content = header(0, 1) + key("general.description", STRING, struct.pack("<Q", _GIGABYTE))
    return hollow(saved(folder, content), len(content) + _GIGABYTE)


@case("gguf")
def million_keys(folder: Path, _: Benign) -> Path:
    """a million keys, all of which are there"""
    return saved(folder, header(0, 1_000_000) + b"".join(key(f"{i:x}", 0, b"\0") for i in range(1_000_000)))


@case("gguf")
def million_tensors(folder: Path, _: Benign) -> Path:
    """a million tensors of no bytes"""
    return saved(folder, header(1_000_000) + b"".join(info(f"{i:x}", (0,)) for i in range(1_000_000)))


@case("gguf")
def name_of_a_megabyte(folder: Path, _: Benign) -> Path:
    """a tensor whose name has a million letters, in a message that says so"""
    return saved(folder, (header(1) + text(b"n" * 1_000_000) + struct.pack("<I2QIQ", 2, 32, 1 << 40, 0, 0)).ljust(1 << 21, b"\0"))


@case("folder")
def config_of_small_objects(folder: Path, benign: Benign) -> None:
    """a config.json of 7 MB that takes 200 in memory, twice: objects of one entry"""
    said = json.loads((copied(folder, benign) / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(said)[:-1] + ', "x": [' + ",".join(['{"":0}'] * 990_000) + "]}")


@case("tokenizer")
def tokenizer_of_small_objects(folder: Path, benign: Benign) -> None:
    """a tokenizer.json of 23 MB that takes 700 in memory"""
    said = (copied(folder, benign) / "tokenizer.json").read_text().rstrip()
    (folder / "tokenizer.json").write_text(said[:-1] + ', "x": [' + ",".join(['{"":0}'] * 3_300_000) + "]}")


@case("gguf")
def tokens_of_wide_letters(folder: Path, _: Benign) -> Path:
    """two million tokens of two letters, each of four bytes"""
    token = text("\N{GRINNING FACE}".encode() * 2)
    return saved(folder, header(0, 1) + key("k", ARRAY, struct.pack("<IQ", STRING, 1_990_000) + token * 1_990_000))


@case("artifact")
def header_of_empty_tensors(folder: Path, benign: Benign) -> None:
    """weights whose header has 1.4 million tensors of nothing, with the right hash"""
    path = artifact_cases.copied(folder, benign) / SHARD
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    empty = ",".join(f'"{i:x}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}' for i in range(1_400_000))
    head = b"{" + empty.encode() + b"," + content[9 : 8 + length]
    path.write_bytes(len(head).to_bytes(8, "little") + head + content[8 + length :])
    resealed(folder)


@case("artifact")
def file_that_is_a_hole(folder: Path, benign: Benign) -> None:
    """a file of 40 GB beside the weights, to be hashed before anything is known"""
    artifact_cases.copied(folder, benign)
    hollow((folder / "extra.bin"), 40 * _GIGABYTE)
    row = {"bytes": 40 * _GIGABYTE, "sha256": "0" * 64}
    artifact_cases.edited(folder / "fewbits.json", lambda about: about["files"].update({"extra.bin": row}))


@case("onnx")
def text_that_is_a_hole(folder: Path, benign: Benign) -> Path:
    """a graph with a comment of a gigabyte"""
    path = folder / "model.onnx"
    path.write_bytes(benign.graph.read_bytes() + bytes([onnx.ModelProto.DOC_STRING_FIELD_NUMBER << 3 | 2, 0x80, 0x80, 0x80, 0x80, 4]))
    return hollow(path, path.stat().st_size + _GIGABYTE)
