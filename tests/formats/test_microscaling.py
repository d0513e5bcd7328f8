"""4-bit floats: the published value tables, ggml and the gguf package as judges of the bytes, ggml's quantizer as the one to beat."""

from __future__ import annotations

import importlib.util

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from fewbits import formats, kernels
from fewbits.benchmarks.peers import ggml
from fewbits.formats.microscaling import E2M1, E8M0, UE4M3, Microscaling
from fewbits.formats.storage.codes import decode, encode, nearest
from fewbits.methods import rtn

MX, NV = formats.get("mxfp4"), formats.get("nvfp4")
both = pytest.mark.parametrize("fmt", [MX, NV], ids=lambda f: f.name)
needs_ggml = pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None, reason="pip install fewbits[llamacpp]")

# OCP Microscaling Formats 1.0: table 5 (E2M1) and table 7 (E8M0); NVFP4's scales are the positive half of OCP 8-bit E4M3
PUBLISHED_E2M1 = {0b0000: 0, 0b0001: 0.5, 0b0010: 1, 0b0011: 1.5, 0b0100: 2, 0b0101: 3, 0b0110: 4, 0b0111: 6, 0b1001: -0.5, 0b1111: -6}
PUBLISHED_E8M0 = {0: 2.0**-127, 1: 2.0**-126, 126: 0.5, 127: 1.0, 128: 2.0, 254: 2.0**127}
PUBLISHED_E4M3 = {0x00: 0.0, 0x01: 2.0**-9, 0x07: 0.875 * 2.0**-6, 0x08: 2.0**-6, 0x38: 1.0, 0x3C: 1.5, 0x7E: 448.0}


