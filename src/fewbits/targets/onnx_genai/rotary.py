"""Cosines and sines of every position, by transformers' rotary module, so that scaled frequencies are the same."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor


def tables(config: Any, kind: str, context: int) -> tuple[Tensor, Tensor]:  # -> cos, sin, each (context, head_size / 2)
    """`kind`: the type of attention, where a model has rotary parameters for each; empty where it has one set for all."""
    modeling = importlib.import_module(type(config).__module__.replace("configuration_", "modeling_"))
    (rotary,) = {member for name, member in vars(modeling).items() if name.endswith("RotaryEmbedding")}
    asked = (torch.zeros(1), torch.arange(context)[None])
    cos, sin = rotary(config)(*asked, kind) if kind else rotary(config)(*asked)
    half = cos.shape[-1] // 2  # the two halves of a head turn by the same angles
    return cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous()
