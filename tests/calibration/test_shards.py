"""Calibration divided into shards of the samples: they add up to what one pass finds."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from interrupted import tiny_model

from fewbits import calibration, embedded, model
from fewbits.calibration import collection, importance_matrix
from fewbits.calibration.folder import Statistics
from fewbits.calibration.shards import CollectOptions, collect_shards, samples_from_json, split_samples
from fewbits.store.cache import Cache


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


def test_every_sample_is_in_one_part() -> None:
    drawn = calibration.draw(model.open(embedded.MODEL), (), 11, 16, 0)
    for count in (1, 2, 5):
        found = split_samples(drawn, count)
        assert tuple(ids for part in found for ids in part.ids) == drawn.ids and len(found) == count
        assert len({part.digest for part in found}) == count and min(len(part.ids) for part in found) >= 2
        assert [samples_from_json(json.loads(json.dumps(asdict(part)))) for part in found] == found


def test_they_add_up_to_the_statistics_of_all_samples(tiny: Path, tmp_path: Path) -> None:
    """The slow twin is one pass over everything: the same tokens, summed in another order. Gradients are left out: their labels are
    drawn anew in each shard."""
    options: dict[str, Any] = {"samples": 8, "length": 32, "no_gradients": True}
    one = calibration.calibrate(tiny, tmp_path / "one", **options).statistics
    two = calibration.calibrate(tiny, tmp_path / "two", shards=2, **options).statistics
    assert {path.name for path in tmp_path.iterdir()} == {"one", "two"}, "the shards themselves are gone"
    for weight in model.open(tiny).weights:
        a, b = one.of(weight.name).input, two.of(weight.name).input
        if a is None or b is None:
            assert a is b
            continue
        assert torch.equal(a.count, b.count) and torch.equal(a.low, b.low) and torch.equal(a.high, b.high)
        # n terms added in another order: each sum is off by at most n eps times the sum of magnitudes, here of squares
        tokens, scale = int(a.count.sum()), a.square.sum(0).max()
        assert (a.square - b.square).abs().max() <= 2 * tokens * torch.finfo(torch.float32).eps * scale


def test_a_shard_that_was_finished_is_not_run_again(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, runs = calibration.collect, []

    def collect(*args: Any, **named: Any) -> Statistics:
        runs.append(len(args[1].ids))
        if len(runs) == 2:
            raise KeyboardInterrupt
        return real(*args, **named)

    monkeypatch.setattr(collection, "collect", collect)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt) if not runs else nullcontext():
            calibration.calibrate(tiny, tmp_path / "stats", samples=7, length=32, shards=3)
    assert runs == [2, 2, 2, 3]
    monkeypatch.undo()
    again = calibration.calibrate(tiny, tmp_path / "again", samples=7, length=32, shards=3).statistics
    assert again.digest == Statistics(tmp_path / "stats").digest


@pytest.mark.parametrize("what", ["other text", "damaged", "lost"])
def test_a_shard_of_other_text_or_that_is_not_whole_is_run_again(what: str, tiny: Path, tmp_path: Path) -> None:
    source = model.open(tiny)
    first, other = (calibration.draw(source, (), 4, 32, seed) for seed in (0, 1))
    options = CollectOptions(gradients=False)
    whole = collect_shards(source, other, tmp_path / "whole", 2, options, cache=Cache(tmp_path / "w" / "cache"))
    cache = Cache(tmp_path / "again" / "cache")
    collect_shards(source, first if what == "other text" else other, tmp_path / "before", 2, options, cache=cache)
    left = tmp_path / "again" / "shards" / "1-of-2" / "statistics"
    if what == "damaged":
        file = next(left.glob("input-*"))
        content = bytearray(file.read_bytes())
        content[-9] ^= 1
        file.write_bytes(content)
    if what == "lost":
        shutil.rmtree(left)
    assert collect_shards(source, other, tmp_path / "out", 2, options, cache=cache).digest == whole.digest


def test_the_importance_matrix_is_written_as_before(tiny: Path, tmp_path: Path) -> None:
    found = calibration.calibrate(tiny, tmp_path / "stats", samples=4, length=32, shards=2, imatrix=tmp_path / "imatrix.gguf")
    runs = found.statistics.about["runs"]
    assert len(runs) == 2 and sum(run["samples"] for run in runs) == 4
    assert importance_matrix.ImportanceMatrix(tmp_path / "imatrix.gguf", model.open(tiny))
