"""llama.cpp's allocation by target size: the choice is held against all choices there are, the error against its definition."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from gguf_models import needs_llama_cpp

from fewbits.benchmarks.peers import ggml
from fewbits.benchmarks.quality.target_size import Candidate, candidates_of, capped, choose, frontier, preferred, relative_error
from fewbits.model.weights import Weight


def _tensors(seed: int) -> list[list[Candidate]]:
    rng = np.random.default_rng(seed)
    return [[Candidate(f"t{i}", int(rng.integers(1, 60)), float(rng.uniform(0, 9))) for i in range(5)] for _ in range(5)]


def test_the_frontier_is_the_lower_hull() -> None:
    points = [Candidate("a", 10, 9.0), Candidate("b", 20, 8.0), Candidate("c", 30, 3.0), Candidate("d", 40, 3.0), Candidate("e", 50, 1.0)]
    assert [each.type for each in frontier(points)] == ["a", "c", "e"]  # b is above the line from a to c, d no better than c
    assert [each.type for each in frontier([Candidate("x", 5, 1.0), Candidate("y", 5, 0.5)])] == ["y"]


@pytest.mark.parametrize("seed", range(6))
def test_bisection_finds_the_best_choice_wherever_a_price_leads_to_it(seed: int) -> None:
    """At a price, the cheapest choices are the best of all choices of their size: found by trying all of them."""
    tensors, preferences = [frontier(some) for some in _tensors(seed)], np.random.default_rng(seed).uniform(1, 6, 5).tolist()
    every = [(sum(c.nbytes for c in choice), sum(p * c.error for p, c in zip(preferences, choice, strict=True)), choice)
             for choice in itertools.product(*tensors)]  # fmt: skip
    for price in (0.01, 0.03, 0.1, 0.3):
        size, least, best = min(every, key=lambda each: each[1] + price * each[0])
        assert choose(tensors, preferences, size) == list(best)
        assert least == min(error for held, error, _ in every if held <= size)


@pytest.mark.parametrize("seed", range(6))
def test_no_step_is_left_that_still_fits(seed: int) -> None:
    tensors = [frontier(some) for some in _tensors(seed)]
    for budget in range(sum(options[0].nbytes for options in tensors), 300, 7):
        chosen = choose(tensors, [1.0] * 5, budget)
        left = budget - sum(each.nbytes for each in chosen)
        steps = [
            options[options.index(each) + 1].nbytes - each.nbytes
            for options, each in zip(tensors, chosen, strict=True)
            if each != options[-1]
        ]
        assert left >= 0 and all(step > left for step in steps)


def test_too_few_bytes_give_the_smallest_types() -> None:
    tensors = [frontier(some) for some in _tensors(0)]
    assert choose(tensors, [1.0] * 5, 1) == [options[0] for options in tensors]


def test_some_tensors_count_for_more() -> None:
    names = ["token_embd.weight", "blk.0.ffn_down.weight", "blk.0.attn_v.weight", "blk.0.ffn_up.weight"]
    assert preferred(names, [10, 30, 30, 30], 50) == [2.5, 6.0, 1.25, 1.0]
    assert preferred([*names, "output.weight"], [10, 30, 30, 20, 10], 50) == [1.0, 6.0, 1.25, 1.0, 3.0]
    assert preferred(names, [60, 10, 20, 10], 50)[0] == 1.25  # an embedding that is most of the model
    assert preferred(names, [10, 30, 30, 30], 25) == [1.0, 1.0, 1.25, 1.0]  # two bits on average


def test_one_loud_column_does_not_hide_the_others() -> None:
    quiet = np.exp(np.random.default_rng(0).normal(size=256))
    loud = quiet.copy()
    loud[7] = 1e9
    assert np.array_equal(capped(quiet), quiet) or capped(quiet).max() < quiet.max() * 1.0001
    assert capped(loud)[7] < 1e4 and np.array_equal(np.delete(capped(loud), 7), np.delete(capped(quiet), 7).clip(max=capped(loud)[7]))
    assert np.array_equal(capped(np.ones(256)), np.ones(256))


@needs_llama_cpp
def test_the_error_is_a_mean_of_shares_of_rows() -> None:
    rng = np.random.default_rng(0)
    w, d = rng.normal(size=(50, 256)).astype(np.float32), rng.uniform(0.5, 2, 256).astype(np.float32)
    rounded = ggml.dequantize("q4_K", ggml.quantize("q4_K", w, d).reshape(-1), w.size).reshape(w.shape)
    shares = [float((d * (r - x) ** 2).sum() / (d * x**2).sum()) for r, x in zip(rounded.astype(float), w.astype(float), strict=True)]
    assert relative_error(w, "q4_k", d) == pytest.approx(np.mean(shares), rel=1e-6)  # d and w are float32: 2^-24 each
    assert relative_error(w, "q4_k", None) != pytest.approx(np.mean(shares), rel=1e-3)
    many = np.concatenate([w, w, w, 1e-6 * np.ones((1, 256), np.float32)])
    assert relative_error(many, "fp16", None) < 1e-6  # the row that float16 cannot hold is among those left out


@needs_llama_cpp
def test_types_fit_the_columns_and_codebooks_want_an_importance() -> None:
    rng = np.random.default_rng(0)
    w = rng.normal(size=(8, 96)).astype(np.float32)
    plain = candidates_of(w, None, Weight("w", (8, 96), "linear", "fp16"), "token_embd.weight")
    assert {each.type for each in plain} == {"q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "fp16"}
    known = candidates_of(w, np.ones(96, np.float32), Weight("w", (8, 96), "linear", "fp16"), "blk.0.attn_q.weight")
    assert {each.type for each in known} - {each.type for each in plain} == {"iq4_nl"}
    q8 = {each.type: each for each in known}["q8_0"]
    expected = (1 + 0.5 * 2 ** (3 - 8.5)) * 8 * relative_error(w, "q8_0", np.ones(96, np.float32))
    assert q8.nbytes == 8 * 3 * 34 and q8.error == pytest.approx(expected)
