"""What calibration would record of given inputs and gradients, by definition."""

from __future__ import annotations

import torch
from torch import Tensor

from fewbits.calibration.statistics import InputStatistics, WeightStatistics


def measured(x: Tensor, g: Tensor | None = None) -> WeightStatistics:  # (samples, length, cols), (samples, length, rows)
    """What calibration records, by definition; even samples are half 0."""
    half = torch.arange(len(x)) % 2
    later = [x[half == h, 1:].flatten(0, 1) for h in (0, 1)]
    seen = InputStatistics(
        count=torch.tensor([len(part) for part in later]),
        total=torch.stack([part.double().sum(0) for part in later]),
        square=torch.stack([part.double().square().sum(0) for part in later]),
        low=torch.stack([x[half == h].flatten(0, 1).amin(0) for h in (0, 1)]),
        high=torch.stack([x[half == h].flatten(0, 1).amax(0) for h in (0, 1)]),
        first=x[:, 0], first_half=half.to(torch.uint8), extremes=torch.stack(x.flatten(1).aminmax(dim=1), 1),
        some=x[:, 1:].flatten(0, 1).half(), some_half=half.repeat_interleave(x.shape[1] - 1).to(torch.uint8),
        moment=torch.stack([(part.double().T @ part.double()).float() for part in later]),
    )  # fmt: skip
    if g is None:
        return WeightStatistics(input=seen)
    loss = g.double().square().mean(-1)
    weighted = [(x[half == h].double() * loss[half == h].sqrt()[..., None]).flatten(0, 1) for h in (0, 1)]
    return WeightStatistics(
        input=seen,
        sensitivity=torch.stack([torch.stack([loss[half == h, 0].sum(), loss[half == h, 1:].sum()]) for h in (0, 1)]),
        gradient_square=torch.stack([g[half == h].double().square().sum((0, 1)) for h in (0, 1)]),
        fisher_square=torch.stack([part.square().sum(0) for part in weighted]),
        fisher=torch.stack([(part.T @ part).float() for part in weighted]),
    )
