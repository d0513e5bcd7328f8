"""Layers that a runtime joins into one (q with k and v, gate with up) read one factor of nvfp4: vLLM takes the largest for all of them.

Their factors are powers of two and nearly always equal. Where they are not, all get the largest one and the scales of the others move by
as many octaves, which is exact but for blocks that are far smaller than the weight's largest: those get the nearest scale that there is.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from fewbits.formats import Format, Parts
    from fewbits.model.weights import Weight


def joined_with(weight: Weight, weights: Sequence[Weight], together: Sequence[str]) -> list[Weight]:
    """All weights that are planned together with this one, itself among them. Experts keep factors of their own."""
    if weight.expert is not None:
        return [weight]
    for pattern in together:
        if found := re.search(pattern, weight.name):
            others = ((each, re.search(pattern, each.name)) for each in weights)
            return [each for each, match in others if match and match.groups() == found.groups()]
    return [weight]


def under_one_factor(fmt: Format, parts: Parts, factor: Tensor) -> Parts:
    """The same weight under this factor, which is no smaller than its own."""
    import torch

    if torch.equal(parts["factor"], factor):
        return parts
    codes, grid = fmt.unpack(parts)
    scales = (grid["scales"] & 127).view(torch.float8_e4m3fn).float() * (grid["factor"] / factor)
    return fmt.pack(codes, {"scales": scales.to(torch.float8_e4m3fn).view(torch.uint8), "factor": factor})
