"""Tables and budgets in, plans out: on tables made up here, against exhaustive search and arithmetic done by hand."""

from __future__ import annotations

import itertools
import json
import math
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fewbits import embedded, formats, hardware, kv, planning, targets
from fewbits.errors import InputError
from fewbits.model import Weight
from fewbits.planning import deciding, recipes, thresholds
from fewbits.planning.allocation import Allocator, allocator
from fewbits.planning.deciding import Budget, decide
from fewbits.planning.explaining import explain
from fewbits.planning.solver import GAP
from fewbits.sensitivity.table import Cell, Container, Factor, Scores, Sensitivity, read
from fewbits.verification import Thresholds

GGUF = targets.get("gguf")
MEASURED = ("q2_k", "q3_k", "iq4_xs", "q4_k", "q4_0", "iq4_nl", "q5_k", "q6_k", "q8_0", "fp16")
CONFIG = json.loads((embedded.MODEL / "config.json").read_text())
LAYER = (
    ("self_attn.q_proj", (256, 256), "attention"),
    ("self_attn.k_proj", (128, 256), "attention"),
    ("self_attn.v_proj", (128, 256), "attention"),
    ("self_attn.o_proj", (256, 256), "attention"),
    ("mlp.gate_proj", (768, 256), "mlp"),
    ("mlp.up_proj", (768, 256), "mlp"),
    ("mlp.down_proj", (256, 768), "mlp"),
)
WEIGHTS = (
    Weight("model.embed_tokens", (2048, 256), "embedding", "fp16", tied_to="lm_head"),
    *(Weight(f"model.layers.{i}.{name}", shape, kind, "fp16") for i in range(4) for name, shape, kind in LAYER),
)
ELEMENTS = sum(rows * cols for rows, cols in (weight.shape for weight in WEIGHTS))
FEW = tuple(WEIGHTS[i] for i in (1, 3, 7))
DOWN = "model.layers.2.mlp.down_proj"
SIMPLE = Scores(1.0, 1.0, 1.0, 1.0)


def table_of(seed: int = 0, weights: Sequence[Weight] = WEIGHTS, names: Sequence[str] = MEASURED) -> Sensitivity:
    """As measuring finds it: damage falls fourfold with each bit, weights differ by a factor of a hundred, formats by a fifth."""
    rng = np.random.default_rng(seed)
    rows: dict[str, dict[str, Cell]] = {}
    for weight in weights:
        sensitivity = weight.shape[0] * weight.shape[1] * float(np.exp(rng.normal(-10, 1.5)))
        rows[weight.name] = {}
        for name in names:
            fmt = formats.get(name)
            if fmt.fits(weight.shape) is None:
                noise = float(np.exp(rng.normal(0, 0.2)))
                kl = 0.0 if fmt.levels is None else sensitivity * noise * 4.0 ** -fmt.bits_per_weight((256, 256))
                rows[weight.name][name] = Cell(kl, 0.01, "rtn", SIMPLE)
    return Sensitivity(
        model="model", model_sha256="00", runs=(), method="rtn", weights=tuple(weights), rows=rows, config=CONFIG,
        containers={"gguf": Container(100_000)},
    )  # fmt: skip


def share_of(whole: Allocator, share: float) -> int:
    """A size between the smallest plan and all in 8 bits."""
    most = sum(GGUF.nbytes(weight, formats.get("q8_0")) for weight in whole.table.weights)
    return whole.least_bytes + int(share * (most - whole.least_bytes))


def kl_by_hand(table: Sensitivity, plan: planning.Plan) -> float:
    return math.fsum(table.rows[entry.weight][entry.format].kl for entry in plan.entries)


def bits(name: str) -> float:
    return formats.get(name).bits_per_weight((256, 256))


