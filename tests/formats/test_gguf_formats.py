"""Every GGUF type: our bits are ggml's bits, whatever the bytes, and blocks that are hardly blocks come out right."""

from __future__ import annotations

import ctypes
import importlib.util
import itertools

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from fewbits import formats, kernels
from fewbits.benchmarks.peers import ggml
from fewbits.formats import Format
from fewbits.methods import rtn
from fewbits.targets import gguf as target

needs_ggml = pytestmark = pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None, reason="pip install fewbits[llamacpp]")

GGUF = [f for f in formats.all().values() if not f.is_cast and f.name in ggml.QUANTIZED]
every_type = pytest.mark.parametrize("fmt", GGUF, ids=lambda f: f.name)
with_float16 = pytest.mark.parametrize("fmt", [f for f in GGUF if f.name not in ("mxfp4", "nvfp4")], ids=lambda f: f.name)

# Where a block keeps its float16 numbers, from the published structs and not from our code.
FLOAT16_AT = {
    "q4_0": [0], "q4_1": [0, 2], "q5_0": [0], "q5_1": [0, 2], "q8_0": [0], "iq4_nl": [0], "iq4_xs": [0], "tq1_0": [52], "tq2_0": [64],
    "q2_k": [80, 82], "q3_k": [108], "q4_k": [0, 2], "q5_k": [0, 2], "q6_k": [208], "mxfp4": [], "nvfp4": [],
    "q1_0": [0], "q2_0": [0], "iq1_s": [0], "iq2_xxs": [0], "iq2_xs": [0], "iq2_s": [0], "iq3_xxs": [0], "iq3_s": [0],
    "iq1_m": [],  # four bits each in the last bytes of four numbers: IQ1_M_NIBBLES
}  # fmt: skip
IQ1_M_NIBBLES = [49, 51, 53, 55]
LARGEST_SCALE_BYTES = {"mxfp4": [252], "nvfp4": [126] * 4}  # times 6 is still finite; the last of the others is NaN
EDGES = [0.0, -0.0, 2.0**-24, -(2.0**-24), 2.0**-14, 65504.0, -65504.0]


def random_blocks(fmt: Format, count: int, seed: int = 0) -> np.ndarray:
    """Any bytes whose scales are finite: negative, subnormal, largest and zero ones too."""
    source = np.random.default_rng(seed)
    size = ggml.QUANTIZED[fmt.name].nbytes
    blocks = source.integers(0, 256, (count, size), dtype=np.uint8)
    for at in FLOAT16_AT[fmt.name]:
        blocks[:, at : at + 2] = _random_scales(source, count).view(np.uint8).reshape(count, 2)
    if fmt.name == "iq1_m":
        bits = _random_scales(source, count).view(np.uint16)
        for place, at in enumerate(IQ1_M_NIBBLES):
            blocks[:, at] = blocks[:, at] & 15 | (bits >> 4 * place & 15) << 4
    for at, largest in enumerate(LARGEST_SCALE_BYTES.get(fmt.name, [])):
        blocks[:, at] = np.minimum(blocks[:, at], largest)
    return blocks


def _random_scales(source: np.random.Generator, count: int) -> np.ndarray:
    bits = source.integers(0, 1 << 16, count).astype(np.uint16)
    scales = np.where((bits & 0x7C00) == 0x7C00, bits & 0x83FF, bits).astype(np.uint16).view(np.float16)
    scales[: len(EDGES)] = source.permutation(EDGES)
    return scales


def judged(fmt: Format, blocks: np.ndarray) -> Tensor:
    n = blocks.size // ggml.QUANTIZED[fmt.name].nbytes * fmt.block
    return torch.from_numpy(ggml.dequantize(ggml.SPELLED[fmt.name], blocks, n))


def judged_by_gguf(fmt: Format, rows: Tensor) -> Tensor | None:
    """The second judge; None: it has no decoder of this type."""
    if fmt.name in ("q1_0", "q2_0"):
        return None
    return torch.from_numpy(gguf.quants.dequantize(rows.numpy(), gguf.GGMLQuantizationType[fmt.name.upper()]))


def student(shape: tuple[int, int], source: torch.Generator) -> Tensor:
    """Student's t with three degrees of freedom: weights of 10 and 20 sigma among ordinary ones."""
    chi_square = torch.randn(3, *shape, generator=source).square().mean(0)
    return torch.randn(shape, generator=source) / chi_square.sqrt()


def test_all_types_are_here() -> None:
    assert {f.name for f in GGUF} == {*FLOAT16_AT}


