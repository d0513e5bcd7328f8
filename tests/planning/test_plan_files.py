"""Plans and tables on disk: written, read, edited by hand, priced anew, and refused where they are damaged."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tables import DOWN, GGUF, WEIGHTS, share_of, table_of

from fewbits import formats, planning
from fewbits.errors import InputError
from fewbits.planning import decision
from fewbits.planning.allocation import allocator
from fewbits.planning.constraints import Constraints
from fewbits.sensitivity.table import Factor, read


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
        whole = allocator(table, GGUF, Constraints(("q4_0", "q8_0")))
        content = json.loads(whole.within_bytes(share_of(whole, 0.5), "").to_json())
        name = next(name for name, row in content["weights"].items() if row["format"] == "q4_0")
        content["weights"][name]["format"] = "iq4_nl"
        found = decision.repriced(table, GGUF, json.dumps(content)).plan
        assert found.nbytes == content["bytes"] and found[name].kl == table.rows[name]["iq4_nl"].kl != table.rows[name]["q4_0"].kl

    def test_a_format_that_was_not_measured_has_no_forecast(self) -> None:
        content = json.loads(allocator(table_of(), GGUF).within_bytes(2_000_000, "").to_json())
        content["weights"][DOWN]["format"] = "q5_0"
        found = decision.repriced(table_of(), GGUF, json.dumps(content)).plan
        assert found[DOWN].kl is None and found.kl is None and "predicted_kl" not in json.loads(found.to_json())

    @pytest.mark.parametrize(("method", "known"), [("rtn", True), ("RTN", True), ("gptq", False), ("auto", False)])
    def test_a_forecast_is_of_one_method(self, method: str, known: bool) -> None:
        """The table was measured by rtn: what another method would give is not known."""
        content = json.loads(allocator(table_of(), GGUF, Constraints(("q4_0",))).within_bytes(2_100_000, "").to_json())
        content["weights"][DOWN]["method"] = method
        found = decision.repriced(table_of(), GGUF, json.dumps(content)).plan
        assert (found[DOWN].kl is not None) == (found.kl is not None) == known

    def test_a_method_that_there_is_not_is_refused(self) -> None:
        content = json.loads(allocator(table_of(), GGUF).within_bytes(2_000_000, "").to_json())
        content["weights"][DOWN]["method"] = "gptqq"
        with pytest.raises(InputError, match="the method `gptqq`") as refused:
            planning.read(json.dumps(content), WEIGHTS, GGUF)
        assert "gptq" in refused.value.hint

    @pytest.mark.parametrize("kl", [math.nan, math.inf])
    @pytest.mark.parametrize("where", ["kl", "up"])
    def test_a_kl_that_is_not_finite_is_refused(self, kl: float, where: str) -> None:
        content = json.loads(allocator(table_of(), GGUF).within_bytes(2_000_000, "").to_json())
        row = content["weights"][DOWN]
        (row if where == "kl" else row["up"])["kl"] = kl
        with pytest.raises(InputError, match="not a plan"):
            planning.read(json.dumps(content), WEIGHTS, GGUF)

    def test_an_edit_to_a_format_of_the_same_size_is_an_edit(self) -> None:
        plan = allocator(table_of(), GGUF, Constraints(("q4_0", "iq4_nl", "q8_0"))).within_bytes(2_200_000, "--size")
        old = next(entry for entry in plan.entries if entry.format in ("q4_0", "iq4_nl"))
        content = json.loads(plan.to_json())
        content["weights"][old.weight]["format"] = {"q4_0": "iq4_nl", "iq4_nl": "q4_0"}[old.format]
        read = planning.read(json.dumps(content), WEIGHTS, GGUF)[old.weight]
        assert read.nbytes == old.nbytes and read.reason == "edited in plan.json" and read.kl is None and read.up is None

    @pytest.mark.parametrize(
        "choice",
        [
            ("--size", "2MB"), ("--override", "down_proj=q8_0"), ("--formats", "q4_0"), ("--strategy", "threshold"), ("--kv", "int8"),
            ("--together", "self_attn"), ("--min-speed", "1"),
        ],
    )  # fmt: skip
    def test_a_plan_to_price_leaves_nothing_to_choose(self, choice: tuple[str, str], run: Any, tmp_path: Path) -> None:
        table_of().save(tmp_path / "t.json")
        (tmp_path / "p.json").write_text(allocator(table_of(), GGUF).within_bytes(2_000_000, "").to_json())
        code, _, err = run("plan", "model", "--sensitivity", tmp_path / "t.json", "--plan", tmp_path / "p.json", *choice)
        assert code == 2 and "prices a plan as it is" in err and "hint:" in err

    def test_a_plan_is_priced_for_the_memory_that_is_named(self, run: Any, tmp_path: Path) -> None:
        table_of().save(tmp_path / "t.json")
        (tmp_path / "p.json").write_text(allocator(table_of(), GGUF).within_bytes(2_000_000, "").to_json())
        words = ("plan", "model", "--sensitivity", tmp_path / "t.json", "--plan", tmp_path / "p.json", "--json")
        speeds = [json.loads(run(*words, "--bandwidth", each)[1])["tokens_per_second"] for each in ("30GB/s", "60GB/s")]
        assert speeds[1] == pytest.approx(2 * speeds[0])

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