class TestSpending:
    @given(st.integers(0, 50), st.floats(0, 1), st.integers(0, 1_000_000))
    @settings(max_examples=60, deadline=None)
    def test_a_budget_is_kept_and_more_bytes_never_raise_the_damage(self, seed: int, share: float, more: int) -> None:
        table = table_of(seed)
        whole = allocator(table, GGUF)
        limit = share_of(whole, share)
        plan, richer = whole.within_bytes(limit, ""), whole.within_bytes(limit + more, "")
        assert sum(GGUF.nbytes(weight, formats.get(plan[weight.name].format)) for weight in WEIGHTS) == plan.nbytes <= limit
        assert plan.kl == kl_by_hand(table, plan) and richer.kl is not None
        assert richer.kl <= plan.kl * (1 + 2 * GAP)  # each is proven to this gap

    @given(st.integers(0, 200), st.floats(0, 1))
    @settings(max_examples=60, deadline=None)
    def test_no_choice_of_formats_is_better(self, seed: int, share: float) -> None:
        table = table_of(seed, FEW, ("q2_k", "q3_k", "q4_k", "q6_k", "q8_0"))
        whole = allocator(table, GGUF)
        limit = share_of(whole, share)
        sizes, damages = [], []
        for names in itertools.product(*(table.rows[weight.name] for weight in FEW)):
            sizes.append(sum(GGUF.nbytes(weight, formats.get(name)) for weight, name in zip(FEW, names, strict=True)))
            damages.append(math.fsum(table.rows[weight.name][name].kl for weight, name in zip(FEW, names, strict=True)))
        least = min(kl for kl, size in zip(damages, sizes, strict=True) if size <= limit)
        plan = whole.within_bytes(limit, "")
        assert plan.kl == pytest.approx(least, rel=2 * GAP)
        smallest = min(size for kl, size in zip(damages, sizes, strict=True) if kl <= least)
        assert whole.within_kl(least * (1 + 1e-9), "").nbytes <= smallest * (1 + GAP)

    @given(st.integers(0, 50), st.floats(0.02, 0.98))
    @settings(max_examples=30, deadline=None)
    def test_size_and_damage_lead_to_each_other(self, seed: int, share: float) -> None:
        whole = allocator(table_of(seed), GGUF)
        by_size = whole.within_bytes(share_of(whole, share), "")
        assert by_size.kl is not None
        allowed = by_size.kl * (1 + 1e-9)  # a sum within rounding of the limit may be taken as over it
        by_kl = whole.within_kl(allowed, "")
        assert by_kl.kl is not None and by_kl.kl <= allowed
        assert by_kl.nbytes <= by_size.nbytes * (1 + GAP)
        if (fewer := int(by_kl.nbytes * (1 - 2 * GAP)) - 1) >= whole.least_bytes:
            smaller = whole.within_bytes(fewer, "").kl
            assert smaller is not None and smaller > by_size.kl * (1 - 2 * GAP)  # nothing smaller does as little damage

    def test_what_is_not_reachable_is_refused_with_what_is(self) -> None:
        whole = allocator(table_of(names=("q4_k", "q8_0")), GGUF)  # no float: something is always lost
        with pytest.raises(InputError, match="too few for the weights") as refused:
            whole.within_bytes(whole.least_bytes - 1, "")
        assert f"{8 * whole.least_bytes / ELEMENTS:.2f} bits per weight" in refused.value.hint
        assert whole.within_bytes(whole.least_bytes, "").nbytes == whole.least_bytes
        with pytest.raises(InputError, match="not reachable"):
            whole.within_kl(whole.least_kl * 0.99, "")
        assert whole.within_kl(whole.least_kl * (1 + 1e-9), "").kl == pytest.approx(whole.least_kl)

    def test_factors_and_scale_correct_the_forecast(self) -> None:
        table = table_of()
        corrected = replace(table, factors={"mlp": Factor(2.0, 0.1, 5)})
        plain, other = (allocator(each, GGUF, scale=1.5).within_bytes(2_000_000, "") for each in (table, corrected))
        for weight in WEIGHTS:
            for plan, factor in ((plain, 1.0), (other, 2.0 if weight.kind == "mlp" else 1.0)):
                entry = plan[weight.name]
                assert entry.kl == pytest.approx(1.5 * factor * table.rows[weight.name][entry.format].kl, rel=1e-12)


class TestOverrides:
    def formats_of(self, *overrides: str, names: Sequence[str] = ()) -> dict[str, str]:
        plan = allocator(table_of(3), GGUF, names, overrides).within_bytes(3_200_000, "--size")
        return {entry.weight: entry.format for entry in plan.entries}

    @pytest.mark.parametrize(
        ("override", "obeys"),
        [
            ("down_proj=q8_0", lambda name: name == "q8_0"),
            ("down_proj=keep", lambda name: name == "fp16"),
            ("down_proj>=q6_k", lambda name: bits(name) >= bits("q6_k")),
            ("down_proj<=q3_k", lambda name: bits(name) <= bits("q3_k")),
            ("down_proj>=keep", lambda name: name == "fp16"),
        ],
    )
    def test_what_the_user_says_holds_for_the_weights_it_names(self, override: str, obeys: Callable[[str], bool]) -> None:
        free, bound = self.formats_of(), self.formats_of(override)
        named = [weight.name for weight in WEIGHTS if "down_proj" in weight.name]
        assert all(obeys(bound[name]) for name in named)
        assert not all(obeys(free[name]) for name in named)  # the rule did it

    def test_the_last_one_wins(self) -> None:
        found = self.formats_of("layers=q4_0", "layers.2=q8_0", "layers.2.mlp=q3_k")
        for name, fmt in found.items():
            if "layers" in name:
                assert fmt == ("q3_k" if "layers.2.mlp" in name else "q8_0" if "layers.2" in name else "q4_0")
        found = self.formats_of("layers>=q8_0", "layers.1.mlp=q2_k", "layers.3>=q5_k", "layers.3<=q5_k")
        assert all(bits(fmt) >= bits("q8_0") for name, fmt in found.items() if re.search(r"layers\.[02]|layers\.1\.self", name))
        assert {fmt for name, fmt in found.items() if "layers.1.mlp" in name} == {"q2_k"}
        assert {fmt for name, fmt in found.items() if "layers.3" in name} == {"q5_k"}

    def test_a_later_bound_ends_a_format_that_contradicts_it(self) -> None:
        found = self.formats_of("layers=q4_0", "layers.2>=q8_0", "layers.3<=q4_k")
        assert all(bits(fmt) >= bits("q8_0") for name, fmt in found.items() if "layers.2" in name)
        assert {fmt for name, fmt in found.items() if re.search(r"layers\.[013]", name)} == {"q4_0"}  # within the bound: it stays

    def test_the_reason_is_the_rule_that_won(self) -> None:
        plan = allocator(table_of(), GGUF, (), ("layers=q4_0", "layers.2=q8_0")).within_bytes(2_400_000, "")
        assert plan[DOWN].reason == "--override layers.2=q8_0"

    def test_the_reason_is_the_rule(self) -> None:
        plan = allocator(table_of(), GGUF, (), ("down_proj=q8_0",)).within_bytes(2_400_000, "--size 2.4MB")
        assert plan[DOWN].reason == "--override down_proj=q8_0"
        assert plan["model.embed_tokens"].reason.startswith("--size 2.4MB; ")

    def test_a_rule_may_name_a_format_that_is_not_among_the_wanted(self) -> None:
        found = self.formats_of("down_proj=q6_k", names=("q3_k", "q8_0"))
        assert {fmt for name, fmt in found.items() if "down_proj" in name} == {"q6_k"}
        assert {fmt for name, fmt in found.items() if "down_proj" not in name} <= {"q3_k", "q8_0", "fp16"}

    @pytest.mark.parametrize(
        ("overrides", "message", "hint"),
        [
            (("down_proj>=q8_0", "down_proj<=q4_0"), "no format left under down_proj>=q8_0, down_proj<=q4_0", "measured"),
            (("down_proj=q5_1",), "no format left", "measured, and possible in gguf: q2_k"),  # not in the table
            (("down_prj=q4_0",), "matches no weight", "names look like `model.layers"),
            (("down_proj>q4_0",), "not of the form", "self_attn=int4_g32"),
        ],
    )
    def test_what_cannot_be_is_refused(self, overrides: tuple[str, ...], message: str, hint: str) -> None:
        with pytest.raises(InputError, match=message) as refused:
            self.formats_of(*overrides)
        assert hint in refused.value.hint


