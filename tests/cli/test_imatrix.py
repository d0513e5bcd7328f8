"""llama.cpp's importance matrices go out of `calibrate` and into `quantize`: easy to find, and said to be used."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest

from fewbits import embedded
from fewbits.calibration import importance_matrix

Run = Callable[..., tuple[int, str, str]]
SCREEN = 24  # lines of a terminal


@pytest.mark.parametrize("verb", ["quantize", "calibrate"])
def test_imatrix_is_on_the_first_screen_of_the_help(verb: str, run: Run) -> None:
    _, out, _ = run(verb, "--help")
    assert any("--imatrix FILE" in line for line in out.splitlines()[:SCREEN])


def test_an_importance_matrix_goes_out_and_in_and_is_confirmed(tmp_path: Path, run: Run) -> None:
    matrix = tmp_path / "imatrix.gguf"
    few = ("--samples", 2, "--length", 64)
    code, _, said = run("calibrate", embedded.MODEL, "-o", tmp_path / "stats", *few, "--imatrix", matrix, "--no-gradients")
    assert code == 0 and f"wrote {matrix}" in " ".join(said.split()) and "llama-quantize --imatrix" in said
    assert gguf.GGUFReader(matrix).fields["general.type"].contents() == "imatrix"
    code, _, said = run("quantize", embedded.MODEL, "-o", tmp_path / "m.gguf", "--format", "q4_k", "--imatrix", matrix, "--no-verify")
    assert code == 0 and "importance matrix `imatrix.gguf`: 28 of 29 weights" in said


def test_types_under_three_bits_take_no_weight_that_the_matrix_leaves_out(tmp_path: Path, run: Run) -> None:
    few = ("--samples", 2, "--length", 64, "--no-gradients")
    assert run("calibrate", embedded.MODEL, "-o", tmp_path / "stats", *few, "--imatrix", tmp_path / "whole.gguf")[0] == 0
    entries = importance_matrix._read(tmp_path / "whole.gguf")
    missing = "model.layers.1.mlp.up_proj"
    del entries["blk.1.ffn_up.weight"]
    importance_matrix._write_gguf(tmp_path / "most.gguf", entries, ["text"], 64, 2)
    to = ("quantize", embedded.MODEL, "-o", tmp_path / "m.gguf", "--no-verify", "--imatrix", tmp_path / "most.gguf")
    code, _, said = run(*to, "--format", "iq2_xs")
    said = " ".join(said.split())
    assert code == 2 and f"`{missing}` in iq2_xs" in said and "has no entry for it" in said and "--override" in said
    assert run(*to, "--format", "iq2_xs", "--override", f"{missing}=q4_k")[0] == 0
    code, out, said = run(*to, "--size", "2.5bpw", "--formats", "iq2_xxs,iq2_xs,iq2_s,iq3_s,q6_k", "--json")
    formats = {name: row["format"] for name, row in json.loads(out)["plan"]["weights"].items()}
    assert code == 0 and formats[missing] in ("iq3_s", "q6_k") and set(formats.values()) & {"iq2_xxs", "iq2_xs", "iq2_s"}, said
