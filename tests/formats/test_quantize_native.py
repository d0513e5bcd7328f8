"""Quantizing in one native call: the bytes of torch's fit, encode and pack, and an error no higher than ggml's."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from fewbits import embedded, formats
from fewbits.devices import processor
from fewbits.formats import Format
from fewbits.kernels import quantize

Parts = dict[str, Tensor]
ISAS = [] if processor.native_missing() else list(processor.native().search_isas())
pytestmark = pytest.mark.skipif(not ISAS, reason="there is no native module")

GGML_NAMES = {
    **{name: name for name in ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "iq4_nl", "iq4_xs", "mxfp4", "q2_0")},
    **{f"q{bits}_k": f"q{bits}_K" for bits in (2, 3, 4, 5, 6)},
}
INTEGERS = tuple(f"int{bits}_g{group}" for bits in (4, 8) for group in (32, 64, 128))


def _served(names: tuple[str, ...]) -> list[str]:
    return [name for name in names if ISAS and processor.native().packs(name)]


NAMES = _served((*GGML_NAMES, *INTEGERS))


def _random(shape: tuple[int, int], seed: int) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(seed)
    return 0.02 * torch.randn(shape, generator=made), (1.2 * torch.randn(shape[1], generator=made)).exp()


def _slowly(monkeypatch: pytest.MonkeyPatch, fmt: Format, w: Tensor, importance: Tensor | None) -> Parts:
    """torch's own, step by step."""
    with monkeypatch.context() as forced:
        forced.setenv("FEWBITS_KERNEL", "reference")
        grid = fmt.fit(w, importance)
        return fmt.pack(fmt.encode(w, grid, importance), grid)


def _quickly(monkeypatch: pytest.MonkeyPatch, isa: str, fmt: Format, w: Tensor, importance: Tensor | None) -> Parts | None:
    with monkeypatch.context() as forced:
        forced.setenv("FEWBITS_KERNEL", isa)
        return quantize.quantize(fmt, w, importance)


def _are_equal(ours: Parts | None, theirs: Parts) -> bool:
    assert ours is not None
    return list(ours) == list(theirs) and all(torch.equal(ours[name].view(torch.uint8), theirs[name].view(torch.uint8)) for name in theirs)


def _special(shape: tuple[int, int]) -> Tensor:
    """Rows of zeros, of ties, of one value, of one sign, with outliers and infinities, too small and too large for a float16 scale."""
    w = _random(shape, 1)[0].repeat(3, 1)[:12].clone()
    w[0], w[1], w[2] = 0.0, -0.0, 0.37
    w[3] = (w[3] * 400).round() / 8
    w[4], w[5] = w[4].abs(), -w[5].abs() - 1
    w[6, ::37] = 1e3
    w[7, 5] = torch.inf
    w[8], w[9] = w[8] * 1e-6, w[9] * 1e-40
    w[10], w[11] = w[10] * 1e8, w[11] * 1e30
    return w


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", NAMES)
def test_the_bytes_are_those_of_torch(monkeypatch: pytest.MonkeyPatch, name: str, isa: str) -> None:
    fmt = formats.get(name)
    w, importance = _random((5, 3 * fmt.block), 2)
    special = _special((5, 2 * fmt.block))
    if name == "mxfp4":
        special[7, 5] = 3e38  # what an infinity's exponent is, is torch's affair
    for weights in (w, special):
        for weigh in (None, importance[: weights.shape[1]]):
            assert _are_equal(_quickly(monkeypatch, isa, fmt, weights, weigh), _slowly(monkeypatch, fmt, weights, weigh))