class TestTogether:
    def test_weights_of_one_tensor_get_one_format(self) -> None:
        layers = [f"model.layers.{i}.mlp" for i in range(4)]
        weights = tuple(replace(w, together=w.name.rpartition(".")[0]) if ".mlp." in w.name else w for w in WEIGHTS)
        alone, tied = (allocator(table_of(1, some), GGUF).within_bytes(2_000_000, "") for some in (WEIGHTS, weights))

        def of(plan: planning.Plan, layer: str) -> set[str]:
            return {entry.format for entry in plan.entries if entry.weight.startswith(layer)}

        assert all(len(of(tied, layer)) == 1 for layer in layers) and not all(len(of(alone, layer)) == 1 for layer in layers)
        assert tied.nbytes <= 2_000_000 and tied.kl is not None and alone.kl is not None
        assert tied.kl > alone.kl  # fewer choices, and the free plan did not take these

    def test_a_pattern_ties_what_it_matches_alike(self) -> None:
        plan = allocator(table_of(2), GGUF, together=(r"layers\.(\d+)\.self_attn\.[qkv]_proj",)).within_bytes(2_000_000, "")
        found = [{plan[f"model.layers.{i}.self_attn.{x}_proj"].format for x in "qkv"} for i in range(4)]
        assert all(len(each) == 1 for each in found) and len(set.union(*found)) > 1  # each layer by itself
        one = allocator(table_of(2), GGUF, together=(r"self_attn\.[qkv]_proj",)).within_bytes(2_000_000, "")
        assert len({entry.format for entry in one.entries if re.search("[qkv]_proj", entry.weight)}) == 1

    def test_a_wrong_pattern_is_refused(self) -> None:
        with pytest.raises(InputError, match="not a regular expression"):
            allocator(table_of(), GGUF, together=("(",))


