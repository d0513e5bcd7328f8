"""The search for the smallest file that is accurate enough, in made-up worlds: what a plan of predicted KL p measures is known there."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from fewbits.planning.accuracy import Thresholds
from fewbits.planning.rounds import ROUNDS, Round, SearchResult, search
from fewbits.verification.metrics import Verdict

LEAST = 1e-7  # what the best plan of these worlds is predicted at
# `search` stops once a passing plan uses 0.90 of its limit, or once what passed and what failed are within 1.12 of each other
STOPS = 1.12


def verdict(kl: float, agreement: float, ppl_ratio: float, limits: Thresholds, nbytes: int) -> Verdict:
    failures = []
    if limits.max_kl is not None and kl > limits.max_kl:
        failures.append("KL")
    if limits.min_agreement is not None and agreement < limits.min_agreement:
        failures.append("agreement")
    if limits.max_ppl_ratio is not None and ppl_ratio > limits.max_ppl_ratio:
        failures.append("perplexity")
    return Verdict(
        tokens=1000, kl_mean=kl, kl_ci95=(kl, kl), kl_p99=kl, kl_max=kl, kl_floor=None, ppl=1.0, ppl_base=1.0, ppl_ratio=ppl_ratio,
        ppl_ratio_ci95=(ppl_ratio, ppl_ratio), top1_agreement=agreement, max_logit_diff=0.0, bytes=nbytes, bits_per_weight=4.0,
        runtime="none", runtime_version="0", thresholds=limits, failures=tuple(failures),
    )  # fmt: skip


@dataclass
class World:
    """KL = floor + a p^b, with noise; agreement and perplexity follow from it with factors of their own."""

    a: float = 1.0
    b: float = 1.0
    floor: float = 0.0
    noise: float = 0.0
    seed: int = 0
    disagreement: float = 0.55
    perplexity: float = 0.7
    grid: float = 0.0  # plans exist only at such steps of log p; 0: at all
    asked: list[float] = field(default_factory=list)
    made: list[float] = field(default_factory=list)

    def kl(self, p: float) -> float:
        return self.floor + self.a * p**self.b

    def plan(self, allowed: float) -> float:
        """The largest possible predicted KL within what is allowed."""
        if self.grid:
            return math.exp(math.floor(math.log(allowed) / self.grid + 1e-9) * self.grid)
        return allowed * 0.999  # the sum of single damages never meets the limit exactly

    def size(self, p: float) -> int:
        """A bit per weight less for four times the damage."""
        return int(1_000_000 * (8 - math.log(p / LEAST, 4) / 2))

    def attempt(self, limits: Thresholds) -> Callable[[float], Round | None]:
        rng = np.random.default_rng(self.seed)

        def make(allowed: float) -> Round | None:
            self.asked.append(allowed)
            p = self.plan(allowed)
            if p in self.made:
                return None
            self.made.append(p)
            kl = self.kl(p) * math.exp(rng.normal(0, self.noise))
            other = 1 - self.disagreement * math.sqrt(kl), math.exp(self.perplexity * kl)
            return Round(p, self.size(p), verdict(kl, *other, limits, self.size(p)))

        return make

    def run(self, limits: Thresholds, first: float, most: int = ROUNDS) -> SearchResult:
        found = search(first, limits, self.attempt(limits), LEAST, most)
        self.check(found, most)
        return found

    def check(self, found: SearchResult, most: int) -> None:
        """What holds in every world."""
        assert 1 <= len(found.rounds) <= most and len(found.rounds) == len(self.made) == len(set(self.made))
        assert len(self.asked) - len(self.made) in (0, 1)  # a plan that was made before ends it
        passed = [each.nbytes for each in found.rounds if each.passed]
        assert (found.best is None) == (not passed)
        if found.best is not None:
            assert found.rounds[found.best].passed and found.rounds[found.best].nbytes == min(passed)
        assert all(asked >= LEAST for asked in self.asked)

    def edge(self, kl: float) -> float:
        """The largest predicted KL that measures no more than this."""
        return ((kl - self.floor) / self.a) ** (1 / self.b)


@pytest.mark.parametrize("a", [0.1, 0.7, 1.0, 1.6, 12.0])
@pytest.mark.parametrize("b", [0.85, 1.0, 1.15])
@pytest.mark.parametrize("floor", [0.0, 1e-3])
def test_a_smooth_world_is_searched_to_its_edge(a: float, b: float, floor: float) -> None:
    world = World(a, b, floor)
    found = world.run(Thresholds(max_kl=0.01), first=0.01)
    assert found.best is not None
    # a share of 0.90 of the limit is left at most: in p that is the share to the power of 1 / b, of what is above the floor
    left = max(STOPS, ((0.01 - floor) / (0.9 * 0.01 - floor)) ** (1 / b)) / 0.999
    assert 1 <= world.edge(0.01) / found.rounds[found.best].predicted <= left * 1.001


def test_a_forecast_that_holds_takes_two_rounds() -> None:
    """The first is aimed at 0.88 of the limit, as measured KL is mostly a little above the forecast; any other needs one correction."""
    assert len(World(a=1.08).run(Thresholds(max_kl=0.01), first=0.01).rounds) == 1  # 0.95 of the limit: close enough
    assert len(World(a=1.25).run(Thresholds(max_kl=0.01), first=0.01).rounds) == 2
    assert len(World(a=0.6).run(Thresholds(max_kl=0.01), first=0.01).rounds) == 2


@pytest.mark.parametrize("seed", range(40))
def test_noise_costs_size_and_never_the_limit(seed: int) -> None:
    """3 %: what the interval of a verification is by default. Whatever is returned was measured to pass."""
    rng = np.random.default_rng(seed)
    world = World(a=float(np.exp(rng.normal(0, 0.5))), b=float(rng.uniform(0.9, 1.1)), noise=0.03, seed=seed)
    found = world.run(Thresholds(max_kl=0.02), first=0.02)
    assert found.best is not None
    # four standard deviations of the noise on either side of the edge, beside where the search stops anyway
    distance = world.edge(0.02) / found.rounds[found.best].predicted
    assert math.exp(-4 * 0.03 / world.b) <= distance <= STOPS ** (1 / world.b) * math.exp(4 * 0.03 / world.b)


@pytest.mark.parametrize(
    ("limits", "kl"),
    [
        (Thresholds(min_agreement=0.98), (0.02 / 0.7) ** 2),
        (Thresholds(max_ppl_ratio=1.004), math.log(1.004) / 0.5),
        (Thresholds(max_kl=5e-3, min_agreement=0.98, max_ppl_ratio=1.004), (0.02 / 0.7) ** 2),
        (Thresholds(max_kl=5e-4, min_agreement=0.98, max_ppl_ratio=1.004), 5e-4),
        (Thresholds(max_kl=5e-3, min_agreement=0.95, max_ppl_ratio=1.0002), math.log(1.0002) / 0.5),
    ],
)
def test_of_several_limits_the_strictest_is_met(limits: Thresholds, kl: float) -> None:
    """The world's factors, 0.7 and 0.5, are not those that planning begins with: the rounds learn them."""
    world = World(a=1.3, disagreement=0.7, perplexity=0.5)
    found = world.run(limits, first=3e-3)
    assert found.best is not None
    assert 1 - 1e-9 <= world.edge(kl) / found.rounds[found.best].predicted <= STOPS * 1.002


