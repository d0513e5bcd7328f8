"""Spending: a table and a limit in, a plan out; on tables made up, against exhaustive search and arithmetic done by hand."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import DOWN, ELEMENTS, FEW, GGUF, WEIGHTS, bits, kl_by_hand, share_of, table_of

from fewbits import formats, planning, targets
from fewbits.errors import InputError
from fewbits.planning import by_thresholds
from fewbits.planning.allocation import allocator
from fewbits.planning.constraints import Constraints
from fewbits.planning.solver import GAP
from fewbits.sensitivity.table import Factor


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

    def test_what_the_runtime_rounds_is_known_apart_from_the_weights(self) -> None:
        table = replace(table_of(), activations={weight.name: {"block32": 1e-4, "block256": 3e-4} for weight in WEIGHTS})
        whole = allocator(table, GGUF)
        plan = whole.within_bytes(2_000_000, "")
        of_weights = sum(table.kl(weight, plan[weight.name].format) for weight in WEIGHTS)
        assert plan.kl is not None and whole.runtime_kl(plan) > 0
        assert plan.kl == pytest.approx(of_weights + whole.runtime_kl(plan))

    def test_factors_correct_the_forecast(self) -> None:
        table = table_of()
        corrected = replace(table, factors={"mlp": Factor(2.0, 0.1, 5)})
        plain, other = (allocator(each, GGUF).within_bytes(2_000_000, "") for each in (table, corrected))
        for weight in WEIGHTS:
            for plan, factor in ((plain, 1.0), (other, 2.0 if weight.kind == "mlp" else 1.0)):
                entry = plan[weight.name]
                assert entry.kl == pytest.approx(factor * table.rows[weight.name][entry.format].kl, rel=1e-12)


class TestOverrides:
    def formats_of(self, *overrides: str, names: Sequence[str] = ()) -> dict[str, str]:
        plan = allocator(table_of(3), GGUF, Constraints(tuple(names), overrides)).within_bytes(3_200_000, "--size")
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
        plan = allocator(table_of(), GGUF, Constraints(overrides=("layers=q4_0", "layers.2=q8_0"))).within_bytes(2_400_000, "")
        assert plan[DOWN].reason == "--override layers.2=q8_0"

    def test_the_reason_is_the_rule(self) -> None:
        plan = allocator(table_of(), GGUF, Constraints(overrides=("down_proj=q8_0",))).within_bytes(2_400_000, "--size 2.4MB")
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
        plan = allocator(table_of(2), GGUF, Constraints(together=(r"layers\.(\d+)\.self_attn\.[qkv]_proj",))).within_bytes(2_000_000, "")
        found = [{plan[f"model.layers.{i}.self_attn.{x}_proj"].format for x in "qkv"} for i in range(4)]
        assert all(len(each) == 1 for each in found) and len(set.union(*found)) > 1  # each layer by itself
        one = allocator(table_of(2), GGUF, Constraints(together=(r"self_attn\.[qkv]_proj",))).within_bytes(2_000_000, "")
        assert len({entry.format for entry in one.entries if re.search("[qkv]_proj", entry.weight)}) == 1

    def test_what_a_target_says_is_fused_is_planned_alike(self) -> None:
        target = type("Fusing", (type(GGUF),), {"together": targets.get("safetensors").together})()
        plan, free = (allocator(table_of(2), each).within_bytes(2_000_000, "") for each in (target, GGUF))
        fused = [[f"model.layers.{i}.self_attn.{x}_proj" for x in "qkv"] for i in range(4)]
        fused += [[f"model.layers.{i}.mlp.{x}_proj" for x in ("gate", "up")] for i in range(4)]
        assert all(len({plan[name].format for name in names}) == 1 for names in fused)
        assert not all(len({free[name].format for name in names}) == 1 for names in fused)

    def test_a_wrong_pattern_is_refused(self) -> None:
        with pytest.raises(InputError, match="not a regular expression"):
            Constraints(together=("(",))
        with pytest.raises(InputError, match="matches no weight") as refused:
            allocator(table_of(), GGUF, Constraints(together=("self_atn",)))
        assert "names look like `model.layers" in refused.value.hint


class TestBelowFourBits:
    @pytest.mark.parametrize("share", [0.0, 0.1, 0.3])
    def test_sizes_between_two_and_three_bits_are_spent_on_codebook_types(self, share: float) -> None:
        table = table_of(9, names=GGUF.candidates)
        whole = allocator(table, GGUF)
        limit = int(ELEMENTS / 8 * (2.1 + share))
        plan = whole.within_bytes(limit, "")
        used = {entry.format for entry in plan.entries}
        assert plan.nbytes <= limit and used & {"iq2_xxs", "iq2_xs", "iq2_s"}
        without = allocator(table_of(9, names=[name for name in GGUF.candidates if not name.startswith(("iq1", "iq2"))]), GGUF)
        assert without.least_bytes > limit  # nothing else is as small

    def test_a_type_that_another_one_beats_in_bytes_and_damage_is_never_chosen(self) -> None:
        table = table_of(10, names=GGUF.candidates)
        rows = {name: {**row, "iq3_s": replace(row["iq3_s"], kl=0.9 * row["q3_k"].kl)} for name, row in table.rows.items()}
        whole = allocator(replace(table, rows=rows), GGUF)
        chosen = {entry.format for share in (0.05, 0.1, 0.15, 0.2) for entry in whole.within_bytes(share_of(whole, share), "").entries}
        assert "iq3_s" in chosen and "q3_k" not in chosen

    def test_a_speed_leaves_types_out_that_are_small_and_slow(self) -> None:
        """iq2_s takes 0.97 of q2_k's bytes, and twice its time."""
        table = table_of(11, names=("iq2_s", "q2_k"))
        rows = {name: {**row, "iq2_s": replace(row["iq2_s"], kl=0.9 * row["q2_k"].kl)} for name, row in table.rows.items()}
        limit = sum(GGUF.nbytes(weight, formats.get("q2_k")) for weight in WEIGHTS)
        speed = 0.999 * 0.57 * 30e9 / limit
        free = allocator(replace(table, rows=rows), GGUF).within_bytes(limit, "")
        fast = allocator(replace(table, rows=rows), GGUF, Constraints(min_speed=speed)).within_bytes(limit, "")
        assert {entry.format for entry in free.entries} == {"iq2_s"} and {entry.format for entry in fast.entries} == {"q2_k"}


