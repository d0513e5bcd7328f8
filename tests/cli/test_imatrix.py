"""llama.cpp's importance matrices go out of `calibrate` and into `quantize`: easy to find, and said to be used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import pytest

from fewbits import embedded

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