@every_type
def test_the_gguf_target_takes_it_as_it_is(fmt: Format) -> None:
    gguf_layout = target.layout(fmt)
    assert gguf_layout is not None and gguf_layout.type == fmt.name.upper()
    assert (gguf_layout.block, gguf_layout.block_bytes) == (ggml.QUANTIZED[fmt.name].block, ggml.QUANTIZED[fmt.name].nbytes)
    parts = rtn.quantize(torch.ones(2, 256), fmt, how="max")
    assert torch.equal(gguf_layout.convert(parts), parts["blocks"])


@every_type
def test_any_bytes_decode_as_in_ggml(fmt: Format) -> None:
    blocks = random_blocks(fmt, 64 * 256 // fmt.block)
    rows = torch.from_numpy(blocks).reshape(16, -1)
    ours = kernels.decode(fmt, {"blocks": rows}, (16, 1024))
    assert torch.equal(ours.reshape(-1), judged(fmt, blocks))
    theirs = judged_by_gguf(fmt, rows)
    assert theirs is None or torch.equal(ours, theirs)


@every_type
def test_any_bytes_survive_unpacking_and_packing(fmt: Format) -> None:
    rows = torch.from_numpy(random_blocks(fmt, 64 * 256 // fmt.block)).reshape(16, -1)
    codes, grid = fmt.unpack({"blocks": rows})
    again = fmt.pack(codes, grid)["blocks"]
    if fmt.name == "tq1_0":  # 243 of 256 bytes are in use: others decode, but come back as the byte that means the same
        assert torch.equal(fmt.unpack({"blocks": again})[0], codes)
    else:
        assert torch.equal(again, rows)


def test_every_byte_of_tq1_0_holds_its_five_codes() -> None:
    fmt = formats.get("tq1_0")
    fives = torch.tensor(list(itertools.product(range(3), repeat=5)), dtype=torch.uint8)  # (243, 5)
    codes = torch.zeros(243, 256, dtype=torch.uint8)
    codes[:, 7:160:32], codes[:, 160 + 9 : 240 : 16], codes[:, 240 + 2 :: 4] = fives, fives, fives[:, :4]
    stored = fmt.pack(codes, {"d": torch.ones(243, 1, dtype=torch.float16)})
    assert torch.equal(fmt.unpack(stored)[0], codes)
    assert torch.equal(judged(fmt, stored["blocks"].numpy()).reshape(243, 256), codes.float() - 1)
    assert len(stored["blocks"][:, 7].unique()) == 243


@every_type
@pytest.mark.parametrize("how", ["max", "search"])
def test_what_we_pack_decodes_in_ggml_to_what_we_say(fmt: Format, how: formats.How) -> None:
    w = student((8, 512), torch.Generator().manual_seed(1))
    grid = fmt.fit(w, how=how)
    codes = fmt.encode(w, grid)
    said = fmt.decode(codes, grid)
    blocks = fmt.pack(codes, grid)["blocks"]
    assert torch.equal(judged(fmt, blocks.numpy()).reshape(8, 512), said)
    theirs = judged_by_gguf(fmt, blocks)
    assert theirs is None or torch.equal(theirs, said)


# --- degenerate blocks


def error_of(fmt: Format, w: Tensor, importance: Tensor | None = None, how: formats.How = "search") -> Tensor:
    out = kernels.decode(fmt, rtn.quantize(w, fmt, importance, how), (w.shape[0], w.shape[1]))
    assert out.isfinite().all()
    square = (out - w).double().square()
    return (square if importance is None else square * importance).sum()


@with_float16
@pytest.mark.parametrize("size", [1e-5, 1e-6])
def test_tiny_weights_do_not_vanish_where_float16_scales_run_out(fmt: Format, size: float) -> None:
    w = torch.randn(4, 512, generator=torch.Generator().manual_seed(2)) * size
    assert error_of(fmt, w) < w.double().square().sum()
    # Codes times 2^-24 are all that such a scale can say: what is kept is the nearest multiple, unless it is beyond the last level.
    if fmt.levels is None:
        return  # points times 2^-24 reach no further than 5e-7
    levels = torch.tensor(fmt.levels)
    reach = levels.abs().max() * 2.0**-24
    nearest = ((w / 2.0**-24).unsqueeze(-1) - levels).abs().amin(-1) * 2.0**-24
    if w.abs().max() <= reach:
        assert error_of(fmt, w) <= nearest.double().square().sum() * (1 + 1e-6)


@every_type
@pytest.mark.parametrize("size", [0.0, 1e-40, 1e-20, 1e10, 1e19, 1e30, 3e38])
def test_weights_of_any_size_stay_finite(fmt: Format, size: float) -> None:
    w = torch.rand(2, 512, generator=torch.Generator().manual_seed(3)).sub_(0.5).mul_(size)
    for importance in (None, torch.rand(512)):
        for how in ("max", "search"):
            out = kernels.decode(fmt, rtn.quantize(w, fmt, importance, how), (2, 512))
            assert out.isfinite().all()


@every_type
def test_columns_that_are_never_used_still_get_their_scales(fmt: Format) -> None:
    w = torch.randn(4, 512, generator=torch.Generator().manual_seed(4))
    importance = torch.ones(512)
    importance[:256] = 0
    # equal importance is searched in 16 bits like any other, none at all with other trials: two good searches, not one
    assert torch.isclose(error_of(fmt, w, importance), error_of(fmt, w[:, 256:]), rtol=1e-3)
    assert error_of(fmt, w[:, :256], torch.zeros(256)) == 0
    unused = kernels.decode(fmt, rtn.quantize(w, fmt, importance), (4, 512))[:, :256] - w[:, :256]
    assert unused.double().square().sum() <= 1.05 * error_of(fmt, w[:, :256])


@every_type
def test_the_search_is_deterministic_and_rows_do_not_touch_each_other(fmt: Format) -> None:
    w = student((7, 512), torch.Generator().manual_seed(5))
    importance = torch.rand(512, generator=torch.Generator().manual_seed(5))
    whole = rtn.quantize(w, fmt, importance)["blocks"]
    assert torch.equal(whole, rtn.quantize(w, fmt, importance)["blocks"])
    assert torch.equal(whole, torch.cat([rtn.quantize(row, fmt, importance)["blocks"] for row in w.split(1)]))


@pytest.mark.parametrize("name", ["q8_0", "q4_1", "q4_k", "q6_k", "iq4_nl", "q1_0", "q2_0", "iq1_s", "iq2_xs", "iq3_s"])
def test_the_number_of_threads_changes_no_byte(name: str) -> None:
    fmt, source = formats.get(name), torch.Generator().manual_seed(8)
    w, importance = student((64, 2048), source), torch.rand(2048, generator=source)  # torch splits from 32,768 weights on
    alone = rtn.quantize(w, fmt, importance)["blocks"]
    try:
        torch.set_num_threads(3)
        assert torch.equal(rtn.quantize(w, fmt, importance)["blocks"], alone)
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("name, code, activations", [("tq2_0", 3, "q8_K"), ("q8_0", 0, "q8_0")])
def test_ggmls_dot_product_knows_the_level_that_its_own_quantizer_leaves_unused(name: str, code: int, activations: str) -> None:
    fmt, source, n = formats.get(name), torch.Generator().manual_seed(9), 1024
    grid: dict[str, Tensor] = {"d": torch.randn(1, n // fmt.block, generator=source).half()}
    codes = torch.randint(0, len(fmt.levels or ()), (1, n), generator=source, dtype=torch.uint8)
    codes[:, ::3] = code
    stored, x = fmt.pack(codes, grid)["blocks"].numpy(), torch.randn(n, generator=source)
    lib, rounded, result = ggml.library(), np.zeros(2 * n, np.uint8), np.zeros(1, np.float32)
    lib.ggml_cpu_init()  # fills its table of float16 values
    getattr(lib, f"quantize_row_{activations}_ref")(*map(ctypes.c_void_p, (x.data_ptr(), rounded.ctypes.data)), ctypes.c_int64(n))
    at = [ctypes.c_void_p(array.ctypes.data) for array in (result, stored, rounded)]
    zero = ctypes.c_size_t(0)
    dot = getattr(lib, f"ggml_vec_dot_{name}_{activations}")
    dot.restype = None
    dot(ctypes.c_int(n), at[0], zero, at[1], zero, at[2], zero, ctypes.c_int(1))
    w = kernels.decode(fmt, {"blocks": torch.from_numpy(stored)}, (1, n))[0]
    # activations are rounded to 8 bits: to half of a 127th of the largest of them
    assert abs(result[0] - (w @ x).item()) <= (w.abs().sum() * x.abs().max() / 254).item()
    assert abs(result[0] - (w @ x).item()) < 0.02 * (w.norm() * x.norm()).item()  # a level misread would be off by far more
