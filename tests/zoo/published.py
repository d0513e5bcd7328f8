"""Saved folders rewritten as their makers publish them: DeepSeek in FP8 with scales of blocks, gpt-oss in MXFP4."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

BLOCK = 128
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
MIXTURE = "mlp.experts."


def publish(folder: Path, how: str) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors = {stored: part for name, tensor in tensors.items() for stored, part in WAYS[how][0](name, tensor).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": WAYS[how][1]}, indent=2))


def rename(folder: Path, names: dict[str, str]) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for before, after in names.items():
        tensors = {name.replace(before, after): tensor for name, tensor in tensors.items()}
    save_file(tensors, file, metadata={"format": "pt"})


def in_fp8(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Blocks of 128 x 128 share a scale; embeddings, norms, the router and the output matrix stay."""
    if tensor.ndim != 2 or "_proj" not in name:
        return {name: tensor}
    rows, cols = tensor.shape
    padded = torch.nn.functional.pad(tensor.float(), (0, -cols % BLOCK, 0, -rows % BLOCK))
    blocks = padded.reshape(padded.shape[0] // BLOCK, BLOCK, -1, BLOCK)
    scale = blocks.abs().amax((1, 3)) / 448
    codes = (blocks / scale[:, None, :, None]).reshape(padded.shape)[:rows, :cols].clamp(-448, 448)
    return {name: codes.to(torch.float8_e4m3fn).contiguous(), f"{name}_scale_inv": scale}


def in_mxfp4(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Experts, saved as (experts, inputs, outputs), as nibbles of 32 inputs under a power of two: (experts, outputs, blocks, 16)."""
    if tensor.ndim != 3 or MIXTURE not in name:
        return {name: tensor}
    blocks = tensor.float().transpose(1, 2).unflatten(-1, (-1, 32))
    exponent = (blocks.abs().amax(-1).clamp_min(1e-30).log2().floor() - 2).clamp(-127, 127)
    scaled = blocks / torch.exp2(exponent)[..., None]
    nearest = (scaled.abs()[..., None] - torch.tensor(E2M1)).abs().argmin(-1)
    codes = (nearest + 8 * (scaled < 0)).to(torch.uint8)
    return {f"{name}_blocks": codes[..., 0::2] | codes[..., 1::2] << 4, f"{name}_scales": (exponent + 127).to(torch.uint8)}


WAYS: dict[str, Any] = {
    "fp8": (
        in_fp8,
        {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]},
    ),
    "mxfp4": (
        in_mxfp4,
        {
            "quant_method": "mxfp4",
            "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"],
        },
    ),
}