@pytest.mark.parametrize("name", NAMES)
def test_threads_and_the_number_of_rows_change_no_byte(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    fmt = formats.get(name)
    w, importance = _random((61, 5 * fmt.block if fmt.block > 64 else 1280), 3)
    whole = quantize.quantize(fmt, w, importance)
    assert whole is not None
    one_row = quantize.quantize(fmt, w[33:34], importance)
    assert one_row is not None and all(torch.equal(one_row[part][0], whole[part][33]) for part in whole)
    for threads in (2, 7):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert _are_equal(quantize.quantize(fmt, w, importance), whole)


@pytest.mark.parametrize("isa", ISAS)
def test_a_weight_in_the_middle_of_two_levels_gets_the_code_that_division_gives(monkeypatch: pytest.MonkeyPatch, isa: str) -> None:
    """Native code multiplies by the inverse of a scale, and divides where that might round otherwise."""
    fmt, made = formats.get("q4_0"), torch.Generator().manual_seed(4)
    scale = 10 ** torch.empty(400, 1).uniform_(-4, 2, generator=made).half().float()
    middles = (
        scale * (torch.randint(-8, 8, (400, 32), generator=made) + 0.5) * (1 + torch.randint(-3, 4, (400, 32), generator=made) * 2.0**-24)
    )
    middles[:, 0] = -8 * scale[:, 0]
    assert _are_equal(_quickly(monkeypatch, isa, fmt, middles, None), _slowly(monkeypatch, fmt, middles, None))


def test_what_native_code_does_not_know_is_left_to_others() -> None:
    w = torch.randn(4, 512)
    assert quantize.quantize(formats.get("fp16"), w) is None
    assert quantize.quantize(formats.get("int8_channel"), w) is None
    assert quantize.quantize(formats.get("q4_0"), w.double()) is None
    assert quantize.quantize(formats.get("q4_0"), w[:, :33]) is None
    w[2, 3] = torch.inf
    assert quantize.quantize(formats.get("mxfp4"), w) is None
    w[2, 3] = torch.nan
    assert quantize.quantize(formats.get("q4_0"), w) is None


def test_arrays_that_do_not_belong_together_are_refused() -> None:
    search, codes = quantize._search(formats.get("q4_0"), False)[1:]  # type: ignore[index]
    w, out = torch.randn(4, 64).numpy(), torch.empty(4, 36, dtype=torch.uint8).numpy()
    native = processor.native()
    assert native.quantize("scalar", "q4_0", w, None, 32, search, codes, [out], 1)
    for wrong in (
        ("scalar", "q4_0", w, torch.ones(63).numpy(), 32, search, codes, [out], 1),
        ("scalar", "q4_0", w, None, 48, search, codes, [out], 1),
        ("scalar", "q4_0", w, None, 32, search, codes, [out[:, :35].copy()], 1),
        ("scalar", "q4_0", w, None, 32, search, codes, [out[:3]], 1),
        ("scalar", "q4_0", w, None, 32, search, codes, [], 1),
        ("scalar", "q9_9", w, None, 32, search, codes, [out], 1),
        ("mmx", "q4_0", w, None, 32, search, codes, [out], 1),
    ):
        with pytest.raises(ValueError):
            native.quantize(*wrong)
    with pytest.raises(ValueError):
        native.scale_search(12, -128, 127, [], [], 1.0, True, True, [], [])  # places beyond 16 bits
    with pytest.raises(ValueError):
        native.scale_search(5, 0, 100, [0, 1, 100], [16, 17], 1.0, True, True, [], [])  # two thresholds in a cell


def _kinds() -> dict[str, tuple[Tensor, Tensor]]:
    made = torch.Generator().manual_seed(5)
    normal, importance = _random((48, 512), 5)
    tails = torch.stack([torch.randn(48, 512, generator=made) for _ in range(4)]).square().mean(0).sqrt()  # Student's t, 4 degrees
    with safe_open(embedded.MODEL / "model.safetensors", "pt") as stored:
        matrices = (stored.get_tensor(name).float() for name in sorted(stored.keys()) if "mlp" in name or "attn" in name)
        real = next(w for w in matrices if w.ndim == 2 and w.shape[1] % 256 == 0 and len(w) >= 48)[:48]
    return {"normal": (normal, importance), "heavy": (normal / tails, importance), "real": (real, importance.repeat(4)[: real.shape[1]])}


@pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None, reason="pip install fewbits[llamacpp]")
@pytest.mark.parametrize("name", _served(tuple(GGML_NAMES)))
def test_the_error_is_no_higher_than_ggmls(name: str) -> None:
    from fewbits.benchmarks.peers import ggml

    fmt = formats.get(name)
    for kind, (w, importance) in _kinds().items():
        for weigh in (None, importance):
            parts = quantize.quantize(fmt, w, weigh)
            assert parts is not None

            def error(stored: Tensor) -> float:
                decoded = torch.from_numpy(ggml.dequantize(GGML_NAMES[name], stored.flatten().numpy(), w.numel())).reshape(w.shape)  # noqa: B023
                square = (decoded - w).double().square()  # noqa: B023
                return (square if weigh is None else square * weigh).sum().item()  # noqa: B023

            theirs = ggml.quantize(GGML_NAMES[name], w.numpy(), None if weigh is None else weigh.numpy())
            assert error(parts["blocks"]) <= error(torch.from_numpy(theirs)), kind
