"""What is said of a plan: the frontier, what one step would change, why a weight got its format; and `fewbits plan`."""

from __future__ import annotations

import itertools
import json
import math
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from tables import DOWN, ELEMENTS, GGUF, SIMPLE, WEIGHTS, table_of

from fewbits import formats
from fewbits.errors import InputError
from fewbits.model.weights import Weight
from fewbits.planning import decision
from fewbits.planning.allocation import allocator
from fewbits.planning.constraints import Constraints
from fewbits.planning.decision import Budget, decide
from fewbits.planning.explanation import explain
from fewbits.planning.solver import GAP
from fewbits.sensitivity.table import Cell
from fewbits.targets.plan import plan


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

    def test_what_was_not_measured_is_not_explained(self) -> None:
        """Beside a weight without a forecast no other format has anything to save."""
        content = json.loads(allocator(table_of(), GGUF).within_bytes(2_000_000, "").to_json())
        content["weights"][DOWN]["format"] = "q5_0"
        found = decision.repriced(table_of(), GGUF, json.dumps(content))
        with pytest.raises(InputError, match="q5_0 by rtn, which was not measured"):
            explain(found, DOWN)
        shares = [explain(found, weight.name).share_of_kl for weight in WEIGHTS if weight.name != DOWN]
        assert math.fsum(shares) == pytest.approx(1)

    def test_a_reason_can_be_checked(self) -> None:
        """A step up saves less, a step down costs more than the price of a byte, wherever the solver had a choice on the hull."""
        plan = allocator(table_of(13), GGUF, Constraints(("q3_k", "q5_k", "q8_0"))).within_bytes(2_000_000, "--size 2MB")
        said = [re.search(r"would save ([\d.e+-]+) KL/kB; .* cost ([\d.e+-]+); the price is ([\d.e+-]+)", e.reason) for e in plan.entries]
        known = [tuple(map(float, each.groups())) for each in said if each]
        assert len(known) > 3
        # three formats on a convex curve; two digits each; the last of the budget may go where it just fits
        right = [saved <= price * 1.05 and cost >= price * 0.95 for saved, cost, price in known]
        assert sum(right) >= len(right) - 1


class TestCommandLine:
    def test_a_plan_is_explained_and_saved(self, run: Any, tmp_path: Path) -> None:
        table_of().save(tmp_path / "t.json")
        words = ("plan", "some/model", "--sensitivity", tmp_path / "t.json", "--size", "2MB", "--explain", DOWN)
        code, out, err = run(*words, "--json", "-o", tmp_path / "plan.json")
        assert code == 0, err
        told = json.loads(out)
        found = plan("model", tmp_path / "t.json", size="2MB")
        assert told["plan"] == json.loads(found.plan.to_json()) == json.loads((tmp_path / "plan.json").read_text())
        saved = json.loads((tmp_path / "plan.frontier.json").read_text())
        assert saved == told["frontier"] and len(saved) > 1
        assert told["frontier"] == [asdict(point) for point in found.frontier()] and len(told["frontier"]) == 20
        assert told["explained"][0]["weight"] == DOWN and told["limit_bytes"] == 1_900_000
        code, out, err = run(*words)
        assert code == 0 and "frontier" in out + err and DOWN in out and "by thresholds" in out + err

    def test_a_wrong_name_is_said_before_anything_is_written(self, run: Any, tmp_path: Path) -> None:
        table_of().save(tmp_path / "t.json")
        words = ("plan", "model", "--sensitivity", tmp_path / "t.json", "--size", "2MB", "-o", tmp_path / "plan.json")
        code, _, err = run(*words, "--explain", DOWN.replace("down", "dwn"))
        assert code == 2 and "no weight is named" in err and not (tmp_path / "plan.json").exists()

    def test_one_text_is_not_a_list_of_letters(self, tmp_path: Path) -> None:
        table_of().save(tmp_path / "t.json")

        def formats_by(together: Any) -> list[str]:
            return [entry.format for entry in plan("model", tmp_path / "t.json", size="2MB", together=together).plan.entries]

        assert formats_by("self_attn") == formats_by(["self_attn"]) != formats_by(list("self_attn"))

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
