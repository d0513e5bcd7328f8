"""Products with one order of their sums: the same bits by every instruction set, and in torch."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from test_error_feedback import ISAS
from torch import Tensor

from fewbits.devices import processor
from fewbits.methods.error_feedback import product


def drawn(*shape: int, seed: int = 0) -> Tensor:
    """Over eight decades: another order of sums is another result."""
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g) * torch.randn(*shape, generator=g).mul(3).exp()


def rounded_once(exact: Fraction) -> np.float32:
    """The float32 nearest to it; of two that are as near the even one."""
    guess = np.float32(float(exact))
    near = [np.nextafter(guess, np.float32(end)) for end in (-np.inf, np.inf)] + [guess]
    return min(near, key=lambda each: (abs(Fraction(float(each)) - exact), int(each.view(np.uint32)) & 1))


def test_a_fused_sum_is_rounded_once() -> None:
    a, b, c = drawn(3, 400)
    c[::2] = -(a * b)[::2]  # all but the last digits cancel
    c[1::4] = 1 + 2.0**-23
    a[1::4], b[1::4] = 2.0**-24 * (1 + 2.0**-23), 1 - 2.0**-23  # just below the middle of two, which is where float64 puts it
    wanted = [
        rounded_once(Fraction(x) * Fraction(y) + Fraction(z)) for x, y, z in zip(*(t.double().tolist() for t in (a, b, c)), strict=True)
    ]
    assert product.fused(a, b, c).tolist() == [float(value) for value in wanted]
    assert not torch.equal((a.double() * b.double() + c.double()).float(), product.fused(a, b, c))


@pytest.mark.skipif(not ISAS, reason="no native module")
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("rows", "terms", "lanes"), [(1, 1, 1), (32, 32, 32), (13, 192, 16), (9, 193, 33), (3, 500, 70)])
def test_native_products_are_those_of_the_reference(isa: str, rows: int, terms: int, lanes: int) -> None:
    whole, errors, base = drawn(rows, terms + 5), drawn(terms, lanes, seed=1), drawn(rows, lanes, seed=2)
    coupling = whole[:, 2 : terms + 2]  # a part of a larger matrix
    for start in (None, base):
        assert torch.equal(product.added(start, coupling, errors, isa), product.added(start, coupling, errors, None))


@pytest.mark.parametrize(
    ("terms", "parts"),
    [(192, [192]), (193, [96, 96, 1]), (250, [125, 125]), (384, [192, 192]), (386, [192, 192, 2]), (500, [192, 192, 116])],
)
def test_sums_are_cut_into_parts(terms: int, parts: list[int]) -> None:
    coupling, errors, base = drawn(1, terms), drawn(terms, 1, seed=1), drawn(1, 1, seed=2)
    total = base.clone()
    for some in torch.arange(terms).split(parts):
        part = torch.zeros(1, 1)
        for k in some.tolist():
            part = product.fused(coupling[:, k : k + 1], errors[k : k + 1], part)
        total = total + part
    assert torch.equal(product.added(base, coupling, errors, None), total)


def test_no_terms_add_nothing() -> None:
    base = drawn(3, 4)
    for isa in (*ISAS, None):
        assert torch.equal(product.added(base, torch.empty(3, 0), torch.empty(0, 4), isa), base)
        assert not product.added(None, torch.empty(3, 0), torch.empty(0, 4), isa).any()


@pytest.mark.skipif(not ISAS, reason="no native module")
def test_matrices_that_do_not_belong_together_are_refused() -> None:
    multiply, isa = processor.native().product, ISAS[0]
    a, b, out = torch.ones(2, 3), torch.ones(3, 4), torch.ones(2, 4)
    for coupling, errors, into in ((a, b[:2], out), (a, b, out[:1]), (b.T, a.T.contiguous(), torch.ones(4, 2))):
        with pytest.raises(ValueError, match=r"belong together|in one piece"):
            multiply(isa, coupling.numpy(), errors.contiguous().numpy(), None, into.numpy())
