"""Inputs that are too costly to round by a fixed scale: the file holds them in another way, runs, and says which they are."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

import fewbits
from fewbits import embedded

pytest.importorskip("onnxruntime")


@pytest.mark.parametrize("to", ["onnx", "safetensors"])
def test_a_limit_leaves_costly_inputs_as_they_are_in_a_file_that_runs(to: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "to": to, "format": "int8_channel", "activations": "int8:static", "method": "rtn", "samples": 12, "length": 128, "tokens": 2000,
        "answers": 0,
    }  # fmt: skip
    every = fewbits.quantize(embedded.MODEL, tmp_path / "every", activations_kl=math.inf, **options)
    some = fewbits.quantize(embedded.MODEL, tmp_path / "some", activations_kl=5e-4, stats=every.artifact.parent / "statistics", **options)
    assert len(every.plan.activations) == 28 and all(a.static for a in every.plan.activations.values())
    assert every.rewrites and every.gathered is not None and not any("inputs are not rounded" in each for each in every.gathered.remarks)
    static = {name for name, activation in some.plan.activations.items() if activation.static}
    exempt = set(every.plan.activations) - static
    assert static and exempt
    assert all(("its input is" in entry.reason) == (entry.weight in exempt) for entry in some.plan.entries)
    assert some.gathered is not None
    said = next(each for each in some.gathered.remarks if "inputs are not rounded to int8:static" in each)
    assert any(name in said for name in exempt)
    # q, k and v read one input, and so do gate and up: they are exempt together
    for one, other in (("q_proj", "v_proj"), ("gate_proj", "up_proj")):
        assert {name.replace(one, other) for name in exempt if one in name} == {name for name in exempt if other in name}
    assert every.verdict is not None and some.verdict is not None
    assert some.verdict.kl_mean < every.verdict.kl_mean