class TestSpeed:
    def test_a_speed_is_reached_and_paid_for(self) -> None:
        """q4_0, q8_0 and the tied embedding are all read at 0.71 of 30 GB/s: a speed is a number of bytes."""
        table = table_of(4, names=("q4_0", "q8_0"))
        free = allocator(table, GGUF).within_bytes(3_000_000, "")
        speed = 0.71 * 30e9 / free.nbytes
        assert allocator(table, GGUF).tokens_per_second(free) == pytest.approx(speed)
        plan = allocator(table, GGUF, min_speed=1.15 * speed).within_bytes(3_000_000, "")
        assert plan.nbytes <= free.nbytes / 1.15 and plan.kl is not None and free.kl is not None and plan.kl > free.kl
        assert allocator(table, GGUF, min_speed=0.99 * speed).within_bytes(3_000_000, "") == free

    @pytest.mark.parametrize("factor", [1.02, 1.15])
    def test_a_speed_is_kept_under_a_limit_of_damage_too(self, factor: float) -> None:
        table = table_of(5)
        free = allocator(table, GGUF).within_kl(2e-3, "")
        speed = allocator(table, GGUF).tokens_per_second(free) * factor
        # damage allowed for the faster plan: twice what a plan of fewer bytes by the same factor does, as fewer bytes are not always faster
        kl = 2 * (allocator(table, GGUF).within_bytes(int(free.nbytes / factor), "").kl or 0.0)
        whole = allocator(table, GGUF, min_speed=speed)
        plan = whole.within_kl(kl, "")
        assert whole.tokens_per_second(plan) >= speed and plan.kl is not None and plan.kl <= kl * (1 + 1e-12)

    def test_thresholds_and_the_frontier_with_a_speed(self) -> None:
        """iq4_xs is smaller than q4_k and slower: the smallest plan of the frontier is not fast enough, and is shown all the same."""
        table = table_of(8, names=("iq4_xs", "q4_k", "q8_0"))
        speed = 0.999 * 0.73 * 30e9 / sum(GGUF.nbytes(weight, formats.get("q4_k")) for weight in WEIGHTS)
        whole = allocator(table, GGUF, min_speed=speed)
        assert len(whole.frontier()) == 20 and whole.frontier()[0].nbytes == whole.least_bytes
        simple = thresholds.within_bytes(whole, 10**9, "")
        assert simple is None or whole.tokens_per_second(simple) >= speed

    def test_the_fastest_possible_is_said_where_it_is_too_slow(self) -> None:
        whole = allocator(table_of(6), GGUF, min_speed=1e9)
        fastest = 1 / math.fsum(min(choice.seconds for choice in choices) for choices in whole.choices)
        with pytest.raises(InputError, match=r"1e\+09 tokens/s are not reachable") as refused:
            whole.within_bytes(4_000_000, "")
        said = re.search(r": ([0-9.e+]+) are predicted at most", refused.value.args[0])
        assert said and float(said[1]) == pytest.approx(fastest, rel=6e-3)  # said with three digits

    def test_a_table_that_is_only_looked_up_in_takes_no_time(self) -> None:
        untied = (replace(WEIGHTS[0], tied_to=None), *WEIGHTS[1:])
        tied, apart = (allocator(table_of(7, some, ("q8_0",)), GGUF) for some in (WEIGHTS, untied))
        seconds = [1 / whole.tokens_per_second(whole.within_bytes(whole.least_bytes, "")) for whole in (tied, apart)]
        assert seconds[0] - seconds[1] == pytest.approx(2048 * 256 * 8.5 / 8 / (0.71 * 30e9))


class TestThresholds:
    @given(st.integers(0, 50), st.floats(0.35, 1))
    @settings(max_examples=30, deadline=None)
    def test_thresholds_keep_the_budget_and_are_never_better(self, seed: int, share: float) -> None:
        table = table_of(seed)
        limit = share_of(allocator(table, GGUF), share)
        found = decide(table, GGUF, Budget(size=str(limit + 100_000)))
        if found.simple is not None:
            assert found.simple.nbytes <= limit == found.limit and found.simple.kl == kl_by_hand(table, found.simple)
            assert found.plan.kl is not None and found.simple.kl is not None
            assert found.plan.kl <= found.simple.kl * (1 + 2 * GAP)

    def test_more_sensitive_weights_get_more_bits(self) -> None:
        table = table_of(8, names=("q4_k", "q8_0", "fp16"))
        plan = decide(table, GGUF, Budget(size="6bpw"), strategy="threshold").plan
        ranked = sorted(WEIGHTS, key=lambda weight: table.rows[weight.name]["q4_k"].kl)
        given_bits = [bits(plan[weight.name].format) for weight in ranked]
        assert given_bits == sorted(given_bits) and len(set(given_bits)) == 3
        medium = [table.rows[w.name]["q4_k"].kl for w in WEIGHTS if plan[w.name].format == "q8_0"]
        assert max(medium) < 10 * min(medium)  # high begins at ten times medium

    def test_the_threshold_is_the_lowest_that_the_budget_allows(self) -> None:
        """One weight more in its next format, by rank, and the budget would be exceeded."""
        table = table_of(9, names=("q4_k", "q8_0", "fp16"))
        whole = allocator(table, GGUF)
        limit = share_of(whole, 0.5)
        plan = thresholds.within_bytes(whole, limit, "")
        assert plan is not None and plan.nbytes <= limit
        kls = {weight.name: table.rows[weight.name]["q4_k"].kl for weight in WEIGHTS}

        def size(threshold: float) -> int:
            levels = ("q4_k", "q8_0", "fp16")
            return sum(GGUF.nbytes(w, formats.get(levels[(kls[w.name] >= threshold) + (kls[w.name] >= 10 * threshold)])) for w in WEIGHTS)

        best = min(kl for kl in kls.values() if size(kl) <= limit)
        assert plan.nbytes == size(best)

    def test_an_accuracy_by_thresholds_is_kept_too(self) -> None:
        table = table_of(10)
        found = decide(table, GGUF, Budget(limits=Thresholds(max_kl=3e-3)), strategy="threshold")
        assert found.plan is found.simple and found.plan.kl is not None and found.plan.kl <= 3e-3
        solved = decide(table, GGUF, Budget(limits=Thresholds(max_kl=3e-3))).plan
        assert solved.nbytes <= found.plan.nbytes * (1 + GAP)

    def test_what_thresholds_cannot_meet_is_refused(self) -> None:
        assert decide(table_of(), GGUF, Budget(size="3bpw")).simple is None  # below 4 bits for all
        with pytest.raises(InputError, match="no thresholds meet --size 3bpw") as refused:
            decide(table_of(), GGUF, Budget(size="3bpw"), strategy="threshold")
        assert "--strategy" in refused.value.hint
        with pytest.raises(InputError, match="no strategy is named `magic`") as refused:
            decide(table_of(), GGUF, Budget(size="4bpw"), strategy="magic")
        assert "solve, threshold" in refused.value.hint


