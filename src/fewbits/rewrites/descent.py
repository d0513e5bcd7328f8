"""SmoothQuant's factors, one per channel: gradient descent on the expected damage of rounding weights and activations to 8 bits.

One exponent for a thousand channels is coarse. Rounding to a step s adds noise of variance s^2 / 12, or loses a value whose square is
smaller than that; both have gradients with respect to the factors, so that each channel gets a factor of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from fewbits.rewrites.folding import Fold

_STEPS = 120
_RATE = 0.03  # in log factors
_LARGEST_CODE = 127
_NOISE = 1 / 12  # variance of a rounding error, in steps
_ENOUGH = 1 << 16  # weights of a reader that are looked at: its rows are subsampled to about this many


class Reader(NamedTuple):
    """One consumer: its matrix, and the cost of an error in each of its outputs, for each group of tokens."""

    w: Tensor  # (rows, cols)
    cost: Tensor  # (groups, rows)


def descend(fold: Fold, start: Tensor, readers: list[Reader], groups: list[Tensor], static: Tensor | None) -> Tensor:
    """Better factors (cols,) than these. groups: inputs, (tokens, cols) each; each group counts by its mean error.

    static: the largest value of each channel, where all tokens share one scale.
    """
    with torch.inference_mode(False), torch.enable_grad():
        counts = torch.zeros(fold.channels).index_add(0, fold.source, torch.ones_like(start))
        channel = torch.zeros(fold.channels).index_add(0, fold.source, start.log()) / counts.clamp(min=1)
        channel.requires_grad_()
        # copies: tensors made in inference mode cannot take part in gradients
        column_cost = torch.stack([reader.cost @ reader.w.square() for reader in readers]).sum(0).clone()  # (groups, cols)
        inputs = [group.clone() for group in groups]
        some = [Reader(reader.w[::n].abs(), reader.cost[:, ::n] * n) for reader in readers for n in [max(1, reader.w.numel() // _ENOUGH)]]
        largest = None if static is None else static.clone()
        optimizer = torch.optim.Adam([channel], lr=_RATE, betas=(0.9, 0.95))
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, _STEPS)
        for _ in range(_STEPS):
            optimizer.zero_grad()
            _expected(channel[fold.source].exp(), some, inputs, column_cost, largest).log().backward()
            optimizer.step()
            schedule.step()
        return channel.detach()[fold.source].exp()


def _expected(factors: Tensor, readers: list[Reader], groups: list[Tensor], column_cost: Tensor, static: Tensor | None) -> Tensor:
    of_weights = [reader.cost @ ((reader.w * factors).amax(1) / _LARGEST_CODE).square() for reader in readers]  # (groups,) each
    total = torch.zeros(())
    for x, costs, weight_noise in zip(groups, column_cost, torch.stack(of_weights).sum(0), strict=True):
        x = x / factors
        peak = x.abs().amax(1, keepdim=True) if static is None else (static / factors).max()
        lost = torch.minimum(x.square(), (peak / _LARGEST_CODE).square() * _NOISE)
        total = total + (lost @ (costs * factors.square())).mean() + _NOISE * weight_noise * x.square().sum(1).mean()
    return total
