"""Hostile model folders: safetensors, their index, code, weights and tokenizers."""

from __future__ import annotations

import json
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from benign import Benign
from cases import case
from safetensors.torch import load_file, save_file

INDEX = "model.safetensors.index.json"


def copied(folder: Path, benign: Benign) -> Path:
    shutil.copytree(benign.model, folder, dirs_exist_ok=True)
    return folder


def safetensors(folder: Path, head: bytes, body: bytes = b"", length: int | None = None) -> None:
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(head) if length is None else length) + head + body)


def one(dtype: str, shape: list[int], start: int, end: int) -> bytes:
    return json.dumps({"t": {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}}).encode()


def edited(path: Path, change: Callable[[Any], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def configured(folder: Path, benign: Benign, **settings: Any) -> None:
    edited(copied(folder, benign) / "config.json", lambda config: config.update(settings))


def indexed(folder: Path, benign: Benign, shard: str) -> None:
    """The weights under another name, which the index leads to."""
    copied(folder, benign)
    names = load_file(folder / "model.safetensors").keys()
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, shard)}))


@case("folder")
def header_beyond_the_file(folder: Path, benign: Benign) -> None:
    """a safetensors header of 2^63 bytes in a file of 20"""
    safetensors(copied(folder, benign), b"{}", bytes(10), length=1 << 63)


@case("folder")
def header_of_a_gigabyte(folder: Path, benign: Benign) -> None:
    """a safetensors header that says 1 GB, to be allocated before it is read"""
    safetensors(copied(folder, benign), b"{}", bytes(10), length=1 << 30)


@case("folder")
def deep_header(folder: Path, benign: Benign) -> None:
    """a safetensors header of 100,000 brackets, against a parser that recurses"""
    safetensors(copied(folder, benign), b'{"a":' + b"[" * 100_000)


@case("folder")
def overlapping_offsets(folder: Path, benign: Benign) -> None:
    """two tensors over the same bytes"""
    rows = {name: {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]} for name in "ab"}
    safetensors(copied(folder, benign), json.dumps(rows).encode(), bytes(16))


@case("folder")
def duplicate_names(folder: Path, benign: Benign) -> None:
    """the same name twice in a header: two readers may see two files"""
    row = b'"t":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}'
    safetensors(copied(folder, benign), b"{" + row + b"," + row + b"}", bytes(16))


@case("folder")
def negative_shape(folder: Path, benign: Benign) -> None:
    """a tensor of -4 values"""
    safetensors(copied(folder, benign), one("F32", [-4], 0, 16), bytes(16))


@case("folder")
def shape_beyond_64_bits(folder: Path, benign: Benign) -> None:
    """a shape whose product goes around 2^64"""
    safetensors(copied(folder, benign), one("F32", [1 << 32, 1 << 32], 0, 16), bytes(16))


@case("folder")
def nothing_of_vast_shape(folder: Path, benign: Benign) -> None:
    """tensors of no bytes whose other sides go beyond 2^64"""
    safetensors(copied(folder, benign), one("F32", [0, 1 << 63, 1 << 63], 0, 0))


@case("folder")
def many_dimensions(folder: Path, benign: Benign) -> None:
    """a value in 100,000 dimensions"""
    safetensors(copied(folder, benign), one("F32", [1] * 100_000, 0, 4), bytes(4))


@case("folder", passes=("inspect",))
def one_value_for_a_norm(folder: Path, benign: Benign) -> None:
    """a norm of one value where the config asks for 64: it would be copied to all of them"""
    tensors = load_file(copied(folder, benign) / "model.safetensors")
    save_file(tensors | {"model.norm.weight": torch.ones(1)}, folder / "model.safetensors")


@case("folder")
def type_that_lies(folder: Path, benign: Benign) -> None:
    """four float32 in the bytes of one"""
    safetensors(copied(folder, benign), one("F32", [4], 0, 4), bytes(4))


@case("folder")
def type_unknown(folder: Path, benign: Benign) -> None:
    """a type that nobody knows"""
    safetensors(copied(folder, benign), one("F31", [4], 0, 16), bytes(16))


@case("folder")
def integers_for_weights(folder: Path, benign: Benign) -> None:
    """weights that are integers"""
    tensors = load_file(copied(folder, benign) / "model.safetensors")
    save_file({name: tensor.to(torch.int64) for name, tensor in tensors.items()}, folder / "model.safetensors")


@case("folder")
def truncated_weights(folder: Path, benign: Benign) -> None:
    """weights that end in the middle"""
    path = copied(folder, benign) / "model.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@case("folder")