class TestTelling:
    def test_the_frontier_rises_in_size_and_falls_in_damage(self) -> None:
        points = decide(table_of(), GGUF, Budget(size="4bpw")).frontier()
        assert len(points) == 20
        for before, after in itertools.pairwise(points):
            assert before.nbytes <= after.nbytes and after.kl <= before.kl * (1 + 2 * GAP)
        assert points[0].nbytes == sum(GGUF.nbytes(weight, formats.get("q2_k")) for weight in WEIGHTS)
        assert points[0].kl > 100 * points[-1].kl and len({point.nbytes for point in points}) == 20
        assert all(point.bits_per_weight == pytest.approx(8 * point.nbytes / ELEMENTS) for point in points)

    def test_steps_say_what_they_would_change(self) -> None:
        table = table_of(11)
        plan = allocator(table, GGUF).within_bytes(2_000_000, "")
        for weight in WEIGHTS:
            entry = plan[weight.name]
            other = {name: (GGUF.nbytes(weight, formats.get(name)), cell.kl) for name, cell in table.rows[weight.name].items()}
            nbytes, kl = other[entry.format]
            assert (entry.nbytes, entry.kl) == (nbytes, kl)
            better = [size for size, damage in other.values() if size > nbytes and damage < kl]
            smaller = [size for size, _ in other.values() if size < nbytes]
            for step, size in ((entry.up, min(better, default=None)), (entry.down, max(smaller, default=None))):
                assert (step is None) == (size is None)
                if step is not None:
                    assert nbytes + step.nbytes == size == other[step.format][0]
                    assert step.kl == pytest.approx(other[step.format][1] - kl, rel=1e-12)
                    alike = [damage for each, damage in other.values() if each == size]
                    assert other[step.format][1] == min(alike)  # of formats of one size the best

    def test_explaining_lists_all_that_a_weight_could_have_had(self) -> None:
        odd = Weight("model.layers.0.mlp.odd", (64, 96), "mlp", "fp16")  # 96 columns: no block of 256, but three of 32
        weights = (*WEIGHTS, odd)
        table = table_of(12, weights)
        table.rows[odd.name]["int6_g32"] = Cell(1e-3, 0.0, "rtn", SIMPLE)  # fits, and GGUF has nothing like it
        found = decide(table, GGUF, Budget(size="4.5bpw"))
        told = explain(found, odd.name)
        names = [each.format for each in told.alternatives]
        assert set(names) == {"q4_0", "iq4_nl", "q8_0", "fp16"}
        assert [each.nbytes for each in told.alternatives] == sorted(each.nbytes for each in told.alternatives)
        refused = dict(told.refused)
        assert set(refused) == {"q2_k", "q3_k", "iq4_xs", "q4_k", "q5_k", "q6_k", "int6_g32"}
        assert "96 columns do not divide" in refused["q4_k"] and refused["int6_g32"]
        entry = found.plan[odd.name]
        assert [each.format for each in told.alternatives if each.chosen] == [entry.format]
        for each in told.alternatives:
            own = table.rows[odd.name][each.format].kl
            assert (each.kl, each.more_bytes) == (own, each.nbytes - entry.nbytes)
            assert each.more_kl == pytest.approx(own - (entry.kl or 0.0), abs=1e-18)
        assert told.share_of_bytes == entry.nbytes / found.plan.nbytes
        with pytest.raises(InputError, match="no weight is named") as wrong:
            explain(found, "model.layers.0.mlp.od")
        assert "`model.layers.0.mlp.odd`" in wrong.value.hint

    def test_a_reason_can_be_checked(self) -> None:
        """A step up saves less, a step down costs more than the price of a byte, wherever the solver had a choice on the hull."""
        plan = allocator(table_of(13), GGUF, ("q3_k", "q5_k", "q8_0")).within_bytes(2_000_000, "--size 2MB")
        said = [re.search(r"would save ([\d.e+-]+) KL/kB; .* cost ([\d.e+-]+); the price is ([\d.e+-]+)", e.reason) for e in plan.entries]
        known = [tuple(map(float, each.groups())) for each in said if each]
        assert len(known) > 3
        # three formats on a convex curve; two digits each; the last of the budget may go where it just fits
        right = [saved <= price * 1.05 and cost >= price * 0.95 for saved, cost, price in known]
        assert sum(right) >= len(right) - 1


