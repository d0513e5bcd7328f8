"""The loop over blocks in native code gives the bytes of the loop in torch, for every format, on one side and on both."""

from __future__ import annotations

import pytest
import torch
from enumerated import each_kind
from test_error_feedback import ISAS, inputs, same, weights, width
from torch import Tensor

from fewbits import formats
from fewbits.devices import processor
from fewbits.formats import Format
from fewbits.kernels.quantize import fitter
from fewbits.methods import error_feedback
from fewbits.methods.error_feedback import native, outputs

pytestmark = pytest.mark.skipif(not ISAS, reason="no native module")
quantized = pytest.mark.parametrize("fmt", each_kind(f for f in formats.all().values() if not f.is_cast))
SEARCHED_IN_TORCH = ("affine", "nvfp4", "mxfp8", "q1_0", "q3_s6")  # and integers with zero points


def two_blocks(fmt: Format, rows: int) -> tuple[Tensor, Tensor]:
    cols = 64 if fmt.group is None else 2 * width(fmt, 0)
    return weights(rows, cols), inputs(cols)


def solved(fmt: Format, w: Tensor, h: Tensor, sides: int) -> error_feedback.Solved:
    if sides == 1:
        return error_feedback.solve(w, fmt, h)
    moment = inputs(len(w), seed=1).float()
    return error_feedback.solve_both_sides(w, fmt, h, outputs.coupled(moment, w.square().mean(1), 0.1))


@pytest.mark.parametrize("sides", [1, 2])
@quantized
def test_it_gives_the_bytes_of_the_loop_in_torch(fmt: Format, sides: int, monkeypatch: pytest.MonkeyPatch) -> None:
    w, h = two_blocks(fmt, rows=70)  # more than the 64 rows of a strip
    fast = solved(fmt, w, h, sides)
    monkeypatch.setattr(native, "solve", lambda *_: None)
    assert same(fast, solved(fmt, w, h, sides))


@quantized
def test_which_formats_it_knows(fmt: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    w, h = two_blocks(fmt, rows=3)
    results, solve = [], native.solve
    monkeypatch.setattr(native, "solve", lambda *given: results.append(solve(*given)) or results[-1])
    error_feedback.solve(w, fmt, h)
    in_torch = fmt.group is not None and (fmt.name.startswith(SEARCHED_IN_TORCH) or fmt.name.endswith("_asym"))
    assert [result is None for result in results] == [in_torch]


@pytest.mark.parametrize("name", ["q4_0", "q5_1", "q3_k", "q4_k", "mxfp4", "iq4_xs", "iq2_s", "iq1_s", "iq1_m"])
def test_every_instruction_set_gives_the_same_bytes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fmt = formats.get(name)
    w, h = two_blocks(fmt, rows=41)
    w[5], w[6, ::2] = 0, -0.0
    found = []
    for isa in ISAS:
        monkeypatch.setenv("FEWBITS_KERNEL", isa)
        found.append(error_feedback.solve(w, fmt, h))
    assert all(same(other, found[0]) for other in found)


@pytest.mark.parametrize("name", ["q4_0", "q4_k", "int8_channel", "iq2_xs"])
def test_shares_of_rows_do_not_change_the_bytes(name: str) -> None:
    fmt = formats.get(name)
    w, h = two_blocks(fmt, rows=83)
    one = error_feedback.solve(w, fmt, h)
    torch.set_num_threads(3)
    try:
        assert same(error_feedback.solve(w, fmt, h), one)
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("name", ["q4_0", "iq2_xs"])
def test_no_row_depends_on_another(name: str) -> None:
    fmt = formats.get(name)
    w, h = two_blocks(fmt, rows=70)
    whole, some = error_feedback.solve(w, fmt, h), error_feedback.solve(w[40:45], fmt, h)
    assert torch.equal(whole.codes[40:45], some.codes)


def test_values_beyond_all_numbers_are_left_to_torch() -> None:
    """Errors of such a weight are infinite in some column, and so are the values that the next block is fitted to."""
    fmt = formats.get("q4_0")
    w, h = two_blocks(fmt, rows=3)
    order = error_feedback.ordered(h, 32, "blocks", 0.03, torch.float32)
    w[1] = 3e38
    assert native.solve(w, fmt, order, None, 2, 1, ISAS[0]) is None
    assert error_feedback.solve(w, fmt, h).codes.shape == w.shape


def test_arrays_that_do_not_belong_together_are_refused() -> None:
    fmt = formats.get("q4_0")
    w, h = two_blocks(fmt, rows=5)
    order, found = error_feedback.ordered(h, 32, "blocks", 0.03, torch.float32), fitter(fmt, 32)
    assert found
    table = error_feedback.columns.table(fmt.levels).arrays
    feed_back, isa, search = processor.native().feed_back, ISAS[0], found[0]

    def call(w: Tensor = w, rows: int = 5, fields: int = 4, **other: object) -> None:
        codes, grid = torch.empty(rows, 64, dtype=torch.uint8), [torch.empty(rows, fields, dtype=torch.uint8).numpy()]
        given: dict[str, object] = {
            "order": order.native,
            "fitter": search,
            "levels": table,
            "passes": 1,
            "refits": 1,
            "scale": None,
            "offset": None,
        }
        given |= {"codes": codes.numpy(), "grid": grid, "threads": 1} | other
        feed_back(isa=isa, w=w.numpy(), **given)

    call()
    scales = torch.ones(5, 64).numpy()
    for wrong in (
        {"w": w[:, :32].contiguous()},
        {"rows": 4},
        {"fields": 3},
        {"grid": []},
        {"scale": scales},
        {"fitter": None},
        {"fitter": fitter(formats.get("q2_0"), 64)[0]},  # type: ignore[index]
        {"levels": (table[0][:3], *table[1:])},
    ):
        with pytest.raises(ValueError, match=r"\w"):
            call(**wrong)  # type: ignore[arg-type]
    first = error_feedback.ordered(h, 32, "blocks", 0.03, torch.float32, passes=0)
    with pytest.raises(ValueError, match="later passes"):
        call(order=first.native)
