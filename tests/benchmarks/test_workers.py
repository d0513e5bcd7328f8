"""The measurement of speed-up, and what it says on paper of a model that nobody here can try."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from safetensors import safe_open

from fewbits import calibration
from fewbits.benchmarks.scale import busy, projection, workers
from fewbits.benchmarks.scale.projection import LLAMA_405B, Llama
from fewbits.benchmarks.synthetic_llama import Shape, write_checkpoint
from fewbits.errors import InputError
from fewbits.store import cache

SMALL = Shape(blocks=1, hidden=64, inner=128, vocabulary=2048)


@pytest.mark.slow
def test_every_number_of_workers_is_timed_and_leaves_the_same_files(tmp_path: Path) -> None:
    cache.code_version()
    found = workers.bench_workers(tmp_path, (1,), SMALL, ("q8_0", "q4_0"))
    assert [point.workers for point in found.points] == [0, 1] and found.speedup(found.points[1])["all"] == 1.0
    assert all(seconds > 0 for point in found.points[1:] for seconds in point.seconds.values())
    assert {path.name for path in tmp_path.iterdir()} == {"workers.json", "workers.svg"}
    assert [(unit.rows, unit.cols) for unit in found.units if unit.step == "measure"] == [(64, 64)] * 4 + [(128, 64)] * 2 + [(64, 128)]
    drawn = (tmp_path / "workers.svg").read_text()
    assert drawn.startswith("<svg") and drawn.count("<circle") == 4, "a point of four lines"
    paper = projection.project(tmp_path / "workers.json")
    assert [row.workers for row in paper.rows] == [1, 8, 64] and paper.rows[0].seconds > paper.rows[2].seconds


def test_the_weights_are_those_that_were_published() -> None:
    """405.85 billion, each matrix once: 126 blocks of four of attention and three of the MLP, and two of the vocabulary."""
    block = 2 * 16384 * 16384 + 2 * 1024 * 16384 + 3 * 16384 * 53248
    assert LLAMA_405B.weights == 126 * block + 2 * 128256 * 16384 == 405_849_243_648


def test_the_bytes_of_second_moments_are_those_that_calibration_writes(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", SMALL)
    calibration.calibrate(tmp_path / "model", tmp_path / "stats", samples=2, length=16)
    written = 0
    for path in (tmp_path / "stats").glob("*-00000.safetensors"):  # the only block: the output and the embedding lie beside it
        with safe_open(path, framework="pt") as file:
            large = [file.get_tensor(name) for name in file.keys() if name.rpartition(":")[2] in ("moment", "fisher")]  # noqa: SIM118
            written += sum(tensor.nbytes for tensor in large)
    counted = Llama("", SMALL.hidden, SMALL.inner, 1, SMALL.hidden, SMALL.vocabulary)
    diagonals = 4 * (sum(counted.inputs) + sum(cols for _, cols in counted.block))  # a triangle holds them in full
    assert written == counted.statistics + diagonals


def test_a_formula_that_the_units_follow_is_found_again() -> None:
    a, b, c = 2e-10, 9 / 40e9, 3e-7
    shapes = [(1024, 1024), (2816, 1024), (1024, 2816)]
    seconds = [a * cols**3 + b * rows * cols**2 + c * rows * cols for rows, cols in shapes]
    units = [(rows, cols, time) for (rows, cols), time in zip(shapes, seconds, strict=True)]
    assert projection._fitted(units, b) == pytest.approx((a, b, c), rel=1e-6)


def test_more_workers_never_take_longer_and_one_machines_part_stays(tmp_path: Path) -> None:
    units = [{"step": step, "rows": r, "cols": c, "seconds": 1e-10 * c**3 + 1e-7 * r * c} for step in ("measure", "quantize")
             for r, c in LLAMA_405B.block]  # fmt: skip
    shape = {"hidden": 1024, "inner": 2816, "blocks": 4, "vocabulary": 4096}
    point = {"workers": 1, "seconds": {"calibrate": 60.0}}
    (tmp_path / "workers.json").write_text(json.dumps({"shape": shape, "tokens": 4096, "units": units, "points": [point]}))
    rows = projection.project(tmp_path / "workers.json", (1, 2, 8, 64, 512)).rows
    for fewer, more in pairwise(rows):
        assert more.calibrate <= fewer.calibrate and more.measure <= fewer.measure and more.quantize <= fewer.quantize
        assert more.alone == fewer.alone and more.network >= fewer.network
    longest = max(1e-10 * c**3 + 1e-7 * r * c for r, c in LLAMA_405B.every)
    assert rows[-1].measure == pytest.approx(longest, rel=1e-6), "one unit is not divided"
    assert rows[-1].shards < 512, "adding up shards takes longer, the more there are"


def test_what_is_no_measurement_is_refused_with_a_hint(tmp_path: Path) -> None:
    (tmp_path / "workers.json").write_text("{}")
    for name, said in (("workers.json", "holds no measurement"), ("nothing.json", "there is no")):
        with pytest.raises(InputError, match=said) as caught:
            projection.project(tmp_path / name)
        assert "bench workers" in caught.value.hint
    with pytest.raises(InputError, match="no multiple of 1024"):
        workers.shape_of(hidden=1000)
    with pytest.raises(InputError, match="against one worker"):
        workers.bench_workers(tmp_path, (2, 4), SMALL)


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="children are asked of /proc")
def test_competitors_compute_while_a_run_is_timed_and_are_gone_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    beside: list[int] = []
    before = sum(len(path.read_text().split()) for path in Path("/proc/self/task").glob("*/children"))

    def run(*_: object) -> float:
        beside.append(sum(len(path.read_text().split()) for path in Path("/proc/self/task").glob("*/children")) - before)
        return 1.0 + beside[-1]

    monkeypatch.setattr(busy, "_run", run)
    found = busy.bench_busy(competitors=2, rounds=2)
    assert beside == [0, 2, 0, 2] and found.ratio == 3 and found.to_dict()["ratio"] == 3
