"""results.json after a real run: what is gathered for the page is what slow twins find, and its command makes the same bytes."""

from __future__ import annotations

import hashlib
import json
import math
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fewbits
from fewbits import embedded, formats
from fewbits.artifact import Artifact
from fewbits.formats.runtime import kv
from fewbits.formats.storage.codes import decode, encode
from fewbits.inspection.sizes import tensor_bytes
from fewbits.model import Model
from fewbits.planning import footprint
from fewbits.reporting import results
from fewbits.reporting.results import reproduction
from fewbits.request import Request

WEIGHTS = ("model.layers.0.self_attn.k_proj", "model.layers.3.mlp.down_proj")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("made") / "small.gguf"
    fewbits.quantize(
        embedded.MODEL, path, size="4bpw", formats=("q3_k", "q4_k", "q8_0"), method="rtn", samples=8, length=64, tokens=504, max_kl=1.0
    )
    return path


@pytest.fixture(scope="module")
def found(made: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((work_of(made) / "results.json").read_text())
    return content


def work_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.work")


def test_the_page_is_made_by_itself(made: Path) -> None:
    page = (work_of(made) / "report.html").read_text()
    assert "small.gguf" in page and "Passed" in page and 'data-chart="growth"' in page


def test_every_plan_of_the_frontier_is_its_sum(found: dict[str, Any]) -> None:
    plans, points = found["frontier_plans"], found["decision"]["frontier"]
    assert [row["bytes"] for row in plans["points"]] == [row["nbytes"] for row in points]
    for point, known in zip(plans["points"], points, strict=True):
        chosen = [options[index] for options, index in zip(plans["options"], point["choice"], strict=True)]
        assert sum(option["bytes"] for option in chosen) == point["bytes"]
        # each of the terms and the sum were rounded to four digits
        assert math.fsum(option["kl"] for option in chosen) == pytest.approx(known["kl"], rel=1.1e-3)


def test_one_format_for_all_costs_what_the_table_says(found: dict[str, Any]) -> None:
    """The smallest plan of all is the smallest format for all."""
    least, smallest = found["frontier_plans"]["points"][0], found["frontier_plans"]["uniform"][0]
    assert (smallest["format"], smallest["bytes"], smallest["kl"]) == ("q3_k", least["bytes"], pytest.approx(least["kl"], rel=1e-3))


@pytest.mark.parametrize("name", WEIGHTS)
def test_histograms_count_every_value(name: str, found: dict[str, Any], made: Path, embedded_model: Model) -> None:
    (row,) = (each for each in found["distributions"] if each["weight"] == name)
    weight = next(each for each in embedded_model.weights if each.name == name)
    artifact = Artifact(work_of(made) / "artifact")
    for values, told in ((embedded_model.load(weight), row["before"]), (artifact.decoded(weight), row["after"])):
        x = values.double().numpy().ravel()
        assert sum(told["counts"]) == len(x) == row["sampled"]
        edges = np.linspace(told["low"], told["high"], len(told["counts"]) + 1)
        counts, _ = np.histogram(x, edges)
        # ends are told to five digits: what lies that near to an edge may be on either side of it
        near = 1e-5 * max(abs(told["low"]), abs(told["high"])) * 2
        doubtful = [int(((x > edge - near) & (x < edge + near)).sum()) for edge in edges]
        for index, (ours, theirs) in enumerate(zip(told["counts"], counts, strict=True)):
            assert abs(ours - theirs) <= doubtful[index] + doubtful[index + 1]
    w = embedded_model.load(weight).double().numpy()
    assert (row["low"], row["high"]) == (pytest.approx(w.min(), rel=1e-4), pytest.approx(w.max(), rel=1e-4))
    assert row["far"] == pytest.approx(float((np.abs(w - w.mean()) > 4 * w.std(ddof=1)).mean()), rel=1e-4)


@pytest.mark.parametrize("name", WEIGHTS)
def test_clipped_is_what_the_nearest_code_does_not_reach(name: str, found: dict[str, Any], made: Path, embedded_model: Model) -> None:
    """These formats have steps of equal width: a value inside of them is half a step from a code at most."""
    (row,) = (each for each in found["distributions"] if each["weight"] == name)
    weight = next(each for each in embedded_model.weights if each.name == name)
    artifact = Artifact(work_of(made) / "artifact")
    fmt = formats.get(artifact.plan[name].format)
    _, grid = fmt.unpack(artifact.parts(weight))
    scale, offset = fmt.affine(grid)
    w = embedded_model.load(weight)
    assert fmt.levels is not None
    away = (decode(encode(w, fmt.levels, scale, offset), fmt.levels, scale, offset) - w).abs()
    beyond = float((away > 0.5 * scale.abs() * (1 + 1e-5)).float().mean())
    assert row["clipped"] == pytest.approx(beyond, abs=2 / w.numel()) and beyond > 0


def test_inputs_are_counted_as_calibration_saw_them(found: dict[str, Any]) -> None:
    for row in found["distributions"]:
        if row["input"] is not None:
            assert sum(row["input"]["values"]["counts"]) == 8 * 64 * row["input"]["channels"]
            assert row["input"]["low"] == row["input"]["values"]["low"]
    assert sum(row["input"] is not None for row in found["distributions"]) == len(found["distributions"])  # the embedding is the output too


def test_errors_add_up_to_all_blocks(found: dict[str, Any]) -> None:
    added = found["accumulation"]
    assert [row["block"] for row in added["rows"]] == [-1, 0, 1, 2, 3]
    assert added["rows"][-1]["predicted_so_far"] == pytest.approx(found["plan"]["predicted_kl"], rel=1e-3)


def test_a_look_at_errors_is_cheap() -> None:
    windows = [list(range(512))] * 32
    for blocks in (1, 4, 30, 120):
        few = results._few(windows, blocks)
        streamed = sum(map(len, few)) * (blocks // 2 + 1)
        assert streamed <= 32 * 512 / 8 or sum(map(len, few)) == 128  # an eighth of the verification, or the least that says anything
    assert results._few([[1, 2, 3]], 4) == [[1, 2, 3]]


def test_memory_is_hardware_s_arithmetic(found: dict[str, Any], made: Path, embedded_model: Model) -> None:
    shape = footprint.shape(embedded_model.config)
    assert {row["kv"] for row in found["memory"]} == {"float", "int8"}
    for row in found["memory"]:
        need = footprint.memory(shape, tensor_bytes(made), footprint.Use(context=row["context"], kv=kv.get(row["kv"])))
        assert [row[key] for key in ("weights", "kv_cache", "activations", "overhead")] == [
            need.weights, need.kv_cache, need.activations, need.overhead,
        ]  # fmt: skip


def test_kernels_serve_every_weight(found: dict[str, Any]) -> None:
    assert sum(row["weights"] for row in found["kernels"]) == len(found["plan"]["weights"])
    assert sum(row["bytes"] for row in found["kernels"]) == found["plan"]["bytes"]


def test_its_command_makes_the_same_bytes(found: dict[str, Any], made: Path, run: Callable[..., tuple[int, str, str]]) -> None:
    again, judged = found["reproduction"]["commands"]
    hashes = {row["what"]: row["sha256"] for row in found["reproduction"]["hashes"]}
    assert hashes["`small.gguf`"] == hashlib.sha256(made.read_bytes()).hexdigest()
    made.unlink()
    code, _, _ = run(*shlex.split(again)[1:], "--quiet")
    assert code == 0 and hashlib.sha256(made.read_bytes()).hexdigest() == hashes["`small.gguf`"]
    code, said, _ = run(*shlex.split(judged)[1:], "--json", "--quiet")
    assert code == 0 and json.loads(said)["kl_mean"] == pytest.approx(found["verdict"]["kl_mean"], rel=1e-6)


def test_commands_say_what_differs_from_the_default() -> None:
    given = Request(model="a model", out=Path("x.gguf"), size="4.5bpw")
    plain = "fewbits quantize 'a model' -o x.gguf --size 4.5bpw"
    assert reproduction.command("quantize", given) == plain
    more = replace(given, data=["a.txt", "b.txt"], formats=["q4_k", "q8_0"], no_verify=True, max_kl=0.01, offline=True)
    words = shlex.split(reproduction.command("quantize", more))
    assert words[:5] == shlex.split(plain)[:5] and "--offline" not in words
    for part in (["--data", "a.txt", "--data", "b.txt"], ["--formats", "q4_k,q8_0"], ["--no-verify"], ["--max-kl", "0.01"]):
        assert any(words[i : i + len(part)] == part for i in range(len(words)))
    assert len(reproduction.commands(more)) == 1  # its judging text was a part of the data
    assert reproduction.commands(given)[1] == "fewbits verify x.gguf --against 'a model'"
    kinds = replace(given, data=["a=1.txt", "b=2.txt"], held_out=["a=3.txt"], weights={"a": 2, "b": 0.5}, length="64,a=32,b=16")
    made, judged = reproduction.commands(kinds)
    assert made.endswith("--data a=1.txt --data b=2.txt --held-out a=3.txt --weights a=2,b=0.5 --length 64,a=32,b=16")
    assert judged.endswith("--data a=3.txt --length 64,a=32 --weights a=2")


def test_a_file_that_is_not_run_leaves_out_what_needs_running(tmp_path: Path) -> None:
    made = fewbits.quantize(embedded.MODEL, tmp_path / "plain.gguf", format="q4_0", method="rtn", no_verify=True)
    found = json.loads((work_of(made.path) / "results.json").read_text())
    assert found["accumulation"] is None and found["left_out"] == {"accumulation": "nothing was run"}
    assert all(row["input"] is None for row in found["distributions"]) and found["frontier_plans"] is None
    assert "Not verified" in (work_of(made.path) / "report.html").read_text()