def shard_up_the_tree(folder: Path, benign: Benign) -> None:
    """an index that leads up and out to weights that are there"""
    indexed(folder, benign, "../outside.safetensors")
    shutil.move(folder / "model.safetensors", folder.parent / "outside.safetensors")


@case("folder")
def shard_at_the_root(folder: Path, benign: Benign) -> None:
    """an index with an absolute path to weights that are there"""
    indexed(folder, benign, str(folder.parent / "elsewhere.safetensors"))
    shutil.move(folder / "model.safetensors", folder.parent / "elsewhere.safetensors")


@case("folder")
def shard_through_a_link(folder: Path, benign: Benign) -> None:
    """an index with an honest name that is a link out of the folder"""
    indexed(folder, benign, "linked.safetensors")
    shutil.move(folder / "model.safetensors", folder.parent / "linked-to.safetensors")
    (folder / "linked.safetensors").symlink_to(folder.parent / "linked-to.safetensors")


@case("folder")
def weights_through_a_link(folder: Path, benign: Benign) -> None:
    """no index, and the one safetensors file is a link out of the folder"""
    copied(folder, benign)
    shutil.move(folder / "model.safetensors", folder.parent / "plain-linked-to.safetensors")
    (folder / "model.safetensors").symlink_to(folder.parent / "plain-linked-to.safetensors")


@case("folder", passes=("inspect", "calibrate", "verify against", "verify"))
def secret_through_a_link(folder: Path, benign: Benign) -> None:
    """a file beside the weights that is a link to somebody's secrets: copied along, it would be published with the result"""
    secret = folder.parent / "secret.txt"
    secret.write_text('{"password": "1234"}')
    (copied(folder, benign) / "special_tokens_map.json").symlink_to(secret)


