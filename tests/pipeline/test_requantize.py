"""A GGUF that is quantized already is no float original: nothing here may treat it as one in silence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from fewbits import embedded
from fewbits.targets.export import export
from fewbits.targets.gguf.source import open_source

Run = Callable[..., tuple[int, str, str]]
FEW = ("--tokens", "256", "--length", "64")


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model in two quantized types, as somebody else's file."""
    from fewbits import quantize

    folder = tmp_path_factory.mktemp("theirs")
    made = quantize(embedded.MODEL, folder / "made.gguf", format="q4_k", override="embed=q8_0", method="rtn", no_verify=True)
    return export(made.artifact, folder / "theirs-Q4_K.gguf")


def test_a_quantized_gguf_is_refused_as_a_source(theirs: Path, tmp_path: Path, run: Run) -> None:
    code, _, said = run("quantize", theirs, "-o", tmp_path / "m.gguf", "--format", "q4_0", "--method", "rtn", *FEW)
    assert code == 2 and "quantized already (q4_k, q8_0; 5.07 bits" in said and "--requantize" in said
    assert not (tmp_path / "m.gguf").exists()


def test_a_requantized_file_is_compared_with_its_source_by_name(theirs: Path, tmp_path: Path, run: Run) -> None:
    out = tmp_path / "m.gguf"
    code, _, said = run("quantize", theirs, "-o", out, "--format", "q4_0", "--method", "rtn", "--requantize", *FEW)
    words = " ".join(said.split())
    assert code == 0 and "KL to float" not in words and "KL to source" in words
    assert "compared with theirs-Q4_K.gguf, itself quantized" in words
    page = (tmp_path / "m.gguf.work/report.html").read_text()
    assert "beside the original" not in page and "beside theirs-Q4_K.gguf, itself quantized" in page
    assert "instead of 16" not in page and "take in q4_k, q8_0" in page


def test_verify_says_that_its_reference_is_quantized(theirs: Path, run: Run) -> None:
    _, out, _ = run("verify", theirs, "--against", theirs, "--no-floor", "--json", *FEW)
    assert json.loads(out)["reference"].startswith("theirs-Q4_K.gguf, itself quantized (q4_k, q8_0; 5.07 bits")
    _, out, _ = run("verify", theirs, "--against", embedded.MODEL, "--no-floor", "--json", *FEW)
    assert json.loads(out)["reference"] is None


def test_a_float_gguf_and_one_published_in_mxfp4_are_sources(tmp_path: Path) -> None:
    from fewbits import quantize

    for name in ("fp16", "mxfp4"):
        made = quantize(embedded.MODEL, tmp_path / f"{name}.gguf", format=name, override="embed=fp16", method="rtn", no_verify=True)
        assert open_source(made.path).lossy is None, name
