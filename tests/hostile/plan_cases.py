"""Hostile plan.json and sensitivity.json."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benign import Benign
from cases import case

FIRST = "model.layers.0.self_attn.q_proj"


def plan(folder: Path, benign: Benign, change: Callable[[Any], object]) -> Path:
    return changed(folder / "plan.json", benign.plan, change)


def table(folder: Path, benign: Benign, change: Callable[[Any], object]) -> Path:
    return changed(folder / "sensitivity.json", benign.sensitivity, change)


def changed(path: Path, honest: Path, change: Callable[[Any], object]) -> Path:
    content = json.loads(honest.read_text())
    change(content)
    path.write_text(json.dumps(content))
    return path


def written(folder: Path, text: str, name: str = "plan.json") -> Path:
    (folder / name).write_text(text)
    return folder / name


@case("plan")
def plan_of_nothing(folder: Path, _: Benign) -> Path:
    """an empty file"""
    return written(folder, "")


@case("plan")
def deep_plan(folder: Path, _: Benign) -> Path:
    """100,000 brackets"""
    return written(folder, '{"schema": 1, "weights": ' + "[" * 100_000)


@case("plan")
def list_for_a_plan(folder: Path, _: Benign) -> Path:
    """a list"""
    return written(folder, "[1, 2]")


@case("plan")
def weights_that_are_a_list(folder: Path, benign: Benign) -> Path:
    """rows that are no rows"""
    return plan(folder, benign, lambda content: content.update(weights=[[1, 2], [3, 4]]))


@case("plan")
def row_that_is_a_number(folder: Path, benign: Benign) -> Path:
    """a row that is a number"""
    return plan(folder, benign, lambda content: content["weights"].update({FIRST: 4}))


@case("plan")
def format_that_is_a_list(folder: Path, benign: Benign) -> Path:
    """a format that is a list"""
    return plan(folder, benign, lambda content: content["weights"][FIRST].update(format=["q4_0"]))


@case("plan")
def format_that_is_a_path(folder: Path, benign: Benign) -> Path:
    """a format whose name is a path"""
    return plan(folder, benign, lambda content: content["weights"][FIRST].update(format="../../etc/passwd"))


@case("plan")
def method_that_is_a_module(folder: Path, benign: Benign) -> Path:
    """a method whose name is a module to import"""
    return plan(folder, benign, lambda content: content["weights"][FIRST].update(method="os.system"))


@case("plan")
def infinite_forecast(folder: Path, benign: Benign) -> Path:
    """a KL of infinity"""
    return plan(folder, benign, lambda content: content["weights"][FIRST].update(kl=float("inf"), kl_of="q4_0"))


@case("plan")
def vast_bytes(folder: Path, benign: Benign) -> Path:
    """a step of 10^400 bytes, which is no float"""
    step = {"format": "q8_0", "bytes": 10**400, "kl": 10**400}
    return plan(folder, benign, lambda content: content["weights"][FIRST].update(up=step))


@case("plan")
def activation_that_is_a_list(folder: Path, benign: Benign) -> Path:
    """an activation that is a list"""
    return plan(folder, benign, lambda content: content["weights"][FIRST].update(activation=[1]))


@case("plan")
def activation_with_a_scale_of_nan(folder: Path, benign: Benign) -> Path:
    """a scale that is NaN"""
    bad = {"format": "int8", "static": True, "scale": float("nan"), "zero": 0}
    return plan(folder, benign, lambda content: content["weights"][FIRST].update(activation=bad))


@case("plan")
def target_that_is_a_path(folder: Path, benign: Benign) -> Path:
    """another schema, and a target that is a path"""
    return plan(folder, benign, lambda content: content.update(schema=float("nan"), target="../evil"))


@case("plan")
def cache_of_an_unknown_kind(folder: Path, benign: Benign) -> Path:
    """a KV cache of a kind that nobody knows"""
    return plan(folder, benign, lambda content: content.update(kv={"a": 1}))


@case("plan")
def million_rows(folder: Path, benign: Benign) -> Path:
    """a million rows for a model of sixteen weights"""
    rows = {f"w{i}": {"format": "q4_0"} for i in range(1_000_000)}
    return plan(folder, benign, lambda content: content["weights"].update(rows))


@case("plan")
def number_without_end(folder: Path, _: Benign) -> Path:
    """a number of a million digits"""
    return written(folder, '{"schema": 1' + "0" * 1_000_000 + ', "weights": {}}')


@case("sensitivity")
def table_of_nothing(folder: Path, _: Benign) -> Path:
    """a text that is no table"""
    return written(folder, "null", "sensitivity.json")


@case("sensitivity")
def deep_table(folder: Path, _: Benign) -> Path:
    """100,000 brackets"""
    return written(folder, '{"schema":' * 100_000, "sensitivity.json")


@case("sensitivity")
def negative_kl(folder: Path, benign: Benign) -> Path:
    """a KL below zero: a budget without end"""
    return table(folder, benign, lambda content: content["rows"][FIRST]["q4_0"].update(kl=-1.0))


@case("sensitivity")
def kl_of_nan(folder: Path, benign: Benign) -> Path:
    """a KL that is NaN"""
    return table(folder, benign, lambda content: content["rows"][FIRST]["q4_0"].update(kl=float("nan")))


@case("sensitivity")
def scores_of_infinity(folder: Path, benign: Benign) -> Path:
    """scores that are infinite"""
    return table(folder, benign, lambda content: content["rows"][FIRST]["q4_0"]["scores"].update(weight=float("inf")))


@case("sensitivity")
def factor_of_nothing(folder: Path, benign: Benign) -> Path:
    """a correction by 10^400, which is no float"""
    bad = {"factor": 10**400, "spread": 0.1, "weights": 3}
    return table(folder, benign, lambda content: content["factors"].update(mlp=bad))


@case("sensitivity")
def unknown_field(folder: Path, benign: Benign) -> Path:
    """a field of a weight that there is not"""
    return table(folder, benign, lambda content: content["weights"][0].update(evil=1))


@case("sensitivity")
def vast_weight(folder: Path, benign: Benign) -> Path:
    """a weight of 2^62 x 2^62 values, each format of which has a size"""
    return table(folder, benign, lambda content: content["weights"][0].update(shape=[1 << 62, 1 << 62]))


@case("sensitivity")
def shape_of_text(folder: Path, benign: Benign) -> Path:
    """a shape of letters"""
    return table(folder, benign, lambda content: content["weights"][0].update(shape="ab"))


@case("sensitivity")
def name_that_is_a_number(folder: Path, benign: Benign) -> Path:
    """names that are numbers and lists"""
    return table(folder, benign, lambda content: content["weights"][0].update(name=7, kind=[1]))


@case("sensitivity")
def overhead_of_truth(folder: Path, benign: Benign) -> Path:
    """a container that weighs less than nothing"""
    return table(folder, benign, lambda content: content["containers"].update(gguf={"overhead": -(10**12)}))


@case("sensitivity")
def many_weights(folder: Path, benign: Benign) -> Path:
    """400,000 rows that no weight belongs to"""
    return table(folder, benign, lambda content: content["rows"].update({f"w{i}": {} for i in range(400_000)}))


@case("sensitivity")
def format_unknown(folder: Path, benign: Benign) -> Path:
    """formats that there are not"""

    def rename(content: Any) -> None:
        content["rows"] = {name: {f"../{fmt}": cell for fmt, cell in row.items()} for name, row in content["rows"].items()}

    return table(folder, benign, rename)
