"""Which inputs are rounded as asked: the sum of what they cost stays within a limit."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from fewbits import formats, planning, targets
from fewbits.formats.runtime.activations import Activation
from fewbits.model.weights import Weight
from fewbits.planning.rounded_inputs import LIMIT, Choice, Input, Way, choose

STATIC, DYNAMIC = Activation("int8", static=True, range="minmax", scale=0.1), Activation("int8")


def some_inputs(seed: int, count: int = 7) -> list[Input]:
    rng = np.random.default_rng(seed)
    made = []
    for number in range(count):
        fixed, token = 10 ** rng.uniform(-6, -2), 10 ** rng.uniform(-6, -3)
        ways = (Way(STATIC, fixed), Way(DYNAMIC, token), Way(None, 0.0))
        made.append(Input((f"w{number}",), int(rng.integers(1, 9)) * 1000, ways))
    return made


@pytest.mark.parametrize("seed", range(8))
def test_the_rest_is_within_the_limit_and_no_step_was_needless(seed: int) -> None:
    inputs = some_inputs(seed)
    for limit in (1e-2, 1e-3, 1e-4, 0.0):
        choice = choose(inputs, limit)
        assert choice.kl <= limit + 1e-15
        left = [each.ways[place].kl for each, place in zip(inputs, choice.places, strict=True)]
        steps = [each.ways[0].kl - kl for each, kl in zip(inputs, left, strict=True) if kl < each.ways[0].kl]
        # were everything that was exempted rounded after all, the limit would be exceeded
        assert not choice.exempt or sum(left) + sum(steps) > limit


def test_the_fewest_weights_of_one_size_are_exempted() -> None:
    """With equal sizes and two ways, taking the costliest first is best: no smaller set is within the limit."""
    costs = [3e-3, 1e-4, 8e-4, 2e-3, 5e-5, 9e-4]
    inputs = [Input((f"w{i}",), 100, (Way(STATIC, kl), Way(None, 0.0))) for i, kl in enumerate(costs)]
    for limit in (5e-3, 2e-3, 1e-3, 1e-4):
        fewest = min(
            len(out)
            for size in range(len(costs) + 1)
            for out in itertools.combinations(range(len(costs)), size)
            if math.fsum(kl for i, kl in enumerate(costs) if i not in out) <= limit
        )
        assert len(choose(inputs, limit).exempt) == fewest


def test_a_large_weight_must_save_more_than_a_small_one() -> None:
    small, large = (Input((name,), size, (Way(STATIC, 1e-3), Way(None, 0.0))) for name, size in (("small", 10), ("large", 1000)))
    assert choose([large, small], 1e-3).exempt == (small,)


def test_a_scale_per_token_is_enough_where_it_saves_most() -> None:
    """It goes on to no rounding at all only where the limit asks for it."""
    read = Input(("w",), 100, (Way(STATIC, 1e-1), Way(DYNAMIC, 1e-4), Way(None, 0.0)))
    assert [choose([read], limit).places for limit in (1.0, 1e-3, 1e-5)] == [(0,), (1,), (2,)]


def test_infinity_rounds_all_and_what_is_no_better_is_not_taken() -> None:
    assert not any(choose(some_inputs(0), math.inf).places)
    assert choose([Input(("w",), 1, (Way(STATIC, 1e-3), Way(DYNAMIC, 2e-3)))], 0.0).places == (0,)


def test_the_plan_says_what_was_exempted_and_what_that_saved() -> None:
    weights = [Weight(f"layers.{n}.proj", (64, 64), "mlp", "bf16") for n in range(3)]
    target = targets.get("onnx")
    plan = planning.uniform(weights, target, formats.get("int8_channel"), activation=STATIC)
    ways = [(Way(STATIC, kl), Way(None, 1e-6)) for kl in (1e-4, 0.25, 2e-4)]
    inputs = tuple(Input((weight.name,), 4096, way) for weight, way in zip(weights, ways, strict=True))
    choice = choose(inputs)
    changed = choice.applied(plan, weights, target)
    assert [entry.activation for entry in changed.entries] == [STATIC, None, STATIC]
    assert "its input is not rounded: int8:static would cost KL 0.25" in changed["layers.1.proj"].reason
    assert changed["layers.1.proj"].nbytes == target.nbytes(weights[1], formats.get("int8_channel"))
    assert changed["layers.0.proj"] == plan["layers.0.proj"]
    remark = choice.remark()
    assert remark and "1 of 3 inputs" in remark and "layers.1.proj (0.25)" in remark and f"{LIMIT:g}" in remark
    assert Choice(inputs, (0, 0, 0), math.inf).remark() is None
    assert planning.read(changed.to_json(), weights, target) == changed
