"""How a matmul's inputs are rounded: int8, float8 or 4-bit floats, with a scale computed at run time, or with one from calibration.

    dynamic   one scale per token, its largest value over the format's largest: needs no calibration and never clips
    static    one scale for the whole tensor, from calibration: no maximum is computed at run time, values beyond the range saturate
    nvfp4     both: a float8 scale for every 16 values of a token, computed at run time, under one factor for the tensor from calibration

`quantized` gives the values that a matmul of few bits multiplies, as floats, so that accuracy is known before a kernel exists. There is no
dynamic scale per tensor: a token's result would depend on the other tokens, later ones included.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from fewbits.errors import InputError

if TYPE_CHECKING:
    from typing import Protocol

    from torch import Tensor

    class Weight(Protocol):
        @property
        def shape(self) -> tuple[int, int]: ...


NVFP4 = "nvfp4"
NVFP4_BLOCK = 16
_LARGEST = {
    "int8": 127.0,
    "fp8_e4m3": 448.0,
    "fp8_e5m2": 57344.0,
    NVFP4: 6 * 448.0,
}  # int8 without -128: symmetric, so that -x rounds to -(x rounded)
_NAMES = {"int8": "int8", "fp8": "fp8_e4m3", "fp8_e4m3": "fp8_e4m3", "fp8_e5m2": "fp8_e5m2", NVFP4: NVFP4}
KNOWN = ("none", "int8", "int8:static", "fp8", "fp8:static", "fp8_e5m2", "fp8_e5m2:static", NVFP4)


@dataclass(frozen=True)
class Activation:
    format: str  # int8, fp8_e4m3, fp8_e5m2, nvfp4
    static: bool = False
    range: str | None = None  # static: the method that estimates the range, by its name in fewbits.calibration.ranges
    symmetric: bool = True  # False: codes -128..127 with a zero point, for int8 and static only
    scale: float | None = None  # static, once calibrated
    zero: int = 0  # the code of 0.0, where not symmetric

    def __post_init__(self) -> None:
        hint = f"known activations: {', '.join(KNOWN)}"
        if self.format not in _LARGEST:
            raise InputError(f"no activation format is named `{self.format}`", hint)
        if not self.static and (self.range is not None or self.scale is not None or not self.symmetric or self.zero):
            raise InputError(f"a dynamic {self.format} activation has no range, scale or zero point", "those belong to a static one")
        if not self.symmetric and self.format != "int8":
            raise InputError(
                f"{self.format} activations have no zero point", "a float has a sign and its finest steps at zero: leave it out"
            )
        if self.scale is not None and not (math.isfinite(self.scale) and self.scale > 0):
            raise InputError(f"{self.scale} is no scale for activations", "a static scale is finite and above zero")
        if not -128 <= self.zero <= 127 or (self.symmetric and self.zero):
            raise InputError(f"{self.zero} is no zero point", "it is a code from -128 to 127, and 0 where the range is symmetric")

    @property
    def name(self) -> str:
        """As on the command line."""
        return ("fp8" if self.format == "fp8_e4m3" else self.format) + (":static" if self.static and self.format != NVFP4 else "")

    @property
    def granularity(self) -> Literal["token", "tensor"]:
        return "tensor" if self.static and self.format != NVFP4 else "token"

    @property
    def largest(self) -> float:
        """The largest magnitude of a code: scale = range / largest."""
        return _LARGEST[self.format]

    @property
    def levels(self) -> tuple[float, ...]:
        if self.format == "int8":
            return tuple(float(code) for code in range(-127 if self.symmetric else -128, 128))
        from fewbits import formats

        if self.format == NVFP4:
            from fewbits.formats.microscaling import E2M1

            return E2M1
        levels = formats.get(f"{self.format}_channel").levels
        assert levels
        return levels

    def calibrated(self, low: float, high: float) -> Activation:
        """The same with the scale for this range; static only. The range is widened to contain zero, which must be exact."""
        if not self.static:
            raise InputError(f"a dynamic {self.format} activation takes no range", "its scale is found when it runs")
        if not (math.isfinite(low) and math.isfinite(high) and low <= high):
            raise InputError(f"{low} to {high} is no range for activations", "are the calibration statistics damaged?")
        low, high = min(low, 0.0), max(high, 0.0)
        if self.symmetric:
            return replace(self, scale=_stored(max(-low, high) / self.largest))
        scale = _stored((high - low) / 255)
        return replace(self, scale=scale, zero=max(-128, min(127, round(-128 - low / scale))))

    def widened(self, times: float) -> Activation:
        """The same with a range so many times as wide; static only."""
        return replace(self, scale=_stored(static_scale(self) * times))

    def to_dict(self) -> dict[str, object]:
        """Only fields that differ from the default, so that a dynamic one has its format alone."""
        default = Activation(self.format)
        return {"format": self.format} | {key: value for key, value in vars(self).items() if value != getattr(default, key)}


def _stored(scale: float) -> float:
    """Rounded to float32, as runtimes store it, normal and finite. An input that was always zero gets 1: any scale will do."""
    single: float = struct.unpack("f", struct.pack("f", min(max(scale, 2.0**-126), 2.0**127)))[0]
    return single if scale else 1.0


def parse(text: str) -> Activation | None:
    """`none`, `int8`, `fp8:static`, as on the command line. Static ones get the range of least squared error; callers may set another."""
    name, colon, how = text.lower().partition(":")
    if name == "none" and not colon:
        return None
    if name not in _NAMES or (colon and (how != "static" or name == NVFP4)):
        raise InputError(f"no activations are named `{text}`", f"known activations: {', '.join(KNOWN)}")
    if name == NVFP4:
        return Activation(NVFP4, static=True, range="minmax")
    return Activation(_NAMES[name], static=True, range="mse") if colon else Activation(_NAMES[name])


def from_dict(row: Any) -> Activation:
    types: dict[str, type | tuple[type, ...]] = {
        "format": str, "static": bool, "range": str, "symmetric": bool, "scale": (int, float), "zero": int,
    }  # fmt: skip
    if not isinstance(row, dict) or "format" not in row:
        raise InputError(f"`{row}` is no activation", 'for example {"format": "int8"}')
    for key, value in row.items():
        if key not in types or not isinstance(value, types[key]):
            raise InputError(f"`{key}: {value}` does not belong into an activation", f"known fields: {', '.join(types)}")
    return Activation(**row)


def quantized(x: Tensor, activation: Activation) -> Tensor:  # x (..., cols) float -> the same shape, float32: the decoded values
    from fewbits.formats.storage.codes import snap

    x = x.float()
    if not activation.static:
        scale = x.abs().amax(-1, keepdim=True) / activation.largest
        # a row of zeros, or of values so small that the scale underflows to zero, becomes zero
        return snap(x / scale.masked_fill(scale == 0, math.inf), activation.levels) * scale
    fixed = static_scale(activation)
    if activation.format == NVFP4:
        return _in_small_floats(x, fixed, activation.levels)
    if activation.symmetric:
        return snap(x / fixed, activation.levels) * fixed
    return ((x / fixed).round_() + activation.zero).clamp_(-128, 127).sub_(activation.zero) * fixed


def _in_small_floats(x: Tensor, factor: float, levels: tuple[float, ...]) -> Tensor:
    import torch

    from fewbits.formats.storage.codes import snap

    parts: Tensor = x.unflatten(-1, (-1, NVFP4_BLOCK))
    scale = (parts.abs().amax(-1, keepdim=True) / 6 / factor).clamp(max=448.0).to(torch.float8_e4m3fn).float() * factor
    return (snap(parts / scale.masked_fill(scale == 0, math.inf), levels) * scale).flatten(-2)


def not_in_blocks(weight: Weight, activation: Activation) -> str | None:
    """Why the inputs of this weight cannot be cut into blocks; None if they can, or need not."""
    cols = weight.shape[1]
    return f"{NVFP4_BLOCK} does not divide its {cols} columns" if activation.format == NVFP4 and cols % NVFP4_BLOCK else None


def static_scale(activation: Activation) -> float:
    if activation.scale is None:
        raise InputError(f"a static {activation.format} activation has no scale yet", "calibrate the model first")
    return activation.scale