@case("folder")
def one_name_in_two_shards(folder: Path, benign: Benign) -> None:
    """a tensor that two shards hold: transformers loads the one, whoever asks the index the other"""
    tensors = load_file(copied(folder, benign) / "model.safetensors")
    (folder / "model.safetensors").unlink()
    twice = "model.layers.0.mlp.down_proj.weight"
    save_file(tensors, folder / "a.safetensors")
    save_file({twice: torch.full_like(tensors[twice], 7.0)}, folder / "b.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "a.safetensors") | {twice: "b.safetensors"}}))


@case("folder")
def weights_in_two_forms(folder: Path, benign: Benign) -> None:
    """model.safetensors, which transformers loads, and an index that leads to other weights"""
    tensors = load_file(copied(folder, benign) / "model.safetensors")
    save_file(tensors, folder / "other.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "other.safetensors")}))


@case("folder")
def shard_with_a_zero_byte(folder: Path, benign: Benign) -> None:
    """a name that ends early for whoever reads it in C"""
    indexed(folder, benign, "model.safetensors\0.txt")


@case("folder")
def shard_with_a_long_name(folder: Path, benign: Benign) -> None:
    """a name of 5,000 letters, which no file can have"""
    indexed(folder, benign, "a" * 5000)


@case("folder")
def shard_with_half_a_letter(folder: Path, benign: Benign) -> None:
    """a name with half of a letter in it, which cannot be written down"""
    indexed(folder, benign, "model-\ud800.safetensors")


@case("folder")
def shard_that_is_a_device(folder: Path, benign: Benign) -> None:
    """weights in a pipe that nobody writes to: opening it waits for ever"""
    import os

    copied(folder, benign)
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")


@case("folder")
def index_without_a_map(folder: Path, benign: Benign) -> None:
    """an index that is a list"""
    (copied(folder, benign) / INDEX).write_text("[1, 2, 3]")


@case("folder")
def deep_index(folder: Path, benign: Benign) -> None:
    """an index of 100,000 brackets"""
    (copied(folder, benign) / INDEX).write_text("[" * 100_000)


@case("folder", passes=("inspect",))
def remote_code(folder: Path, benign: Benign) -> None:
    """an architecture of its own, whose Python file leaves a trace when it is imported"""
    configured(folder, benign, model_type="evil", auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"})
    (folder / "evil.py").write_text(f"open({str(folder.parent / 'remote-code-ran')!r}, 'w')\n")


@case("folder", passes=("inspect", "quantize", "calibrate", "verify against", "verify"))
def remote_code_of_a_known_kind(folder: Path, benign: Benign) -> None:
    """a known architecture with code of its own beside it: it is opened, and the code does not run"""
    ours = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model", "AutoTokenizer": ["evil.Tokenizer", None]}
    configured(folder, benign, auto_map=ours)
    edited(folder / "tokenizer_config.json", lambda config: config.update(auto_map=ours))
    (folder / "evil.py").write_text(f"open({str(folder.parent / 'remote-code-ran')!r}, 'w')\n")


@case("folder")
def pickled_weights(folder: Path, benign: Benign) -> None:
    """pytorch_model.bin, which runs a program when it is unpickled"""
    copied(folder, benign)
    (folder / "model.safetensors").unlink()

    class Program:
        def __reduce__(self) -> tuple[Any, ...]:
            return open, (str(folder.parent / "pickle-ran"), "w")

    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Program()))


@case("folder", passes=("inspect",), fails=("verify",))
def weights_with_nan(folder: Path, benign: Benign) -> None:
    """one NaN in one weight"""
    tensors = load_file(copied(folder, benign) / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")
    save_file(tensors, folder / "model.safetensors")


@case("folder", passes=("inspect",), fails=("verify",))
def norms_with_infinity(folder: Path, benign: Benign) -> None:
    """one infinity in a tensor that is not quantized"""
    tensors = load_file(copied(folder, benign) / "model.safetensors")
    tensors["model.norm.weight"][7] = float("inf")
    save_file(tensors, folder / "model.safetensors")


@case("folder", passes=("inspect",), fails=("verify",))
def absurd_weights(folder: Path, benign: Benign) -> None:
    """weights of 1e38: finite, and every product of them is not"""
    tensors = load_file(copied(folder, benign) / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][:] = 3e38
    save_file(tensors, folder / "model.safetensors")


@case("folder", passes=("inspect",), fails=("verify",))
def doubles_beyond_single(folder: Path, benign: Benign) -> None:
    """a float64 of 1e300, which is infinite in float32"""
    tensors = {name: tensor.double() for name, tensor in load_file(copied(folder, benign) / "model.safetensors").items()}
    tensors["model.layers.0.mlp.up_proj.weight"][0, 0] = 1e300
    save_file(tensors, folder / "model.safetensors")


@case("tokenizer")
def deep_tokenizer(folder: Path, benign: Benign) -> None:
    """a tokenizer.json of 100,000 brackets"""
    (copied(folder, benign) / "tokenizer.json").write_text('{"version": "1.0", "model": ' + "[" * 100_000)


@case("tokenizer")
def tokenizer_of_nothing(folder: Path, benign: Benign) -> None:
    """a tokenizer.json without a vocabulary"""
    (copied(folder, benign) / "tokenizer.json").write_text('{"version": "1.0", "model": {"type": "BPE"}}')


@case("tokenizer")
def tokens_beyond_the_embedding(folder: Path, benign: Benign) -> None:
    """ids of 4 billion, each to look up a row that is not there"""

    def push(content: Any) -> None:
        content["model"]["vocab"] = {text: i if i < 2 else i + 4_000_000_000 for text, i in content["model"]["vocab"].items()}

    edited(copied(folder, benign) / "tokenizer.json", push)


@case("tokenizer")
def negative_tokens(folder: Path, benign: Benign) -> None:
    """ids below zero"""
    edited(copied(folder, benign) / "tokenizer.json", lambda content: content["model"]["vocab"].update(a=-7))


@case("tokenizer")
def merges_of_missing_tokens(folder: Path, benign: Benign) -> None:
    """merges of tokens that there are not: a panic in Rust, if it is not caught"""
    edited(copied(folder, benign) / "tokenizer.json", lambda content: content["model"].update(merges=[["zz", "qq"]]))


@case("tokenizer")
def expression_that_never_ends(folder: Path, benign: Benign) -> None:
    """a regular expression that takes exponential time on a run of letters"""
    step = {"type": "Split", "pattern": {"Regex": r"(\w+\w+)+$\d"}, "behavior": "Isolated", "invert": False}
    edited(copied(folder, benign) / "tokenizer.json", lambda content: content.update(pre_tokenizer=step))


@case("tokenizer")
def pickled_tokenizer(folder: Path, benign: Benign) -> None:
    """a tokenizer class whose files are pickles"""
    copied(folder, benign)
    (folder / "tokenizer.json").unlink()
    edited(folder / "tokenizer_config.json", lambda config: config.update(tokenizer_class="TransfoXLTokenizer"))
    (folder / "vocab.pkl").write_bytes(pickle.dumps({"a": 1}))
