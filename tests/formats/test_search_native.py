"""The native searches for scales against torch's: the same bits, so that no file depends on which of them ran."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from fewbits import formats
from fewbits.devices import processor
from fewbits.formats.search import fit_scale, fit_scale_and_min, long_rows, native
from fewbits.formats.search.superblocks import fit_two_level_scale, fit_two_level_scale_and_min

ISAS = [] if processor.native_missing() else list(processor.native().search_isas())
pytestmark = pytest.mark.skipif(not ISAS, reason="there is no native module")

SIGNED = {bits: tuple(float(level) for level in range(-(1 << bits - 1), 1 << bits - 1)) for bits in range(2, 9)}
CASES = {
    **{f"int{bits}": (levels, (levels[0], levels[-1])) for bits, levels in SIGNED.items()},
    "q8_0": (SIGNED[8][1:], (127.0,)),
    "int8": (SIGNED[8], (127.0,)),
    "iq4_nl": (formats.get("iq4_nl").levels, formats.get("iq4_nl").ends),
    "e2m1": ((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0), (6.0,)),
    "no zero": ((-3.0, -1.0, 1.0, 3.0), (-3.0, 3.0)),
}
SIZES = (2, 10, 32, 256, 576)  # beyond 256 sums are of floats
FEW_SIZES = (40,)
GROUPS = 37  # two whole tiles of sixteen, four of eight, and one that is not


def _weights(n: int, seed: int) -> Iterator[Tensor]:  # (groups, n) each
    """Normal weights of every magnitude that float32 has, and what is not normal."""
    made = torch.Generator().manual_seed(seed)
    x = torch.randn(GROUPS, n, generator=made)
    yield x * 0.02
    yield x * 10 ** torch.empty(GROUPS, 1).uniform_(-44, 37, generator=made)  # subnormal to clamped
    yield x * 10 ** torch.empty(GROUPS, n).uniform_(-9, 3, generator=made)
    yield x * 2.0**-24 * torch.empty(GROUPS, 1).uniform_(0, 40, generator=made)  # scales about the smallest float16
    outlier = x.clone()
    outlier[:, n // 2] = 1e3
    outlier[::2, n - 1] = torch.inf
    yield outlier
    special = x.abs() + 1  # of one sign, as the others are not
    special[1::2] *= -1
    special[0], special[1], special[2] = 0.0, -0.0, 0.37
    special[3] = torch.where(x[3] > 0, 0.0, -0.0)
    special[4], special[4, 0] = 0.0, -2.5
    special[5], special[5, -1] = -0.0, 1e-40
    special[6] = (x[6] * 2).round() / 2  # ties
    special[7] = -65504.0 * 9
    yield special


def _importances(n: int, seed: int) -> Iterator[Tensor | None]:
    made = torch.Generator().manual_seed(seed)
    yield None
    each = torch.rand(GROUPS, n, generator=made) * 10 ** torch.empty(GROUPS, n).uniform_(-6, 3, generator=made)
    each[torch.rand(GROUPS, n, generator=made) < 0.3] = 0.0
    yield each


def _both(monkeypatch: pytest.MonkeyPatch, isa: str, search: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
    """What native code and torch find, as bits: a zero has a sign in a file."""
    asked: set[str | None] = set()
    chosen = native.isa

    def noted() -> str | None:
        asked.add(chosen())
        return chosen()

    monkeypatch.setattr(native, "isa", noted)
    results = []
    for kernel in (isa, "reference"):
        monkeypatch.setenv("FEWBITS_KERNEL", kernel)
        results.append(search().view(torch.int32))
    monkeypatch.setattr(native, "isa", chosen)
    assert asked == {isa, None}
    return results[0], results[1]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", CASES)
def test_a_scale_has_the_bits_that_torch_finds(monkeypatch: pytest.MonkeyPatch, name: str, isa: str) -> None:
    levels, ends = CASES[name]
    for n in SIZES if name in ("int4", "iq4_nl") and isa == ISAS[0] else FEW_SIZES:
        for x in _weights(n, n):
            for importance in _importances(n, n):
                ours, theirs = _both(monkeypatch, isa, lambda: fit_scale(x, levels, ends, importance))  # noqa: B023
                assert torch.equal(ours, theirs)


@pytest.mark.parametrize("isa", ISAS)
def test_a_scale_that_is_not_rounded_has_the_bits_that_torch_finds(monkeypatch: pytest.MonkeyPatch, isa: str) -> None:
    for name in ("int4", "iq4_nl"):
        for x in _weights(32, 5):
            for importance in _importances(32, 5):
                ours, theirs = _both(monkeypatch, isa, lambda: fit_scale(x, *CASES[name], importance, store=lambda scale: scale))  # noqa: B023
                assert torch.equal(ours, theirs)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("float16", [True, False])
@pytest.mark.parametrize("top", [1, 15, 31])
def test_a_scale_and_a_minimum_have_the_bits_that_torch_finds(monkeypatch: pytest.MonkeyPatch, top: int, float16: bool, isa: str) -> None:
    for n in SIZES[:-1] if top == 15 and isa == ISAS[0] else FEW_SIZES:
        for x in _weights(n, n):
            for importance in _importances(n, n):
                ours, theirs = _both(monkeypatch, isa, lambda: torch.stack(fit_scale_and_min(x, top, importance, float16=float16)))  # noqa: B023
                assert torch.equal(ours, theirs)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("per_super, n", [(8, 32), (16, 16), (3, 10)])
def test_sub_scales_have_the_bits_that_torch_finds(monkeypatch: pytest.MonkeyPatch, per_super: int, n: int, isa: str) -> None:
    levels, _ = CASES["int3" if n == 16 else "iq4_nl"]
    for x in _weights(per_super * n, n):
        for importance in _importances(per_super * n, n):
            groups = x.reshape(GROUPS, per_super, n)
            weight = None if importance is None else importance.reshape(-1, per_super, n)

            def fit() -> Tensor:
                wanted = fit_scale(groups, levels, (levels[0], levels[-1]), weight, store=lambda scale: scale)  # noqa: B023
                sub, d = fit_two_level_scale(groups, levels, wanted, per_super, range(-32, 32), weight)  # noqa: B023
                return torch.cat([sub.short(), d.view(torch.int16)], 1).int()

            ours, theirs = _both(monkeypatch, isa, fit)
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("per_super, n, top, largest", [(8, 32, 15, 63), (16, 16, 3, 15), (3, 10, 31, 63)])
def test_sub_scales_and_minima_have_the_bits_that_torch_finds(
    monkeypatch: pytest.MonkeyPatch, per_super: int, n: int, top: int, largest: int, isa: str
) -> None:
    for x in _weights(per_super * n, n):
        for importance in _importances(per_super * n, n):
            groups = x.reshape(GROUPS, per_super, n)
            weight = None if importance is None else importance.reshape(-1, per_super, n)

            def fit() -> Tensor:
                wanted = fit_scale_and_min(groups, top, weight)  # noqa: B023
                *subs, d, dmin = fit_two_level_scale_and_min(groups, top, *wanted, per_super, largest, weight)  # noqa: B023
                return torch.cat([*(sub.short() for sub in subs), d.view(torch.int16), dmin.view(torch.int16)], 1).int()

            ours, theirs = _both(monkeypatch, isa, fit)
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("shape", [(1, 4, 32), (5, 1, 32), (1, 1, 1), (5, 4, 1), (4, 32), (32,)])
def test_an_importance_is_broadcast_as_torch_does(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], isa: str) -> None:
    made = torch.Generator().manual_seed(0)
    x, importance = torch.randn(5, 4, 32, generator=made), torch.rand(shape, generator=made)
    ours, theirs = _both(monkeypatch, isa, lambda: fit_scale(x, *CASES["int4"], importance))
    assert ours.shape == (5, 4)
    assert torch.equal(ours, theirs)


def test_threads_and_strides_change_no_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    made = torch.Generator().manual_seed(0)
    w, importance = torch.randn(3000, 100, generator=made), torch.rand(1, 32, generator=made)
    expected = torch.cat([fit_scale(w[i : i + 1, 40:72].clone(), *CASES["int4"], importance) for i in range(0, 3000, 7)])
    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)
    assert torch.equal(fit_scale(w[:, 40:72], *CASES["int4"], importance)[::7], expected)


def test_what_is_not_a_number_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(20, 32, generator=torch.Generator().manual_seed(0))
    x[3, 5] = torch.nan
    ours, theirs = _both(monkeypatch, ISAS[0], lambda: fit_scale(x, *CASES["int4"]))
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", ["nf4", "half integers"])
def test_levels_that_native_code_does_not_know_are_left_to_torch(name: str) -> None:
    levels = {
        "nf4": (-1.0, -0.6961928, -0.5250731, 0.0, 0.4407098, 1.0),
        "half integers": (-1.5, -0.5, 0.5, 1.5),
    }[name]
    assert long_rows.native_scale(torch.ones(8, 32), levels, (levels[-1],), None) is None
