"""The tables of data verbs: on stdout, within the width by dropping whole columns, and never with a cut figure."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from fewbits import embedded
from fewbits.inspection.contents import counted
from fewbits.inspection.distributions import distribution
from fewbits.reporting.terminal import console
from fewbits.reporting.terminal.tables import Column, fitted

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of sensitivities, by errors alone: no text is calibrated with."""
    from fewbits import model, targets
    from fewbits.sensitivity.errors import measure_errors
    from fewbits.targets import pricing

    source, target = model.open(embedded.MODEL), targets.get("gguf")
    names = [fmt for fmt in pricing.candidates_for(source, target, ()) if fmt.name in ("q4_k", "q8_0")]
    found = pricing.with_container(measure_errors(source, None, names, lambda items, *_: iter(items)), source, target)
    path = tmp_path_factory.mktemp("table") / "sensitivity.json"
    found.save(path)
    return path


@pytest.mark.parametrize("width", [60, 80])
def test_data_verbs_print_on_stdout_within_the_width(width: int, table: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "_width", width)
    for words in (
        ("formats",), ("fit", "--params", "70B", "--device", "rtx 3060 + 64GB"), ("fit", "--devices"), ("inspect", embedded.MODEL),
        ("compare", embedded.MODEL, "--weight", "layers.0", "--formats", "q4_0,q4_k"),
        ("plan", embedded.MODEL, "--sensitivity", table, "--size", "6bpw"),
    ):  # fmt: skip
        code, out, err = run(*words)
        assert code == 0 and len(out.splitlines()) > 5, words
        assert "…" not in out and max(map(len, out.splitlines())) <= width, (words, out)
        assert not [line for line in err.splitlines() if line and not line.startswith(("note:", " "))], err


def test_in_a_pipe_nothing_is_dropped(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "_width", None)  # COLUMNS, which is a wish of whoever runs the tests
    _, out, _ = run("formats")
    assert out.splitlines()[1].split() == ["name", "bits/w", "per", "targets", "kernel", "what", "it", "is"]
    assert "4 bits, scales and minima" in next(line for line in out.splitlines() if line.startswith("q4_k "))


def test_whole_columns_are_dropped_the_highest_rank_first() -> None:
    columns = (Column("name"), Column("middle", 1), Column("last", 2, right=True))
    rows = [("a" * 10, "b" * 10, "1234.5678"), ("c", "[bold]d[/]", "2")]
    for width, shown in ((40, ["name", "middle", "last"]), (32, ["name", "middle", "last"]), (31, ["name", "middle"]), (12, ["name"])):
        found = fitted(None, columns, rows, width)
        assert [str(column.header) for column in found.columns] == shown, width
        screen = Console(width=width, record=True, quiet=True)
        screen.print(found)
        assert "…" not in screen.export_text()


def test_names_sort_as_people_count() -> None:
    names = ["a.10.b", "a.2.b", "a.2.a", "b", "a"]
    assert sorted(names, key=counted) == ["a", "a.2.a", "a.2.b", "a.10.b", "b"]


def test_inspect_has_totals_per_type(run: Run) -> None:
    _, out, _ = run("inspect", embedded.MODEL, "--no-values", "--json")
    said = json.loads(out)
    (total,) = said["types"]
    assert total["type"] == "fp16" and total["tensors"] == len(said["tensors"]) and total["nbytes"] == said["tensor_bytes"]
    assert total["numbers"] * 2 == total["nbytes"]


@pytest.mark.parametrize("numbers", [5, 300, 70_001])
def test_a_distribution_is_what_torch_finds(numbers: int) -> None:
    x = torch.randn(numbers, generator=torch.Generator().manual_seed(0)) * 0.1 + 3
    found, exact = distribution(x.numpy()), x.double()
    assert found.mean == pytest.approx(float(exact.mean()), rel=1e-6)
    assert found.std == pytest.approx(float(exact.std(correction=0)), rel=1e-4)  # sums of 256 squares in float32
    assert (found.min, found.max, found.nonfinite) == (float(x.min()), float(x.max()), 0) and sum(found.histogram) == pytest.approx(1)
    broken = torch.cat([x, torch.tensor([float("nan"), float("inf")])])
    assert distribution(broken).nonfinite == 2 and distribution(broken).mean == pytest.approx(found.mean)
    assert distribution(np.full(1000, 0.1, np.float32)).std == 0


def test_inspect_loads_neither_torch_nor_transformers() -> None:
    """Which take seconds: 135M parameters are read in less."""
    script = "import sys, fewbits; fewbits.inspect(sys.argv[1]); print([m for m in ('torch', 'transformers') if m in sys.modules])"
    ended = subprocess.run([sys.executable, "-c", script, str(embedded.MODEL)], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "[]"
