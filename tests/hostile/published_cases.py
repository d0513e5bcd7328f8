"""Hostile checkpoints that are quantized as published: FP8, MXFP4 and compressed-tensors whose parts do not belong together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from benign import Benign
from cases import case
from folder_cases import copied, edited
from safetensors.torch import load_file, save_file
from torch import Tensor

LAYER = "model.layers.0.self_attn.q_proj"
_FP8 = {"quant_method": "fp8", "weight_block_size": [32, 32]}
_GROUP = {"targets": ["Linear"], "weights": {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": True}}
_CT = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"a": _GROUP}}


def published(folder: Path, benign: Benign, said: Any, **parts: Tensor) -> None:
    """The honest model with one layer replaced by these tensors, and this quantization_config."""
    tensors = load_file(copied(folder, benign) / "model.safetensors")
    del tensors[f"{LAYER}.weight"]
    save_file(tensors | {f"{LAYER}.{part}": tensor for part, tensor in parts.items()}, folder / "model.safetensors")
    edited(folder / "config.json", lambda config: config.update(quantization_config=said))


def codes(*shape: int) -> Tensor:
    return torch.ones(*shape).to(torch.float8_e4m3fn)


_ALL = ("inspect", "quantize", "calibrate", "verify against")


@case("folder", passes=_ALL)
def honest_blocks(folder: Path, benign: Benign) -> None:
    """nothing: the others differ from this one (transformers itself cannot load it here, so `verify` refuses)"""
    published(folder, benign, _FP8, weight=codes(64, 64), weight_scale_inv=torch.full((2, 2), 0.1))


@case("folder")
def blocks_without_scales(folder: Path, benign: Benign) -> None:
    """float8 codes whose scales are not there: taken for values they would be 448 times too large"""
    published(folder, benign, _FP8, weight=codes(64, 64))


@case("folder")
def scales_without_blocks(folder: Path, benign: Benign) -> None:
    """scales of a weight that is not there"""
    published(folder, benign, _FP8, weight_scale_inv=torch.ones(2, 2))


@case("folder")
def too_few_scales(folder: Path, benign: Benign) -> None:
    """one row of scales where there should be two: by division each would cover 64 rows"""
    published(folder, benign, _FP8, weight=codes(64, 64), weight_scale_inv=torch.ones(1, 2))


@case("folder", passes=("inspect",))
def scales_of_nothing(folder: Path, benign: Benign) -> None:
    """a scale of zero, which deletes a block"""
    published(folder, benign, _FP8, weight=codes(64, 64), weight_scale_inv=torch.tensor([[1.0, 0.0], [1.0, 1.0]]))


@case("folder")
def blocks_beyond_64_bits(folder: Path, benign: Benign) -> None:
    """blocks of 2^70 rows"""
    said = _FP8 | {"weight_block_size": [1 << 70, 1 << 70]}
    published(folder, benign, said, weight=codes(64, 64), weight_scale_inv=torch.full((1, 1), 0.1))


@case("folder")
def block_size_that_is_a_text(folder: Path, benign: Benign) -> None:
    """a block size that is none"""
    published(folder, benign, _FP8 | {"weight_block_size": "128"}, weight=codes(64, 64), weight_scale_inv=torch.ones(2, 2))


@case("folder")
def quantized_by_nobody(folder: Path, benign: Benign) -> None:
    """a quantization_config that is a list"""
    published(folder, benign, ["fp8"], weight=codes(64, 64), weight_scale_inv=torch.ones(2, 2))


@case("folder")
def codes_in_seven_dimensions(folder: Path, benign: Benign) -> None:
    """float8 codes that are no matrix"""
    published(folder, benign, _FP8, weight=codes(64, 2, 2, 2, 2, 2, 2), weight_scale_inv=torch.ones(2, 2))


@case("folder", passes=("inspect",))
def small_floats_of_a_layer(folder: Path, benign: Benign) -> None:
    """mxfp4 blocks under the name of a layer, which has two dimensions, not three"""
    blocks = torch.zeros(2, 64, 2, 16, dtype=torch.uint8)
    published(folder, benign, {"quant_method": "mxfp4"}, weight_blocks=blocks, weight_scales=blocks[..., 0].contiguous())


@case("folder")
def packed_shape_below_nothing(folder: Path, benign: Benign) -> None:
    """a packed matrix of -64 rows"""
    parts = {"weight_packed": torch.zeros(64, 8, dtype=torch.int32), "weight_scale": torch.ones(64, 2)}
    published(folder, benign, _CT, weight_shape=torch.tensor([-64, -64]), **parts)


@case("folder")
def packed_pattern_that_never_ends(folder: Path, benign: Benign) -> None:
    """an expression for layers that takes exponential time"""
    group = _GROUP | {"targets": [r"re:(?:[a-z]|[a-z0-9._]|\w)+\s"]}
    parts = {"weight_packed": torch.zeros(64, 8, dtype=torch.int32), "weight_scale": torch.ones(64, 2)}
    published(folder, benign, _CT | {"config_groups": {"a": group, "b": group}}, weight_shape=torch.tensor([64, 64]), **parts)


@case("folder")
def packed_groups_of_a_billion(folder: Path, benign: Benign) -> None:
    """a group of a billion columns: the matrix would have as many"""
    group = _GROUP | {"weights": _GROUP["weights"] | {"group_size": 1 << 30}}  # type: ignore[operator]
    parts = {"weight_packed": torch.zeros(64, 8, dtype=torch.int32), "weight_scale": torch.ones(64, 1)}
    published(folder, benign, _CT | {"config_groups": {"a": group}}, weight_shape=torch.tensor([64, 64]), **parts)