@pytest.mark.parametrize("grid", [0.05, 0.3, 1.0])
@pytest.mark.parametrize("a", [0.3, 1.0, 4.0])
def test_few_plans_are_searched_without_repeating_one(grid: float, a: float) -> None:
    world = World(a=a, grid=grid)
    found = world.run(Thresholds(max_kl=0.01), first=0.01)
    assert found.best is not None
    best = found.rounds[found.best].predicted
    # a plan is lost at most where the search stops, and where the last of the limit lies between two plans
    assert world.edge(0.01) / best <= STOPS * math.exp(grid) * 1.001


@pytest.mark.parametrize("floor", [0.02, 0.5])
@pytest.mark.parametrize("most", [1, 2, 5])
def test_a_limit_below_the_floor_ends_honestly(floor: float, most: int) -> None:
    world = World(floor=floor)
    found = world.run(Thresholds(max_kl=0.01), first=0.01, most=most)
    assert found.best is None and not any(each.passed for each in found.rounds)
    assert found.rounds[-1].predicted == min(each.predicted for each in found.rounds)  # it went on towards the best there is


def test_the_best_plan_there_is_gets_its_try() -> None:
    """A limit that only the very best plan meets: two rounds away from where the forecast says."""
    world = World(a=1e3)
    found = world.run(Thresholds(max_kl=1.2e-4), first=1e-6)
    assert found.best is not None and world.kl(found.rounds[found.best].predicted) <= 1.2e-4
    never = World(a=1e3)
    assert never.run(Thresholds(max_kl=0.9e-4), first=1e-6).best is None
    assert never.asked.count(LEAST) == 1


def test_rounds_are_never_more_than_allowed() -> None:
    world = World(a=1e4)
    found = world.run(Thresholds(max_kl=0.01), first=0.01, most=3)
    assert len(found.rounds) == 3 and found.best is None  # eight times less each round: 512 are not 10,000
    assert World(a=1e4).run(Thresholds(max_kl=0.01), first=0.01, most=7).best is not None


@pytest.mark.parametrize("b", [0.6, 2.0, 3.0, 5.0])
@pytest.mark.parametrize("a", [0.3, 3.0])
def test_what_passed_and_what_failed_bound_the_next_try(a: float, b: float) -> None:
    """KL that does not grow in proportion to its forecast misleads every correction: the bounds hold it all the same."""
    world = World(a=a * 0.01 ** (1 - b), b=b)
    found = world.run(Thresholds(max_kl=0.01), first=0.01, most=8)
    assert found.best is not None
    low, high = 0.0, math.inf
    for each in found.rounds:
        assert low < each.predicted < high
        low, high = (each.predicted, high) if each.passed else (low, each.predicted)


def judged(kl: float) -> Verdict:
    """NaN is above every limit."""
    found = verdict(kl, 1.0, 1.0, Thresholds(max_kl=0.01), 100)
    return found if kl <= 0.01 else replace(found, failures=("KL",))


def test_a_plan_that_keeps_all_in_float_may_pass() -> None:
    """Predicted at nothing: what lies between it and one that failed is not a ratio of the two."""
    made = iter([Round(0.01, 100, judged(0.02)), Round(0.0, 400, judged(0.0)), Round(0.005, 200, judged(0.009))])
    found = search(0.01, Thresholds(max_kl=0.01), lambda _: next(made, None), least=0.0)
    assert found.best == 2 and len(found.rounds) == 3


def test_a_measurement_that_is_no_number_fails_and_the_search_goes_on() -> None:
    asked: list[float] = []

    def attempt(kl: float) -> Round:
        asked.append(kl)
        return Round(kl, 100, judged(math.nan if len(asked) == 1 else 0.009))

    found = search(0.01, Thresholds(max_kl=0.01), attempt, least=1e-6)
    assert found.best == 1 and all(math.isfinite(kl) and kl > 0 for kl in asked)
