"""Weights that are made side by side are those of one after the other, in the plan's order."""

from __future__ import annotations

from pathlib import Path
from threading import Barrier, current_thread

import pytest
import torch

from fewbits import calibration, formats, targets
from fewbits.artifact import outcomes
from fewbits.calibration.folder import Statistics
from fewbits.model import Model
from fewbits.planning import uniform
from fewbits.progress import silent
from fewbits.store import threads
from fewbits.store.cache import Cache


@pytest.fixture(scope="module")
def statistics(embedded_model: Model, tmp_path_factory: pytest.TempPathFactory) -> Statistics:
    folder = tmp_path_factory.mktemp("statistics") / "all"
    calibration.collect(embedded_model, calibration.draw(embedded_model, (), 4, 64, 0), folder)
    return Statistics(folder)


def test_two_threads_give_the_bytes_of_one(embedded_model: Model, statistics: Statistics, tmp_path: Path) -> None:
    plan = uniform(embedded_model.weights, targets.get("gguf"), formats.get("q4_0"), (), "auto")
    cache, made = Cache(tmp_path / "cache"), []
    for count, kept in ((1, None), (2, cache), (2, cache)):  # the last time all of them are in the cache
        torch.set_num_threads(count)
        try:
            made.append(list(outcomes.independent(embedded_model, plan, statistics, silent, kept)))
            assert torch.get_num_threads() == count
        finally:
            torch.set_num_threads(1)
    names = [weight.name for weight in embedded_model.weights]
    for stream in made:
        assert [weight.name for weight, _ in stream] == names
        for (_, one), (_, other) in zip(made[0], stream, strict=True):
            assert one.method == other.method and one.damping == other.damping
            assert all(torch.equal(part, other.parts[name]) for name, part in one.parts.items())
    assert cache.results()["weight"] == len(names)


def test_as_many_at_a_time_as_there_are_threads_and_each_on_one() -> None:
    meeting = Barrier(2, timeout=20)

    def work(item: int) -> tuple[int, int, str]:
        meeting.wait()  # returns when two of them are at work
        return item, torch.get_num_threads(), current_thread().name

    torch.set_num_threads(2)
    try:
        found = list(threads.side_by_side(work, range(10)))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    assert [item for item, _, _ in found] == list(range(10))
    assert {count for _, count, _ in found} == {1} and len({name for _, _, name in found}) == 2


def test_what_fails_in_a_thread_fails_the_whole() -> None:
    def work(item: int) -> int:
        if item == 3:
            raise ValueError("three")
        return item

    with pytest.raises(ValueError, match="three"):
        list(threads.side_by_side(work, range(6)))
    assert torch.get_num_threads() == 1
