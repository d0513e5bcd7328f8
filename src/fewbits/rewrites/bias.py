"""Bias correction: the mean shift of a layer's output that rounding causes is subtracted from its bias, at no cost at run time."""

from __future__ import annotations

from torch import Tensor


def corrected_bias(bias: Tensor, w: Tensor, decoded: Tensor, mean: Tensor) -> Tensor:  # (rows,), (rows, cols) twice, (cols,) -> (rows,)
    """The bias with which the decoded weight has the original's mean output over inputs of this mean."""
    return (bias.double() - (decoded.double() - w.double()) @ mean.double()).float()