class TestSpeed:
    def test_a_speed_is_reached_and_paid_for(self) -> None:
        """q4_0, q8_0 and the tied embedding are all read at 0.71 of 30 GB/s: a speed is a number of bytes."""
        table = table_of(4, names=("q4_0", "q8_0"))
        free = allocator(table, GGUF).within_bytes(3_000_000, "")
        speed = 0.71 * 30e9 / free.nbytes
        assert allocator(table, GGUF).tokens_per_second(free) == pytest.approx(speed)
        plan = allocator(table, GGUF, Constraints(min_speed=1.15 * speed)).within_bytes(3_000_000, "")
        assert plan.nbytes <= free.nbytes / 1.15 and plan.kl is not None and free.kl is not None and plan.kl > free.kl
        assert allocator(table, GGUF, Constraints(min_speed=0.99 * speed)).within_bytes(3_000_000, "") == free

    @pytest.mark.parametrize("factor", [1.02, 1.15])
    def test_a_speed_is_kept_under_a_limit_of_damage_too(self, factor: float) -> None:
        table = table_of(5)
        free = allocator(table, GGUF).within_kl(2e-3, "")
        speed = allocator(table, GGUF).tokens_per_second(free) * factor
        # damage allowed for the faster plan: twice what a plan of fewer bytes by the same factor does, as fewer bytes are not always faster
        kl = 2 * (allocator(table, GGUF).within_bytes(int(free.nbytes / factor), "").kl or 0.0)
        whole = allocator(table, GGUF, Constraints(min_speed=speed))
        plan = whole.within_kl(kl, "")
        assert whole.tokens_per_second(plan) >= speed and plan.kl is not None and plan.kl <= kl * (1 + 1e-12)

    def test_thresholds_and_the_frontier_with_a_speed(self) -> None:
        """iq4_xs is smaller than q4_k and slower: the smallest plan of the frontier is not fast enough, and is shown all the same."""
        table = table_of(8, names=("iq4_xs", "q4_k", "q8_0"))
        speed = 0.999 * 0.73 * 30e9 / sum(GGUF.nbytes(weight, formats.get("q4_k")) for weight in WEIGHTS)
        whole = allocator(table, GGUF, Constraints(min_speed=speed))
        assert len(whole.frontier()) == 20 and whole.frontier()[0].nbytes == whole.least_bytes
        simple = by_thresholds.within_bytes(whole, 10**9, "")
        assert simple is None or whole.tokens_per_second(simple) >= speed

    def test_the_fastest_possible_is_said_where_it_is_too_slow(self) -> None:
        whole = allocator(table_of(6), GGUF, Constraints(min_speed=1e9))
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