def gaussian(shape: tuple[int, int], seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def any_blocks(fmt: formats.Format, rows: int, cols: int, seed: int) -> Tensor:
    """Random bytes, but for scales that are NaN by their specification."""
    assert isinstance(fmt, Microscaling)
    blocks = torch.randint(0, 256, (rows, cols // fmt.block, fmt.block_bytes), generator=torch.Generator().manual_seed(seed))
    scales = blocks[..., : fmt.fields[0]]
    scales[scales == 255] = 3
    scales[(scales & 127 == 127) & (len(fmt.scale_values) == 128)] = 5
    return blocks.to(torch.uint8).reshape(rows, -1)


def test_values_are_those_of_the_published_tables() -> None:
    assert all(E2M1[code] == value for code, value in PUBLISHED_E2M1.items()) and len(E2M1) == 16
    assert all(E8M0[code] == value for code, value in PUBLISHED_E8M0.items()) and len(E8M0) == 256
    assert all(UE4M3[code] == value for code, value in PUBLISHED_E4M3.items()) and len(UE4M3) == 128
    float8 = torch.arange(128, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    assert torch.equal(torch.tensor(UE4M3).nan_to_num(-1), float8.nan_to_num(-1))


def test_the_example_block_decodes_as_written_by_hand() -> None:
    """A scale of 2^-1, codes 0..15 in the low nibbles (elements 0..15), 15..0 in the high ones (16..31)."""
    block = [126, *(low | (15 - low) << 4 for low in range(16))]
    out = kernels.decode(MX, {"blocks": torch.tensor([block], dtype=torch.uint8)}, (1, 32))[0].tolist()
    half = [0, 0.25, 0.5, 0.75, 1, 1.5, 2, 3]
    assert out[:16] == half + [-v for v in half] and out[16:] == out[15::-1]


def test_the_sub_blocks_of_nvfp4_follow_their_four_scales() -> None:
    block = [0x38, 0x40, 0x30, 0x01, *([0x21] * 8), *([0x97] * 8), *([0xF0] * 8), *([0x62] * 8)]
    out = kernels.decode(NV, {"blocks": torch.tensor([block], dtype=torch.uint8)}, (1, 64))[0].reshape(8, 8)
    assert out[:, 0].tolist() == [0.5, 1.0, 2 * 6.0, 2 * -0.5, 0.0, 0.5 * -6.0, 2**-9 * 1.0, 2**-9 * 4.0]
    assert all(len(row.unique()) == 1 for row in out)


@needs_ggml
@both
def test_any_bytes_decode_as_in_ggml(fmt: formats.Format) -> None:
    for seed in range(5):
        blocks = any_blocks(fmt, 7, 1024, seed)
        theirs = torch.from_numpy(ggml.dequantize(fmt.name, blocks.numpy(), 7 * 1024)).reshape(7, 1024)
        assert torch.equal(kernels.decode(fmt, {"blocks": blocks}, (7, 1024)), theirs)


@both
def test_any_bytes_decode_as_in_the_gguf_package(fmt: formats.Format) -> None:
    blocks = any_blocks(fmt, 7, 1024, 9)
    with np.errstate(over="ignore"):
        theirs = gguf.quants.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[fmt.name.upper()])
    assert torch.equal(kernels.decode(fmt, {"blocks": blocks}, (7, 1024)), torch.from_numpy(np.ascontiguousarray(theirs)))


@both
def test_a_scale_that_is_not_a_number_makes_its_block_none(fmt: formats.Format) -> None:
    parts = rtn.quantize(gaussian((1, 128)), fmt)
    parts["blocks"][0, 0] = 255
    out = kernels.decode(fmt, parts, (1, 128))[0]
    assert fmt.group and out[: fmt.group].isnan().all() and out[fmt.group :].isfinite().all()


def test_ties_round_to_the_even_code_and_zero_is_plain() -> None:
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert nearest(middles, E2M1).tolist() == [0, 2, 2, 4, 4, 6, 6]
    assert nearest(-middles, E2M1).tolist() == [0, 10, 10, 12, 12, 14, 14]  # 0, not -0
    assert nearest(torch.tensor([7.0, -99.0, 0.1, -0.0, -0.2]), E2M1).tolist() == [7, 15, 0, 0, 0]


def test_the_textbook_scale_of_mxfp4_is_the_exponent_of_the_peak_less_two() -> None:
    peaks = torch.tensor([[6.0], [4.0], [7.9], [8.0], [1.0], [0.0], [2.0**-140], [3e38]])
    w = torch.cat([peaks, torch.zeros(8, 31)], 1)
    assert MX.fit(w, how="max")["scales"].flatten().tolist() == [127, 127, 127, 128, 125, 0, 0, 252]


@needs_ggml
def test_the_textbook_scales_are_those_of_ggml() -> None:
    w = gaussian((64, 512))
    for fmt in (MX, NV):
        _, theirs = fmt.unpack({"blocks": torch.from_numpy(ggml.quantize(fmt.name, w.numpy()))})
        assert torch.equal(fmt.fit(w, how="max")["scales"], theirs["scales"])


@pytest.mark.parametrize("importance", [None, torch.linspace(0.05, 2, 512)], ids=["plain", "weighted"])
@both
def test_the_search_finds_the_best_of_all_scales(fmt: formats.Format, importance: Tensor | None) -> None:
    """Every scale there is, tried one by one: the search looks at 4 or 9 of them and may miss 0.1 %."""
    assert isinstance(fmt, Microscaling) and fmt.levels
    w = gaussian((16, 512), 3)
    weight = torch.ones(512) if importance is None else importance
    table = torch.tensor(fmt.scale_values)[:-1]

    def errors(scale: Tensor) -> Tensor:
        back = decode(encode(w, fmt.levels or (), scale), fmt.levels, scale)
        return ((back - w).square() * weight).reshape(16, -1, fmt.group or 1).sum(-1)

    least = torch.stack([errors(scale) for scale in table[(table > 1e-3) & (table < 1e3)]]).amin(0)
    assert errors(fmt.affine(fmt.fit(w, importance))[0]).sum() <= 1.001 * least.sum()


@needs_ggml
@both
def test_the_error_is_below_that_of_ggml(fmt: formats.Format, record_property: pytest.RecordProperty) -> None:
    """ggml takes the textbook scale and ignores importance."""
    tails = gaussian((128, 1024), 1) * gaussian((128, 1024), 2).mul(0.5).exp()
    for name, w in (("gaussian", gaussian((128, 1024))), ("heavy tails", tails), ("small", gaussian((128, 1024)) * 0.02)):
        theirs = torch.from_numpy(ggml.dequantize(fmt.name, ggml.quantize(fmt.name, w.numpy()), w.numel())).reshape(w.shape)
        for weight in (None, torch.rand(1024, generator=torch.Generator().manual_seed(4)) ** 2):
            weigh = torch.ones(1024) if weight is None else weight
            ours = kernels.decode(fmt, rtn.quantize(w, fmt, weight), (128, 1024))
            ratio = (((ours - w).square() * weigh).sum() / ((theirs - w).square() * weigh).sum()).item()
            record_property(f"{fmt.name} {name} {'plain' if weight is None else 'weighted'}", round(ratio, 4))
            print(f"{fmt.name} {name:11} {'plain' if weight is None else 'weighted':8} squared error to ggml's: {ratio:.3f}")  # noqa: T201
            assert ratio <= 0.97


@both
def test_gguf_takes_the_blocks_as_they_are(fmt: formats.Format) -> None:
    from fewbits.targets.gguf import layout

    gguf_layout = layout(fmt)
    parts = rtn.quantize(gaussian((2, 128)), fmt)
    assert gguf_layout and gguf_layout.type == fmt.name.upper() and gguf_layout.convert(parts) is parts["blocks"]


def test_a_factor_for_the_whole_weight_makes_nvfp4_independent_of_its_size() -> None:
    fmt = formats.get("nvfp4_tensor")

    def error(size: float, which: formats.Format) -> float:
        w = gaussian((32, 512)) * size
        return ((kernels.decode(which, rtn.quantize(w, which), (32, 512)) - w).norm() / w.norm()).item()

    assert error(2.0**-10, fmt) == pytest.approx(error(2.0**14, fmt), rel=1e-6)
    assert error(1e-3, fmt) == pytest.approx(error(1e4, fmt), rel=1e-2)  # other mantissas of the scales
    assert error(1.0, fmt) == pytest.approx(error(1.0, NV), rel=0.01)
    assert error(0.02, fmt) < 0.93 * error(0.02, NV)  # a typical weight: UE4M3 alone is out of its normal numbers there
    assert error(1e-3, NV) > 3 * error(1e-3, fmt)