class TestFiles:
    def test_a_plan_with_forecasts_survives_json(self) -> None:
        plan = allocator(table_of(), GGUF).within_bytes(2_000_000, "--size 2MB")
        back = planning.read(plan.to_json(), WEIGHTS)
        for ours, theirs in zip(plan.entries, back.entries, strict=True):
            assert replace(theirs, kl=ours.kl, up=ours.up, down=ours.down) == ours
            assert theirs.kl == pytest.approx(ours.kl, rel=5e-4)  # written with four digits
            for step, other in ((ours.up, theirs.up), (ours.down, theirs.down)):
                assert (step is None) == (other is None)
                if step and other:
                    assert (step.format, step.nbytes) == (other.format, other.nbytes) and other.kl == pytest.approx(step.kl, rel=5e-4)
        assert planning.read(back.to_json(), WEIGHTS) == back
        assert json.loads(plan.to_json())["predicted_kl"] == pytest.approx(plan.kl, rel=5e-4)

    @pytest.mark.parametrize("new", ["q8_0", "q2_k", "keep"])
    def test_an_edited_plan_is_priced_anew(self, new: str, run: Any, tmp_path: Path) -> None:
        table = table_of()
        table.save(tmp_path / "table.json")
        common = ("plan", "anywhere/model", "--sensitivity", tmp_path / "table.json")
        code, out, _ = run(*common, "--size", "2.1MB", "-o", tmp_path / "plan.json", "--json")
        assert code == 0
        before = json.loads(out)["plan"]
        assert json.loads((tmp_path / "plan.json").read_text()) == before
        row = before["weights"][DOWN]
        old, row["format"] = row["format"], new
        (tmp_path / "edited.json").write_text(json.dumps(before))
        code, out, err = run(*common, "--plan", tmp_path / "edited.json", "--json")
        assert code == 0, err
        after, fmt = json.loads(out)["plan"], "fp16" if new == "keep" else new
        weight = next(w for w in WEIGHTS if w.name == DOWN)
        assert after["bytes"] == before["bytes"] + GGUF.nbytes(weight, formats.get(fmt)) - GGUF.nbytes(weight, formats.get(old))
        kl = math.fsum(table.rows[name][entry["format"]].kl for name, entry in after["weights"].items())
        assert after["weights"][DOWN]["format"] == fmt and after["predicted_kl"] == pytest.approx(kl, rel=1e-3)
        assert after["weights"][DOWN].get("kl") == pytest.approx(table.rows[DOWN][fmt].kl, rel=1e-3)

    def test_formats_of_one_size_are_told_apart_when_priced_anew(self) -> None:
        table = table_of()
        whole = allocator(table, GGUF, ("q4_0", "q8_0"))
        content = json.loads(whole.within_bytes(share_of(whole, 0.5), "").to_json())
        name = next(name for name, row in content["weights"].items() if row["format"] == "q4_0")
        content["weights"][name]["format"] = "iq4_nl"
        found = deciding.repriced(table, GGUF, json.dumps(content)).plan
        assert found.nbytes == content["bytes"] and found[name].kl == table.rows[name]["iq4_nl"].kl != table.rows[name]["q4_0"].kl

    def test_a_format_that_was_not_measured_has_no_forecast(self) -> None:
        content = json.loads(allocator(table_of(), GGUF).within_bytes(2_000_000, "").to_json())
        content["weights"][DOWN]["format"] = "q5_0"
        found = deciding.repriced(table_of(), GGUF, json.dumps(content)).plan
        assert found[DOWN].kl is None and found.kl is None and "predicted_kl" not in json.loads(found.to_json())

    def test_an_edit_to_a_format_of_the_same_size_is_an_edit(self) -> None:
        plan = allocator(table_of(), GGUF, ("q4_0", "iq4_nl", "q8_0")).within_bytes(2_200_000, "--size")
        old = next(entry for entry in plan.entries if entry.format in ("q4_0", "iq4_nl"))
        content = json.loads(plan.to_json())
        content["weights"][old.weight]["format"] = {"q4_0": "iq4_nl", "iq4_nl": "q4_0"}[old.format]
        read = planning.read(json.dumps(content), WEIGHTS, GGUF)[old.weight]
        assert read.nbytes == old.nbytes and read.reason == "edited in plan.json" and read.kl is None and read.up is None

    def test_a_plan_to_price_is_no_budget(self, run: Any, tmp_path: Path) -> None:
        table_of().save(tmp_path / "t.json")
        (tmp_path / "p.json").write_text("{}")
        code, _, err = run("plan", "model", "--sensitivity", tmp_path / "t.json", "--plan", tmp_path / "p.json", "--size", "2MB")
        assert code == 2 and "prices a plan as it is" in err and "hint:" in err

    def test_a_table_survives_json(self, tmp_path: Path) -> None:
        table = replace(
            table_of(),
            runs=({"samples": 3},),
            factors={"mlp": Factor(1.25, 0.1, 4)},
            activations={DOWN: {"int8": 1e-4}},
        )
        table.save(tmp_path / "table.json")
        back = read(tmp_path / "table.json")
        assert replace(back, rows=table.rows) == table
        for name, row in table.rows.items():
            assert list(back.rows[name]) == list(row)
            for fmt, cell in row.items():
                assert back.rows[name][fmt].kl == pytest.approx(cell.kl, rel=5e-5)  # five digits
                assert replace(back.rows[name][fmt], kl=cell.kl) == cell
        back.save(tmp_path / "again.json")
        assert (tmp_path / "again.json").read_bytes() == (tmp_path / "table.json").read_bytes()

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda t: t.update(schema=99), "schema 99"),
            *((lambda t, key=key: t.pop(key), f"KeyError\\('{key}'") for key in ("schema", "rows", "weights", "containers", "method")),
            (lambda t: t["rows"][DOWN]["q4_0"].update(kl=math.nan), "finite and not below 0"),
            (lambda t: t["rows"][DOWN]["q4_0"].update(kl=-1e-9), "finite and not below 0"),
            (lambda t: t["rows"][DOWN]["q4_0"].update(kl=math.inf), "finite and not below 0"),
            (lambda t: t["rows"][DOWN]["q4_0"].update(kl="much"), "no table of sensitivities"),
            (lambda t: t["rows"][DOWN]["q4_0"].pop("scores"), "no table of sensitivities"),
            (lambda t: t["rows"][DOWN].update(q4_0=[1]), "no table of sensitivities"),
            (lambda t: t.update(rows=[]), "no table of sensitivities"),
            (lambda t: t["weights"][3].update(rank=2), "no table of sensitivities"),
            (lambda t: t["weights"][3].update(shape=[3]), "no table of sensitivities"),
            (lambda t: t["factors"].update(mlp={"factor": 1}), "no table of sensitivities"),
        ],
    )
    def test_a_damaged_table_is_refused(self, change: Callable[[Any], object], message: str, tmp_path: Path) -> None:
        table_of().save(tmp_path / "table.json")
        content = json.loads((tmp_path / "table.json").read_text())
        change(content)
        (tmp_path / "table.json").write_text(json.dumps(content))
        with pytest.raises(InputError, match=message) as refused:
            read(tmp_path / "table.json")
        assert "fewbits measure" in refused.value.hint

    @pytest.mark.parametrize("text", ["", "{", "[]", "null", "3"])
    def test_what_is_no_table_at_all_is_refused(self, text: str, tmp_path: Path) -> None:
        (tmp_path / "table.json").write_text(text)
        with pytest.raises(InputError):
            read(tmp_path / "table.json")
        with pytest.raises(InputError):
            read(tmp_path / "missing.json")


