"""The solver against brute force on everything small, and against HiGHS, which shares no line with it, on what is not."""

from __future__ import annotations

import itertools
import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from fewbits.planning.solver import Option, solve

# values of one or two digits meet in ties and in equal sums; floats of any size test rounding
small = st.integers(0, 20).map(float)
wide = st.floats(1e-9, 1e3)
costs = st.integers(0, 60)


def groups(values: st.SearchStrategy[float]) -> st.SearchStrategy[list[list[Option]]]:
    return st.lists(st.lists(st.builds(Option, values, costs), min_size=1, max_size=4), min_size=1, max_size=5)


def brute_force(items: list[list[Option]], limit: float) -> float | None:
    sums = ((math.fsum(o.value for o in pick), sum(o.cost for o in pick)) for pick in itertools.product(*items))
    return min((value for value, cost in sums if cost <= limit), default=None)


@given(st.one_of(groups(small), groups(wide)), st.integers(0, 200))
@settings(max_examples=600, deadline=None)
def test_the_best_of_all_small_instances(items: list[list[Option]], limit: int) -> None:
    best, found = brute_force(items, limit), solve(items, limit, gap=0.0)
    assert (found is None) == (best is None)
    if found is not None and best is not None:
        assert found.cost <= limit and found.gap == 0
        assert found.value == pytest.approx(best, rel=1e-11, abs=1e-300)
        assert found.cost == sum(options[i].cost for options, i in zip(items, found.chosen, strict=True))


@given(groups(wide), st.floats(0, 3000))
@settings(max_examples=300, deadline=None)
def test_a_limit_in_floats_is_kept(items: list[list[Option]], limit: float) -> None:
    """Size under a limit of damage: the same problem with value and cost exchanged."""
    turned = [[Option(o.cost, o.value) for o in options] for options in items]
    best, found = brute_force(turned, limit), solve(turned, limit, gap=0.0)
    near = brute_force(turned, limit * (1 - 1e-11))  # a sum within rounding of the limit may be taken as over it
    assert found is None or found.cost <= limit
    assert (found.value if found else None) in (best, near)


@given(st.one_of(groups(small), groups(wide)), st.integers(0, 120), st.integers(0, 80))
@settings(max_examples=200, deadline=None)
def test_more_bytes_never_raise_the_damage(items: list[list[Option]], limit: int, more: int) -> None:
    before, after = solve(items, limit), solve(items, limit + more)
    if before is not None:
        assert after is not None
        assert after.value <= before.value * (1 + 2e-6)  # each is proven to a gap of 1e-6


def realistic(weights: int, seed: int) -> tuple[list[list[Option]], int]:
    """As planning sees it: 16 formats, damage halving twice with each bit, weights of four shapes and very different sensitivity."""
    rng = np.random.default_rng(seed)
    bits = np.array([2.06, 2.625, 3.4375, 4.25, 4.25, 4.5, 4.5, 4.5, 5.0, 5.5, 5.5, 6.0, 6.5625, 8.5, 16, 16])
    sizes = rng.choice([192 * 576, 576 * 576, 576 * 1536], weights)
    damage = np.exp(rng.normal(0, 2, weights))[:, None] * 2.0 ** (-2 * bits) * np.exp(rng.normal(0, 0.2, (weights, len(bits))))
    nbytes = np.round(sizes[:, None] * bits / 8).astype(int)
    items = [[Option(float(d), int(b)) for d, b in zip(*row, strict=True)] for row in zip(damage, nbytes, strict=True)]
    return items, int(sizes.sum() * rng.uniform(2.3, 7) / 8)


@pytest.mark.parametrize("seed", range(5))
def test_highs_finds_nothing_better(seed: int) -> None:
    items, limit = realistic(60, seed)
    found = solve(items, limit)
    assert found is not None and found.cost <= limit and found.gap <= 1.001e-6
    flat = [o for options in items for o in options]
    starts = np.cumsum([0, *(len(options) for options in items)])
    each = csr_array((np.ones(len(flat)), np.arange(len(flat)), starts), shape=(len(items), len(flat)))
    room = LinearConstraint(np.array([[o.cost / 1e5 for o in flat]]), -np.inf, limit / 1e5)
    values = np.array([o.value for o in flat]) * 1e3 / found.value  # of a size that its tolerances are made for
    one_each, whole = LinearConstraint(each, 1, 1), {"mip_rel_gap": 1e-7}
    theirs = milp(values, integrality=np.ones(len(flat)), bounds=Bounds(0, 1), constraints=[one_each, room], options=whole)
    assert theirs.status == 0
    assert theirs.fun == pytest.approx(1e3, rel=3e-6)  # the two gaps, and its tolerance of 1e-6 on sums of at most 1


def test_a_thousand_weights_take_no_time() -> None:
    """The bar is 1 % of measuring them; half a second is far below. Most of it is the loop over options."""
    items, limit = realistic(1000, 7)
    solve(items[:50], limit)
    start = time.perf_counter()
    found = solve(items, limit)
    assert found is not None and found.gap <= 1e-6
    assert time.perf_counter() - start < 3  # about 0.1 on an idle core


def test_an_empty_model_and_an_impossible_limit() -> None:
    assert solve([], 10) is not None
    assert solve([[Option(1.0, 5)], [Option(1.0, 6)]], 10) is None
    exact = solve([[Option(1.0, 5)], [Option(1.0, 6)]], 11)
    assert exact is not None and exact.cost == 11
