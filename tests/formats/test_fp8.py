"""8-bit floats against torch and ml_dtypes: every code, and every float16 there is."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from fewbits import formats, kernels
from fewbits.formats.fp8 import Float8
from fewbits.formats.storage.codes import encode, nearest, snap
from fewbits.methods import rtn

ml_dtypes = pytest.importorskip("ml_dtypes")

FLOAT8 = [f for f in formats.all().values() if isinstance(f, Float8)]
float8 = pytest.mark.parametrize("fmt", FLOAT8, ids=lambda f: f.name)
both = pytest.mark.parametrize("fmt", [f for f in FLOAT8 if f.tensor_wide], ids=lambda f: f.dtype)
CODES = torch.arange(256, dtype=torch.uint8)
ONE = torch.ones(1, 1)


def every_float16() -> Tensor:
    return torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.float16).float()


def same(ours: Tensor, theirs: Tensor) -> bool:
    """Bit for bit, the sign of zero included; any NaN is as good as another."""
    number = ~theirs.isnan()
    return torch.equal(ours.isnan(), theirs.isnan()) and torch.equal(ours[number].view(torch.int32), theirs[number].view(torch.int32))


@both
def test_every_code_decodes_as_in_torch_and_ml_dtypes(fmt: Float8) -> None:
    parts = fmt.pack(CODES.reshape(4, 64), {"scales": ONE})
    ours = kernels.decode(fmt, parts, (4, 64)).flatten()
    assert same(ours, CODES.view(getattr(torch, fmt.dtype)).float())
    assert same(ours, torch.from_numpy(np.arange(256, dtype=np.uint8).view(getattr(ml_dtypes, fmt.dtype)).astype(np.float32)))


@both
def test_infinities_and_nans_are_where_the_specification_puts_them(fmt: Float8) -> None:
    assert fmt.levels
    infinite = [code for code, level in enumerate(fmt.levels) if math.isinf(level)]
    nans = [code for code, level in enumerate(fmt.levels) if math.isnan(level)]
    if fmt.dtype == "float8_e4m3fn":
        assert (infinite, nans) == ([], [0x7F, 0xFF])
    else:
        assert (infinite, nans) == ([0x7C, 0xFC], [0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF])
    assert max(level for level in fmt.levels if math.isfinite(level)) == fmt.largest == torch.finfo(getattr(torch, fmt.dtype)).max
    assert math.copysign(1, fmt.levels[0x80]) == -1 and fmt.levels[0x80] == 0


@both
def test_every_float16_rounds_as_in_torch_and_ml_dtypes_and_saturates(fmt: Float8) -> None:
    assert fmt.levels
    x = every_float16()
    ours = encode(x, fmt.levels, torch.ones(()))
    number = ~x.isnan()
    clamped = x[number].clamp(-fmt.largest, fmt.largest)
    assert torch.equal(ours[number], clamped.to(getattr(torch, fmt.dtype)).view(torch.uint8))
    theirs = clamped.numpy().astype(getattr(ml_dtypes, fmt.dtype)).view(np.uint8)
    assert torch.equal(ours[number], torch.from_numpy(theirs))
    assert all(math.isfinite(fmt.levels[code]) for code in ours[number].unique().tolist())  # infinity itself saturates
    assert all(math.isnan(fmt.levels[code]) for code in ours[~number].unique().tolist())  # NaN is not made into a number


@both
def test_ties_go_to_the_even_code(fmt: Float8) -> None:
    assert fmt.levels
    finite = [code for code in range(0x80) if math.isfinite(fmt.levels[code])]
    for lower, upper in itertools.pairwise(finite):
        middle = (fmt.levels[lower] + fmt.levels[upper]) / 2
        even = lower if lower % 2 == 0 else upper
        for sign, flag in ((1.0, 0), (-1.0, 0x80)):
            x = torch.tensor([sign * middle])
            assert nearest(x, fmt.levels).item() == even | flag
            assert snap(x, fmt.levels).item() == sign * fmt.levels[even]


@float8
def test_codes_are_stored_in_torchs_own_type(fmt: Float8) -> None:
    w = torch.randn((8, 64), generator=torch.Generator().manual_seed(0))
    parts = rtn.quantize(w, fmt)
    assert parts["codes"].dtype == getattr(torch, fmt.dtype)
    assert torch.equal(parts["codes"].float() * parts["scales"], kernels.decode(fmt, parts, (8, 64)))
    assert parts["scales"].shape == ((1, 1) if fmt.tensor_wide else (8, 1))


@float8
def test_codes_survive_a_file(fmt: Float8, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    parts = rtn.quantize(torch.randn((8, 64), generator=torch.Generator().manual_seed(0)), fmt)
    save_file(parts, tmp_path / "parts.safetensors")
    back = load_file(tmp_path / "parts.safetensors")
    assert {name: part.dtype for name, part in back.items()} == {name: part.dtype for name, part in parts.items()}
    assert torch.equal(kernels.decode(fmt, back, (8, 64)), kernels.decode(fmt, parts, (8, 64)))


@float8
def test_the_textbook_scale_puts_the_largest_weight_at_the_largest_code(fmt: Float8) -> None:
    w = torch.randn((8, 64), generator=torch.Generator().manual_seed(0)) * 1e-3
    largest = w.abs().amax() if fmt.tensor_wide else w.abs().amax(1, keepdim=True)
    assert torch.equal(fmt.fit(w, how="max")["scales"], (largest / fmt.largest).reshape(-1, 1))


def test_the_error_is_that_of_the_mantissa() -> None:
    """A uniform error within a step: 2^-m / sqrt(12) relative to the octave's start, 0.72 of that at the mean square of an octave."""
    w = torch.randn((64, 1024), generator=torch.Generator().manual_seed(0)) * 0.02
    errors = {f.name: ((kernels.decode(f, rtn.quantize(w, f), (64, 1024)) - w).norm() / w.norm()).item() for f in FLOAT8}
    for name, error in errors.items():
        mantissa = 3 if "e4m3" in name else 2
        assert 0.6 < error / (2**-mantissa / 12**0.5) < 0.8
    assert errors["fp8_e4m3_channel"] < errors["fp8_e4m3_tensor"] < errors["fp8_e5m2_channel"] < errors["fp8_e5m2_tensor"]