class TestBudgets:
    def test_bits_per_weight_count_weights_alone(self) -> None:
        found = decide(table_of(), GGUF, Budget(size="4.5bpw"))
        assert found.limit == math.floor(ELEMENTS * 4.5 / 8) and not found.whole_file
        assert 4.45 < found.plan.bits_per_weight <= 4.5  # the rest is less than the smallest step of the smallest weight
        assert found.plan[DOWN].reason.startswith("--size 4.5bpw")

    def test_a_file_size_counts_the_container(self) -> None:
        found = decide(table_of(), GGUF, Budget(size="2.2MB"))
        assert found.limit == 2_200_000 - 100_000 and found.plan.nbytes <= found.limit and found.whole_file
        assert decide(table_of(), GGUF, Budget(size="2.2MB"), overhead=7).limit == 2_200_000 - 7
        with pytest.raises(InputError, match="does not say what a onnx file holds") as refused:
            decide(table_of(names=("int4_g32", "int8_channel", "fp16")), targets.get("onnx"), Budget(size="2.2MB"))
        assert "--to onnx" in refused.value.hint

    def test_a_recipe_is_as_large_as_llama_cpps_mix(self) -> None:
        found = decide(table_of(), GGUF, Budget(size="Q4_K_M"))
        # what llama.cpp gives a model of four layers: the tied embedding and, in layers that more_bits picks, values and down in q6_k
        assert found.limit == recipes.nbytes("q4_k_m", WEIGHTS, deciding.attributes(CONFIG))
        assert ELEMENTS * 4.5 / 8 < found.limit < ELEMENTS * 6.5625 / 8 and found.plan.nbytes <= found.limit

    def test_a_device_holds_weights_cache_and_all_the_rest(self) -> None:
        table, shape = table_of(), hardware.shape(deciding.attributes(CONFIG))
        limits = {}
        for context, cache in ((512, None), (4096, None), (4096, "int4")):
            found = decide(table, GGUF, Budget(fits="60MB", context=context), kv_cache=cache)
            assert found.limit is not None and found.whole_file
            use = hardware.Use(context=context, kv=kv.get(cache or "float"))
            assert hardware.memory(shape, found.limit + 100_000, use).total == 60_000_000
            limits[context, cache] = found.limit
        # keys and values in float16: 4 layers, 2 heads of 64 channels; the mask of a batch of 512 is 2 bytes per token of context
        cache_bytes = (4096 - 512) * 4 * 2 * 2 * 64 * 2
        assert limits[512, None] - limits[4096, None] == cache_bytes + (4096 - 512) * 512 * 2
        assert limits[4096, None] < limits[4096, "int4"] < limits[512, None] + cache_bytes
        assert decide(table, GGUF, Budget(fits="60MB")).limit == limits[4096, None]  # 4096 unless told
        with pytest.raises(InputError, match="leave nothing for the weights"):
            decide(table, GGUF, Budget(fits="10MB"))

    @pytest.mark.parametrize(
        ("limits", "kl"),
        [
            (Thresholds(max_kl=0.01), 0.01),
            (Thresholds(min_agreement=0.99), (0.01 / 0.55) ** 2),
            (Thresholds(max_ppl_ratio=1.01), math.log(1.01) / 0.7),
            (Thresholds(max_kl=1.0, min_agreement=0.95, max_ppl_ratio=2), (0.05 / 0.55) ** 2),
        ],
    )
    def test_an_accuracy_is_a_predicted_kl_at_first(self, limits: Thresholds, kl: float) -> None:
        table = table_of(20)
        found = decide(table, GGUF, Budget(limits=limits))
        assert found.limit is None and found.plan.kl is not None and found.plan.kl <= kl * (1 + 1e-12)
        assert found.plan.nbytes == allocator(table, GGUF).within_kl(kl, "").nbytes
        assert decide(table, GGUF, Budget(limits=limits), kl=kl / 4).plan.kl <= kl / 4  # type: ignore[operator]

    @pytest.mark.parametrize(
        ("make", "message", "hint"),
        [
            (lambda: Budget(size="4bpw", fits="8GB"), "two budgets", "one of them"),
            (lambda: Budget(size="4bpw", context=512), "`--context` goes with `--fits`", "--fits 8GB"),
            (lambda: Budget(size="4"), "no unit", "4bpw"),
            (lambda: Budget(fits="phone"), "not a number of bytes", "8GB"),
            (lambda: Budget(limits=Thresholds(min_agreement=1.5)), "no threshold", "share up to 1"),
            (lambda: decide(table_of(), GGUF, Budget()), "give a budget", "--size 4.5bpw"),
        ],
    )
    def test_budgets_that_contradict_themselves_are_refused(self, make: Callable[[], object], message: str, hint: str) -> None:
        with pytest.raises(InputError, match=re.escape(message)) as refused:
            make()
        assert hint in refused.value.hint

    def test_a_cache_is_said_counted_or_refused(self) -> None:
        table, own = table_of(), targets.get("fewbits")
        assert decide(table, own, Budget(size="6bpw"), kv_cache="INT8").plan.kv == "int8"
        assert decide(table, GGUF, Budget(fits="1GB"), kv_cache="int8").plan.kv is None  # chosen when llama.cpp runs
        with pytest.raises(InputError, match="cannot say that the KV cache is int8"):
            decide(table, GGUF, Budget(size="6bpw"), kv_cache="int8")
        with pytest.raises(InputError, match="int99"):
            decide(table, own, Budget(size="6bpw"), kv_cache="int99")

    def test_the_best_cache_leaves_most_to_the_weights(self) -> None:
        """A context so long that the float cache takes what the weights need."""
        table = replace(table_of(), kv={"int8": 1e-5, "int4": 1e-4})
        found = decide(table, GGUF, Budget(fits="64MB", context=16384), kv_cache="auto")
        each = {name: decide(table, GGUF, Budget(fits="64MB", context=16384), kv_cache=name).plan.kl or 0.0 for name in ("int8", "int4")}
        total = {name: kl + table.kv[name] for name, kl in each.items()}
        assert found.kv == min(total, key=lambda name: total[name])
        with pytest.raises(InputError, match="needs KV caches in the table"):
            decide(table_of(), GGUF, Budget(fits="64MB", context=16384), kv_cache="auto")

    def test_a_size_beside_an_accuracy_is_the_budget(self) -> None:
        both = decide(table_of(), GGUF, Budget(size="4bpw", limits=Thresholds(max_kl=1e-6)))
        assert both.plan == decide(table_of(), GGUF, Budget(size="4bpw")).plan


