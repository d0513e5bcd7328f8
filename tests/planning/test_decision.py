"""What a budget means: sizes, devices and accuracies become limits; and the simple way to a plan, by thresholds."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import CONFIG, DOWN, ELEMENTS, GGUF, WEIGHTS, bits, kl_by_hand, share_of, table_of

from fewbits import formats, targets
from fewbits.errors import InputError
from fewbits.formats.runtime import kv
from fewbits.planning import by_thresholds, decision, footprint, recipes
from fewbits.planning.accuracy import Thresholds
from fewbits.planning.allocation import allocator
from fewbits.planning.constraints import Constraints
from fewbits.planning.decision import Budget, decide
from fewbits.planning.solver import GAP


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
        with pytest.raises(InputError, match="does not say what onnx files hold") as refused:
            decide(table_of(names=("int4_g32", "int8_channel", "fp16")), targets.get("onnx"), Budget(size="2.2MB"))
        assert "--to onnx" in refused.value.hint

    def test_a_recipe_is_as_large_as_llama_cpps_mix(self) -> None:
        found = decide(table_of(), GGUF, Budget(size="Q4_K_M"))
        # what llama.cpp gives a model of four layers: the tied embedding and, in layers that more_bits picks, values and down in q6_k
        assert found.limit == recipes.nbytes("q4_k_m", WEIGHTS, decision.attributes(CONFIG))
        assert ELEMENTS * 4.5 / 8 < found.limit < ELEMENTS * 6.5625 / 8 and found.plan.nbytes <= found.limit

    def test_a_device_holds_weights_cache_and_all_the_rest(self) -> None:
        table, shape = table_of(), footprint.shape(decision.attributes(CONFIG))
        limits = {}
        for context, cache in ((512, None), (4096, None), (4096, "int4")):
            found = decide(table, GGUF, Budget(fits="60MB", context=context), Constraints(kv=cache))
            assert found.limit is not None and found.whole_file
            use = footprint.Use(context=context, kv=kv.get(cache or "float"))
            assert footprint.memory(shape, found.limit + 100_000, use).total == 60_000_000
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
            (lambda: Budget(fits="fridge"), "no device is named `fridge`", "8GB"),
            (lambda: Budget(limits=Thresholds(min_agreement=1.5)), "no threshold", "agreement and cosine go up to 1"),
            (lambda: decision.predicted_kl(Thresholds(max_ppl_ratio=0.99)), "less perplexity than the float model's", "a ratio of 1"),
            (lambda: decide(table_of(), GGUF, Budget(size="1MB")), "900,000 bytes that `--size 1MB` leaves", "304,224 bytes more"),
            (lambda: decide(table_of(), GGUF, Budget()), "give a budget", "--size 4.5bpw"),
        ],
    )
    def test_budgets_that_contradict_themselves_are_refused(self, make: Callable[[], object], message: str, hint: str) -> None:
        with pytest.raises(InputError, match=re.escape(message)) as refused:
            make()
        assert hint in refused.value.hint

    def test_a_cache_is_said_counted_or_refused(self) -> None:
        table, own = table_of(), targets.get("fewbits")
        assert decide(table, own, Budget(size="6bpw"), Constraints(kv="INT8")).plan.kv == "int8"
        assert decide(table, GGUF, Budget(fits="1GB"), Constraints(kv="int8")).plan.kv is None  # chosen when llama.cpp runs
        with pytest.raises(InputError, match="cannot say that the KV cache is int8"):
            decide(table, GGUF, Budget(size="6bpw"), Constraints(kv="int8"))
        with pytest.raises(InputError, match="int99"):
            decide(table, own, Budget(size="6bpw"), Constraints(kv="int99"))

    def test_the_best_cache_leaves_most_to_the_weights(self) -> None:
        """A context so long that the float cache takes what the weights need."""
        table = replace(table_of(), kv={"int8": 1e-5, "int4": 1e-4})
        found = decide(table, GGUF, Budget(fits="64MB", context=16384), Constraints(kv="auto"))
        each = {
            name: decide(table, GGUF, Budget(fits="64MB", context=16384), Constraints(kv=name)).plan.kl or 0.0 for name in ("int8", "int4")
        }
        total = {name: kl + table.kv[name] for name, kl in each.items()}
        assert found.kv == min(total, key=lambda name: total[name])
        with pytest.raises(InputError, match="needs KV caches in the table"):
            decide(table_of(), GGUF, Budget(fits="64MB", context=16384), Constraints(kv="auto"))

    def test_a_size_beside_an_accuracy_is_the_budget(self) -> None:
        both = decide(table_of(), GGUF, Budget(size="4bpw", limits=Thresholds(max_kl=1e-6)))
        assert both.plan == decide(table_of(), GGUF, Budget(size="4bpw")).plan


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
        plan = decide(table, GGUF, Budget(size="6bpw"), Constraints(strategy="threshold")).plan
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
        plan = by_thresholds.within_bytes(whole, limit, "")
        assert plan is not None and plan.nbytes <= limit
        kls = {weight.name: table.rows[weight.name]["q4_k"].kl for weight in WEIGHTS}

        def size(threshold: float) -> int:
            levels = ("q4_k", "q8_0", "fp16")
            return sum(GGUF.nbytes(w, formats.get(levels[(kls[w.name] >= threshold) + (kls[w.name] >= 10 * threshold)])) for w in WEIGHTS)

        best = min(kl for kl in kls.values() if size(kl) <= limit)
        assert plan.nbytes == size(best)

    def test_an_accuracy_by_thresholds_is_kept_too(self) -> None:
        table = table_of(10)
        found = decide(table, GGUF, Budget(limits=Thresholds(max_kl=3e-3)), Constraints(strategy="threshold"))
        assert found.plan is found.simple and found.plan.kl is not None and found.plan.kl <= 3e-3
        solved = decide(table, GGUF, Budget(limits=Thresholds(max_kl=3e-3))).plan
        assert solved.nbytes <= found.plan.nbytes * (1 + GAP)

    def test_what_thresholds_cannot_meet_is_refused(self) -> None:
        assert decide(table_of(), GGUF, Budget(size="3bpw")).simple is None  # below 4 bits for all
        with pytest.raises(InputError, match="no thresholds meet `--size 3bpw`") as refused:
            decide(table_of(), GGUF, Budget(size="3bpw"), Constraints(strategy="threshold"))
        assert "--strategy" in refused.value.hint
        with pytest.raises(InputError, match="no strategy is named `magic`") as refused:
            decide(table_of(), GGUF, Budget(size="4bpw"), Constraints(strategy="magic"))
        assert "solve, threshold" in refused.value.hint
