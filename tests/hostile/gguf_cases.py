"""Hostile GGUF files. Most are a few dozen bytes: a header that lies."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from benign import Benign
from cases import case

U32, STRING, ARRAY, U64, F32 = 4, 8, 9, 10, 6


def text(content: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(content) if length is None else length) + content


def header(tensors: int = 0, keys: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys)


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name.encode()) + struct.pack("<I", kind) + value


def info(name: str, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return text(name.encode()) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def saved(folder: Path, content: bytes) -> Path:
    (folder / "model.gguf").write_bytes(content)
    return folder / "model.gguf"


def rewritten(folder: Path, benign: Benign, changes: dict[str, tuple[int, Any]], dropped: tuple[str, ...] = ()) -> Path:
    """The honest file with other metadata. A value is its GGUF type and itself; of an array, a list under the type of its items."""
    reader = gguf.GGUFReader(benign.gguf)
    keys: dict[str, bytes] = {}
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in dropped:
            keys[name] = b"".join(part.tobytes() for part in field.parts)
    for name, (kind, value) in changes.items():
        keys[name] = key(name, ARRAY if isinstance(value, list) else kind, packed(kind, value))
    body, at = b"", 0
    infos = []
    for tensor in reader.tensors:
        data = tensor.data.tobytes()
        infos.append(info(tensor.name, tuple(map(int, tensor.shape)), int(tensor.tensor_type), at))
        body += data + bytes(-len(data) % 32)
        at = len(body)
    head = header(len(infos), len(keys)) + b"".join(keys.values()) + b"".join(infos)
    return saved(folder, head + bytes(-len(head) % 32) + body)


def packed(kind: int, value: Any) -> bytes:
    letter = {U32: "I", U64: "Q", F32: "f", 5: "i"}.get(kind)
    if isinstance(value, list):
        items = b"".join(text(v.encode()) if kind == STRING else struct.pack(f"<{letter}", v) for v in value)
        return struct.pack("<IQ", kind, len(value)) + items
    return text(value.encode()) if kind == STRING else struct.pack(f"<{letter}", value)


@case("gguf")
def empty(folder: Path, _: Benign) -> Path:
    """a file without a byte in it"""
    return saved(folder, b"")


@case("gguf")
def cve_2025_53630(folder: Path, _: Benign) -> Path:
    """CVE-2025-53630: sizes of tensors whose sum goes around 2^64, so that all seem to fit"""
    big = (1 << 62) - 32
    infos = b"".join(info(f"t{i}", (big,), 24, i * big % (1 << 64)) for i in range(4))  # int8
    return saved(folder, (header(4) + infos).ljust(512, b"\0"))


@case("gguf")
def cve_2026_27940(folder: Path, _: Benign) -> Path:
    """CVE-2026-27940, the bypass: each size is sound, the sum goes around 2^64 only once padding is added"""
    infos = info("a", ((1 << 64) - 64,), 24, 0) + info("b", (96,), 24, (1 << 64) - 32)
    return saved(folder, (header(2) + infos).ljust(512, b"\0"))


@case("gguf")
def forty_three_bytes(folder: Path, _: Benign) -> Path:
    """the hang of 43 bytes: one key whose array says 2^60 items and holds none"""
    content = header(0, 1) + text(b"kk") + struct.pack("<IIQ", ARRAY, STRING, 1 << 60)
    return saved(folder, content[:43].ljust(43, b"\0"))


@case("gguf")
def endless_array_of_bytes(folder: Path, _: Benign) -> Path:
    """an array of 2^63 bytes, to be allocated before it is read"""
    return saved(folder, header(0, 1) + text(b"k") + struct.pack("<IIQ", ARRAY, 0, 1 << 63) + bytes(64))


@case("gguf")
def deep_arrays(folder: Path, _: Benign) -> Path:
    """arrays in arrays, a hundred thousand deep, against a reader that recurses"""
    nested = struct.pack("<IQ", ARRAY, 1) * 100_000
    return saved(folder, header(0, 1) + text(b"k") + struct.pack("<I", ARRAY) + nested + struct.pack("<IQ", U32, 0))


@case("gguf")
def long_string(folder: Path, _: Benign) -> Path:
    """a text of 2^63 bytes in a file of 60"""
    return saved(folder, header(0, 1) + text(b"k") + struct.pack("<I", STRING) + text(b"v", 1 << 63).ljust(32))


@case("gguf")
def string_around_the_end(folder: Path, _: Benign) -> Path:
    """a text whose length, added to its place, goes around 2^64 back into the file"""
    return saved(folder, header(0, 1) + text(b"k") + struct.pack("<I", STRING) + text(b"v", (1 << 64) - 40).ljust(32))


@case("gguf")
def string_beyond_all_addresses(folder: Path, _: Benign) -> Path:
    """an array of texts, the first of 2^63 bytes: where the second begins is no address (found by atheris)"""
    lengths = struct.pack("<QQ", (1 << 63) - 1, 1)
    return saved(folder, header(0, 1) + text(b"k") + struct.pack("<IIQ", ARRAY, STRING, 2) + lengths)


@case("gguf")
def zero_alignment(folder: Path, _: Benign) -> Path:
    """an alignment of 0, to divide by"""
    return saved(folder, header(1, 1) + key("general.alignment", U32, struct.pack("<I", 0)) + info("t", (8,)) + bytes(64))


@case("gguf")
def alignment_that_is_no_number(folder: Path, _: Benign) -> Path:
    """an alignment that is an array"""
    return saved(folder, header(1, 1) + key("general.alignment", ARRAY, struct.pack("<IQI", U32, 1, 32)) + info("t", (8,)) + bytes(64))


@case("gguf")
def vast_alignment(folder: Path, _: Benign) -> Path:
    """an alignment of 2^31: tensors would begin 2 GB behind the header"""
    return saved(folder, header(1, 1) + key("general.alignment", U32, struct.pack("<I", 1 << 31)) + info("t", (8,)) + bytes(64))


@case("gguf")
def overlapping_tensors(folder: Path, _: Benign) -> Path:
    """ten thousand tensors that are all the same megabyte: 10 GB to whoever reads them one by one"""
    infos = b"".join(info(f"t{i}", (1 << 18,)) for i in range(10_000))
    head = header(10_000) + infos
    return saved(folder, head + bytes(-len(head) % 32) + bytes(1 << 20))


@case("gguf")
def tensor_beyond_the_end(folder: Path, _: Benign) -> Path:
    """a tensor of 4 GB in a file of 200 bytes"""
    return saved(folder, (header(1) + info("t", (1 << 30,))).ljust(200, b"\0"))


@case("gguf")
def offset_beyond_the_end(folder: Path, _: Benign) -> Path:
    """a tensor of 32 bytes at offset 2^63"""
    return saved(folder, (header(1) + info("t", (8,), 0, 1 << 63)).ljust(200, b"\0"))


@case("gguf")
def offset_between_the_lines(folder: Path, _: Benign) -> Path:
    """a tensor of floats at an odd byte, where a reader by pointers may not read"""
    return saved(folder, (header(1) + info("t", (8,), 0, 33)).ljust(300, b"\0"))


@case("gguf")
def duplicate_tensors(folder: Path, _: Benign) -> Path:
    """two tensors of one name: what one reader checks is not what another loads"""
    return saved(folder, (header(2) + info("t", (8,)) + info("t", (8,), 0, 32)).ljust(300, b"\0"))


@case("gguf")
def duplicate_keys(folder: Path, _: Benign) -> Path:
    """two keys of one name"""
    return saved(folder, header(0, 2) + 2 * key("k", U32, struct.pack("<I", 1)))


@case("gguf")
def no_columns(folder: Path, _: Benign) -> Path:
    """a dimension of 0 beside one of 2^63: their product is 0 and fits everywhere"""
    return saved(folder, (header(1) + info("t", (0, 1 << 63))).ljust(200, b"\0"))


@case("gguf")
def many_dimensions(folder: Path, _: Benign) -> Path:
    """a tensor of 2^31 dimensions"""
    return saved(folder, header(1) + text(b"t") + struct.pack("<I", 1 << 31) + bytes(200))


@case("gguf")
def product_of_dimensions(folder: Path, _: Benign) -> Path:
    """dimensions whose product is 2^64, which is 0 in 64 bits"""
    return saved(folder, (header(1) + info("t", (1 << 32, 1 << 32))).ljust(200, b"\0"))


@case("gguf")
def unknown_tensor_type(folder: Path, _: Benign) -> Path:
    """a tensor of a type that nobody knows"""
    return saved(folder, (header(1) + info("t", (32,), 4242)).ljust(300, b"\0"))


@case("gguf")
def removed_tensor_type(folder: Path, _: Benign) -> Path:
    """a tensor of a type that was taken out of ggml (Q4_2), a hole in every table of sizes"""
    return saved(folder, (header(1) + info("t", (32,), 4)).ljust(300, b"\0"))


@case("gguf")
def unknown_key_type(folder: Path, _: Benign) -> Path:
    """a key of a type that nobody knows"""
    return saved(folder, header(0, 1) + key("k", 99, bytes(32)))


@case("gguf")
def endless_tensors(folder: Path, _: Benign) -> Path:
    """2^63 tensors, to be counted or made room for"""
    return saved(folder, header(1 << 63).ljust(200, b"\0"))


@case("gguf")
def endless_keys(folder: Path, _: Benign) -> Path:
    """2^63 keys"""
    return saved(folder, header(0, 1 << 63).ljust(200, b"\0"))


@case("gguf")
def many_empty_keys(folder: Path, _: Benign) -> Path:
    """a megabyte of keys without names, all alike"""
    return saved(folder, header(0, 80_000) + 80_000 * key("", 0, b"\0"))


@case("gguf")
def name_that_is_no_text(folder: Path, _: Benign) -> Path:
    """a name that is not UTF-8"""
    return saved(folder, header(0, 1) + text(b"\xff\xfe") + struct.pack("<II", U32, 1))


@case("gguf")
def value_that_is_no_text(folder: Path, _: Benign) -> Path:
    """a value that is not UTF-8 under a sound name (found by atheris)"""
    return saved(folder, header(0, 1) + key("k", STRING, text(b"\xe8")))


@case("gguf")
def old_version(folder: Path, _: Benign) -> Path:
    """a version that lays out counts otherwise"""
    return saved(folder, header(1, 1, version=1) + bytes(64))


@case("gguf", passes=("inspect",))
def many_blocks(folder: Path, benign: Benign) -> Path:
    """metadata that says 4 billion blocks: a loop of days, before the first tensor is missed"""
    return rewritten(folder, benign, {"llama.block_count": (U32, (1 << 32) - 1)})


@case("gguf", passes=("inspect",))
def vast_width(folder: Path, benign: Benign) -> Path:
    """metadata that says 4 billion columns: a module of 2^64 values"""
    wide = (U32, (1 << 32) - 1)
    return rewritten(folder, benign, {"llama.embedding_length": wide, "llama.feed_forward_length": wide})


@case("gguf", passes=("inspect",))
def no_heads(folder: Path, benign: Benign) -> Path:
    """no attention heads, to divide by"""
    return rewritten(folder, benign, {"llama.attention.head_count": (U32, 0)})


@case("gguf", passes=("inspect",))
def text_for_a_number(folder: Path, benign: Benign) -> Path:
    """a text where a number is expected"""
    return rewritten(folder, benign, {"llama.embedding_length": (STRING, "many")})


@case("gguf", passes=("inspect",))
def array_for_a_number(folder: Path, benign: Benign) -> Path:
    """an array where a number is expected"""
    return rewritten(folder, benign, {"llama.block_count": (U32, [2, 2, 2])})


@case("gguf", passes=("inspect",), fails=("verify",))
def not_finite_metadata(folder: Path, benign: Benign) -> Path:
    """a base of rotation that is NaN"""
    return rewritten(folder, benign, {"llama.rope.freq_base": (F32, float("nan"))})


@case("gguf", passes=("inspect",))
def unknown_architecture(folder: Path, benign: Benign) -> Path:
    """an architecture that nobody knows, with a name that is a path"""
    return rewritten(folder, benign, {"general.architecture": (STRING, "../../etc/passwd")})


@case("gguf", passes=("inspect",))
def few_tokens(folder: Path, benign: Benign) -> Path:
    """fewer tokens than the embedding has rows"""
    return rewritten(folder, benign, {"tokenizer.ggml.tokens": (STRING, ["a", "b"])})


@case("gguf", passes=("inspect",))
def tokens_that_are_numbers(folder: Path, benign: Benign) -> Path:
    """a vocabulary of numbers"""
    return rewritten(folder, benign, {"tokenizer.ggml.tokens": (U32, list(range(320)))})


@case("gguf", passes=("inspect", "verify"))
def token_outside_the_vocabulary(folder: Path, benign: Benign) -> Path:
    """an end of text that is token 4 billion"""
    return rewritten(folder, benign, {"tokenizer.ggml.eos_token_id": (U32, (1 << 32) - 1)})


@case("gguf", passes=("inspect", "verify"))
def merges_of_nothing(folder: Path, benign: Benign) -> Path:
    """merges of tokens that there are not"""
    return rewritten(folder, benign, {"tokenizer.ggml.merges": (STRING, ["zz qq", "noblank"])})


@case("gguf", passes=("inspect",))
def few_token_types(folder: Path, benign: Benign) -> Path:
    """token types for a part of the vocabulary: llama.cpp reads on behind their end"""
    return rewritten(folder, benign, {"tokenizer.ggml.token_type": (5, [1, 1, 1])})


@case("gguf", passes=("inspect",), fails=("verify",))
def weights_that_are_not_finite(folder: Path, benign: Benign) -> Path:
    """scales that are infinite in an otherwise sound file"""
    reader = gguf.GGUFReader(benign.gguf)
    content = bytearray(benign.gguf.read_bytes())
    tensor = next(t for t in reader.tensors if t.name == "blk.1.ffn_up.weight")
    content[tensor.data_offset : tensor.data_offset + 2] = np.array([np.inf], np.float16).tobytes()
    return saved(folder, bytes(content))


@case("gguf")
def parts_without_end(folder: Path, benign: Benign) -> Path:
    """one part of 65535"""
    path = rewritten(folder, benign, {"split.count": (U32, 65535), "split.no": (U32, 0), "split.tensors.count": (U32, 1)})
    return path.rename(folder / "model-00001-of-65535.gguf")


@case("gguf")
def infinite_parts(folder: Path, benign: Benign) -> Path:
    """a number of parts that is infinite"""
    return rewritten(folder, benign, {"split.count": (F32, float("inf"))})


@case("gguf")
def number_of_parts_is_no_number(folder: Path, benign: Benign) -> Path:
    """a number of parts that is a list"""
    return rewritten(folder, benign, {"split.count": (U32, [1, 2])})


@case("gguf")
def truncated(folder: Path, benign: Benign) -> Path:
    """an honest file that ends in the middle"""
    content = benign.gguf.read_bytes()
    return saved(folder, content[: len(content) // 2])


@case("importance")
def endless_entries(folder: Path, _: Benign) -> Path:
    """an importance matrix (legacy) of a million entries in 8 bytes"""
    (folder / "imatrix.dat").write_bytes(struct.pack("<ii", 1 << 19, -5))
    return folder / "imatrix.dat"


@case("importance")
def long_entry(folder: Path, _: Benign) -> Path:
    """an importance matrix (legacy) with an entry of 2^31 values"""
    (folder / "imatrix.dat").write_bytes(struct.pack("<ii", 1, 1) + b"n" + struct.pack("<ii", 1, 2**31 - 1) + bytes(64))
    return folder / "imatrix.dat"


@case("importance")
def negative_importance(folder: Path, _: Benign) -> Path:
    """mean squares below zero: their root is NaN"""
    return importance(folder, np.full(64, -1.0, np.float32))


@case("importance")
def importance_that_is_not_finite(folder: Path, _: Benign) -> Path:
    """mean squares that are NaN"""
    return importance(folder, np.full(64, np.nan, np.float32))


def importance(folder: Path, values: Any) -> Path:
    name = b"blk.0.attn_q.weight"
    content = struct.pack("<ii", 1, len(name)) + name + struct.pack("<ii", 1, len(values)) + values.astype("<f4").tobytes()
    (folder / "imatrix.dat").write_bytes(content + struct.pack("<ii", 1, 0))
    return folder / "imatrix.dat"