class TestCommandLine:
    def test_a_plan_is_explained_and_saved(self, run: Any, tmp_path: Path) -> None:
        table_of().save(tmp_path / "t.json")
        words = ("plan", "some/model", "--sensitivity", tmp_path / "t.json", "--size", "2MB", "--explain", DOWN)
        code, out, err = run(*words, "--json", "-o", tmp_path / "plan.json")
        assert code == 0, err
        told = json.loads(out)
        found = deciding.plan("model", tmp_path / "t.json", size="2MB")
        assert told["plan"] == json.loads(found.plan.to_json()) == json.loads((tmp_path / "plan.json").read_text())
        assert told["frontier"] == [asdict(point) for point in found.frontier()] and len(told["frontier"]) == 20
        assert told["explained"][0]["weight"] == DOWN and told["limit_bytes"] == 1_900_000
        code, out, err = run(*words)
        assert code == 0 and out == "" and "frontier" in err and DOWN in err and "by thresholds" in err

    def test_a_table_of_another_model_is_refused(self, run: Any, tmp_path: Path) -> None:
        table_of().save(tmp_path / "t.json")
        (tmp_path / "other").mkdir()
        code, _, err = run("plan", tmp_path / "other", "--sensitivity", tmp_path / "t.json", "--size", "2MB")
        assert code == 2 and "was measured on `model`" in err and "hint:" in err

    def test_planning_loads_no_torch(self, tmp_path: Path) -> None:
        table_of().save(tmp_path / "t.json")
        words = ["plan", "model", "--sensitivity", str(tmp_path / "t.json"), "--size", "q4_k_m", "--explain", DOWN]
        code = (
            f"import sys; sys.argv = ['fewbits', *{words!r}]\nfrom fewbits import cli\n"
            "try: cli.main()\nexcept SystemExit as ended: assert not ended.code, ended.code\n"
            "assert 'torch' not in sys.modules"
        )
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
