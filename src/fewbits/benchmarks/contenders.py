"""A matrix product as one of several contenders: what each must tell about itself, and the check that comes before it is timed.

**The check.** The reference is the contender's own decoded weight times x, in float64, for a few rows of the weight and all rows of x. A
product that rounds x to 8 bits errs by w * d in every column, d of at most half a step of the scale, independent and of mean zero. So its
error has a standard deviation of at most step * |w| / sqrt(12), with |w| the norm of the row; the RMS over all outputs must stay below
twice that, and by Hoeffding's inequality one of n exceeds sqrt(2 ln(2 n / p)) * |w| * step / 2 only with probability p. A contender that
rounds in blocks is allowed the error of one scale per row of x, the coarsest. Summing K products in float32 adds at most
K * 2^-24 * sum |w x|, and scales of x in float16 add 2^-11 of each block's sum.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fewbits.errors import FewbitsError

Rounding = Literal["none", "row", "tensor"]  # the largest part of x that shares a scale when x is rounded to 8 bits
_CHECKED = 64  # rows of the weight
_CHANCE = 1e-12  # of a correct product to fail
_RMS = 2.0  # times the expected one: over 64 outputs and more, chance explains a factor of 1.5 at most
_MOST_COPIES = 4096
_HALF = 2.0**-11  # relative rounding of a float16


@dataclass(frozen=True)
class Product:
    """A contender's weights with one x: call `run` with the number of the call, then `output` gives (rows of x, N)."""

    run: Callable[[int], object]
    output: Callable[[], Tensor]


class Multiplier(ABC):
    """Holds so many copies of a weight that every call reads one from memory, not from a cache."""

    name: str
    setting: str  # how it is set up: instruction set, layout, threads
    nbytes: int  # that one product reads
    unit: Literal["int8", "fp32"] = "int8"  # the arithmetic that it multiplies with
    rounding: Rounding = "row"

    @abstractmethod
    def bind(self, x: Tensor) -> Product:  # x (rows, K) float32
        ...

    @abstractmethod
    def decoded(self, rows: Tensor) -> Tensor:
        """(len(rows), K) float64: the weights that it multiplies with, by the reference."""

    @abstractmethod
    def close(self) -> None:
        """Gives memory back."""


class WrongProductError(FewbitsError):
    """A contender computed something else, so its time would mean nothing."""

    exit_code = 1


def checked(multiplier: Multiplier, product: Product, x: Tensor, count: int) -> float:
    """Runs it once and gives the relative RMS error of its output, which has `count` columns; raises if it is not explained."""
    product.run(0)
    rows = torch.linspace(0, count - 1, min(_CHECKED, count)).long().unique()
    return check(product.output()[:, rows], x.double(), multiplier.decoded(rows), multiplier.rounding, multiplier.name)


def check(y: Tensor, x: Tensor, w: Tensor, rounding: Rounding, name: str) -> float:
    """y (M, n) against x (M, K) and w (n, K), both float64."""
    wanted, magnitude = x @ w.T, x.abs() @ w.abs().T
    error = y.double() - wanted
    exact = x.shape[1] * 2.0**-24 * magnitude
    norm = w.norm(dim=1)  # (n,)
    step = _step(x, rounding)  # (M, 1)
    expected = step * norm / math.sqrt(12)
    # errors of the blocks' scales have random signs: 6 standard deviations of their sum, for Gaussian weights in blocks of 32
    stored = torch.zeros_like(exact) if rounding == "none" else _HALF * magnitude / math.sqrt(max(1, x.shape[1] / 32))
    bound = math.sqrt(2 * math.log(2 * y.numel() / _CHANCE)) * step / 2 * norm + stored + exact
    relative = float(error.norm() / wanted.norm())
    allowed_rms = float((_RMS * expected + stored + exact).norm() / wanted.norm())
    if not bool((error.abs() <= bound).all()) or not relative <= allowed_rms:
        worst = float((error.abs() / bound).nan_to_num(nan=math.inf).max())
        raise WrongProductError(
            f"{name} computes something else: its relative error is {relative:.2e}, {allowed_rms:.2e} is explained; "
            f"one output is off by {worst:.1f} times its bound",
            "its times are not worth having; report this if the contender is fewbits",
        )
    return relative


def _step(x: Tensor, rounding: Rounding) -> Tensor:
    """Of 8 bits over what shares a scale: the largest value / 127, which is no less than a range / 255."""
    if rounding == "none":
        return torch.zeros((len(x), 1), dtype=x.dtype)
    most = x.abs().amax(dim=1, keepdim=True) if rounding == "row" else x.abs().amax().expand(len(x), 1)
    return most / 127


def copies(nbytes: int, cold: int) -> int:
    """How many copies of a weight take `cold` bytes in all; at most 4096, which a tiny one would exceed."""
    return max(1, min(_MOST_COPIES, -(-cold // nbytes)))
