"""Hostile folders of compressed-tensors: what config.json says of layers, and tensors that are not as it says."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from benign import Benign
from cases import case
from folder_cases import edited
from safetensors.torch import save_file

LAYER = "model.layers.0.self_attn.q_proj"
_GROUP = {
    "format": "pack-quantized",
    "targets": [LAYER],
    "weights": {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": True},
}


def compressed(folder: Path, benign: Benign, change: Callable[[Any], object] | None = None, **tensors: torch.Tensor) -> None:
    """One layer of int4 in groups of 32, and nothing else."""
    shutil.copytree(benign.model, folder, dirs_exist_ok=True)
    said = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"a": json.loads(json.dumps(_GROUP))}}
    edited(folder / "config.json", lambda config: config.update(quantization_config=said))
    if change:
        edited(folder / "config.json", lambda config: change(config["quantization_config"]["config_groups"]["a"]))
    honest = {
        "weight_packed": torch.zeros(64, 8, dtype=torch.int32),
        "weight_scale": torch.ones(64, 2),
        "weight_shape": torch.tensor([64, 64]),
    }
    save_file({f"{LAYER}.{name}": tensor for name, tensor in (honest | tensors).items()}, folder / "model.safetensors")


@case("compressed", passes=("inspect",))
def an_honest_layer(folder: Path, benign: Benign) -> None:
    """nothing: the others differ from this one"""
    compressed(folder, benign)


@case("compressed")
def shape_of_three(folder: Path, benign: Benign) -> None:
    """a matrix with three sides"""
    compressed(folder, benign, weight_shape=torch.tensor([64, 64, 2]))


@case("compressed")
def shape_below_nothing(folder: Path, benign: Benign) -> None:
    """a matrix of -64 rows"""
    compressed(folder, benign, weight_shape=torch.tensor([-64, -64]))


@case("compressed")
def scales_of_another_type(folder: Path, benign: Benign) -> None:
    """complex scales"""
    compressed(folder, benign, weight_scale=torch.ones(64, 2, dtype=torch.complex64))


@case("compressed")
def bits_that_are_a_text(folder: Path, benign: Benign) -> None:
    """a number of bits that is none"""
    compressed(folder, benign, lambda group: group["weights"].update(num_bits="x"))


@case("compressed")
def pattern_that_is_none(folder: Path, benign: Benign) -> None:
    """an expression that cannot be compiled"""
    compressed(folder, benign, lambda group: group.update(targets=["re:("]))


@case("compressed")
def pattern_that_is_a_number(folder: Path, benign: Benign) -> None:
    """a layer whose name is a number"""
    compressed(folder, benign, lambda group: group.update(targets=[3]))


@case("compressed")
def pattern_that_never_ends(folder: Path, benign: Benign) -> None:
    """an expression that takes exponential time on the name of a layer"""
    compressed(folder, benign, lambda group: group.update(targets=[r"re:(?:[a-z]|[a-z0-9._]|\w)+\s"]))


@case("compressed")
def compressed_weights_through_a_link(folder: Path, benign: Benign) -> None:
    """weights in a link out of the folder"""
    compressed(folder, benign)
    shutil.move(folder / "model.safetensors", folder.parent / "compressed-elsewhere.safetensors")
    (folder / "model.safetensors").symlink_to(folder.parent / "compressed-elsewhere.safetensors")
