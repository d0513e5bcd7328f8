"""Obviously right twins: one value at a time, no vectors, no cleverness. What is fast must equal these."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def encode_one(value: float, levels: tuple[float, ...], scale: float, offset: float) -> int:
    """The code whose decoded value is nearest, by trying all of them; of two equally near ones, either may be taken."""
    x = 0.0 if scale == 0 else (value - offset) / scale
    return min(range(len(levels)), key=lambda code: abs(levels[code] - x))


def decode(codes: Tensor, levels: tuple[float, ...], scale: Tensor, offset: Tensor | None) -> Tensor:
    out = torch.empty(codes.shape)
    for r in range(codes.shape[0]):
        for c in range(codes.shape[1]):
            out[r, c] = scale.expand_as(out)[r, c] * torch.tensor(levels[int(codes[r, c])])
            if offset is not None:
                out[r, c] += offset.expand_as(out)[r, c]
    return out


def kl(p_logits: list[float], q_logits: list[float]) -> float:
    def softmax(logits: list[float]) -> list[float]:
        top = max(logits)
        raised = [math.exp(x - top) for x in logits]
        return [x / sum(raised) for x in raised]

    return sum(p * math.log(p / q) for p, q in zip(softmax(p_logits), softmax(q_logits), strict=True))
