"""Hostile artifacts: what is changed afterwards is found by its hash, so most of these have hashes that are right."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from benign import Benign
from cases import case
from safetensors.torch import load_file, save_file

SHARD = "weights-00001.safetensors"
WEIGHT = "model.layers.0.self_attn.q_proj"


def copied(folder: Path, benign: Benign) -> Path:
    shutil.copytree(benign.artifact, folder, dirs_exist_ok=True)
    return folder


def edited(path: Path, change: Callable[[Any], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def resealed(folder: Path) -> None:
    """Hashes of the files as they are now: whoever made this artifact meant it so."""

    def seal(about: Any) -> None:
        for name in about["files"]:
            content = (folder / name).read_bytes()
            about["files"][name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}

    edited(folder / "fewbits.json", seal)


@case("artifact", passes=("inspect", "run"))
def changed_byte(folder: Path, benign: Benign) -> None:
    """one byte of the weights changed after it was made"""
    path = copied(folder, benign) / SHARD
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(bytes(content))


@case("artifact")
def changed_plan(folder: Path, benign: Benign) -> None:
    """a plan changed after it was made"""
    path = copied(folder, benign) / "plan.json"
    path.write_text(path.read_text().replace('"rtn"', '"gptq"'))


@case("artifact")
def short_weights(folder: Path, benign: Benign) -> None:
    """weights that end in the middle"""
    path = copied(folder, benign) / SHARD
    path.write_bytes(path.read_bytes()[:-1000])


@case("artifact")
def linked_weights(folder: Path, benign: Benign) -> None:
    """weights in a link out of the folder, with the right hash"""
    path = copied(folder, benign) / SHARD
    shutil.move(path, folder.parent / "linked-weights.safetensors")
    path.symlink_to(folder.parent / "linked-weights.safetensors")


@case("artifact")
def weights_up_the_tree(folder: Path, benign: Benign) -> None:
    """an index that leads out of the folder"""
    edited(copied(folder, benign) / "model.safetensors.index.json", lambda index: index["weight_map"].update({WEIGHT: f"../{SHARD}"}))
    resealed(folder)


@case("artifact")
def manifest_of_nothing(folder: Path, benign: Benign) -> None:
    """a fewbits.json that is a list"""
    (copied(folder, benign) / "fewbits.json").write_text("[1]")


@case("artifact")
def deep_manifest(folder: Path, benign: Benign) -> None:
    """a fewbits.json of 100,000 brackets"""
    (copied(folder, benign) / "fewbits.json").write_text('{"schema":' * 100_000)


@case("artifact")
def vast_weight(folder: Path, benign: Benign) -> None:
    """a weight that says it has 2^31 x 2^31 values"""
    edited(copied(folder, benign) / "fewbits.json", lambda about: about["weights"][0].update(shape=[1 << 31, 1 << 31]))


@case("artifact")
def shape_of_texts(folder: Path, benign: Benign) -> None:
    """a weight whose shape is two letters"""
    edited(copied(folder, benign) / "fewbits.json", lambda about: about["weights"][0].update(shape=["a", "b"]))


@case("artifact")
def kind_that_is_a_list(folder: Path, benign: Benign) -> None:
    """a weight of a kind that is a list, tied to a number"""
    edited(copied(folder, benign) / "fewbits.json", lambda about: about["weights"][0].update(kind=[1], tied_to=7, name=["x"]))


@case("artifact")
def weights_without_a_hash(folder: Path, benign: Benign) -> None:
    """a fewbits.json that leaves the weights out of its list of hashes: they could be changed, and nobody would see it"""
    edited(copied(folder, benign) / "fewbits.json", lambda about: about["files"].pop(SHARD))


@case("artifact")
def infinite_version(folder: Path, benign: Benign) -> None:
    """a format in version infinity"""
    path = copied(folder, benign) / "fewbits.json"
    path.write_text(path.read_text().replace('"formats"', '"formats": {"q4_0": 1e999}, "other"', 1))


@case("artifact")
def files_of_numbers(folder: Path, benign: Benign) -> None:
    """files whose hashes are numbers"""
    edited(copied(folder, benign) / "fewbits.json", lambda about: about["files"].update({SHARD: {"bytes": "many", "sha256": 7}}))


@case("artifact", passes=("inspect",))
def config_of_a_billion(folder: Path, benign: Benign) -> None:
    """a config of a billion blocks, with the right hash"""
    edited(copied(folder, benign) / "config.json", lambda config: config.update(num_hidden_layers=10**9))
    resealed(folder)


@case("artifact", passes=("inspect",))
def config_of_a_wide_model(folder: Path, benign: Benign) -> None:
    """a config that takes 64 GB where the weights have 60 kB, with the right hash"""
    edited(copied(folder, benign) / "config.json", lambda config: config.update(hidden_size=1 << 14, intermediate_size=1 << 20))
    resealed(folder)


@case("artifact", passes=("inspect",))
def scales_of_infinity(folder: Path, benign: Benign) -> None:
    """an infinite scale, with the right hash"""
    path = copied(folder, benign) / SHARD
    tensors = load_file(path)
    name = next(name for name in tensors if name.startswith(WEIGHT))
    tensors[name].view(torch.uint8).view(-1)[:2] = torch.tensor([float("inf")], dtype=torch.float16).view(torch.uint8)
    save_file(tensors, path, metadata={"format": "pt"})
    resealed(folder)


@case("artifact")
def parts_of_another_type(folder: Path, benign: Benign) -> None:
    """parts in another type than their format has, with the right hash"""
    path = copied(folder, benign) / SHARD
    tensors = load_file(path)
    name = next(name for name in tensors if name.startswith(WEIGHT))
    save_file(tensors | {name: tensors[name].float()}, path, metadata={"format": "pt"})
    resealed(folder)


@case("artifact", passes=("inspect", "export", "verify", "run"))
def verdict_of_nan(folder: Path, benign: Benign) -> None:
    """a stored verdict that says it passed, with a NaN: it is nobody's proof"""
    said = {"torch": {"passed": True, "kl_mean": float("nan")}}
    edited(copied(folder, benign) / "fewbits.json", lambda about: about.update(verdicts=said))
