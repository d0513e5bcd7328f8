"""What goes through a store arrives whole, or does not count as there."""

from __future__ import annotations

import errno
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from fewbits.store import cache, remote
from fewbits.store.executors import worker
from fewbits.store.executors.unit import Unit

WEIGHT = "fewbits.artifact.units:weight"


def test_an_upload_that_fails_half_way_leaves_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "result").write_bytes(bytes(1000))
    store = remote.open(f"file://{tmp_path / 'store'}")

    def put_file(source: str, target: str) -> None:
        Path(target).write_bytes(Path(source).read_bytes()[:500])
        raise ConnectionError("gone")

    monkeypatch.setattr(store._system, "put_file", put_file)
    with pytest.raises(remote.Damaged, match="gone"):
        store.put(tmp_path / "result", "cache/row-1-2.safetensors")
    assert store.find("cache/row-1-") is None


def test_a_download_that_fails_half_way_is_no_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "input").write_bytes(bytes(1000))
    store = remote.open(f"file://{tmp_path / 'store'}")
    digest, real = store.put_blob(tmp_path / "input"), store._system.get_file

    def get_file(source: str, target: str) -> None:
        Path(target).write_bytes(Path(source).read_bytes()[:500])
        raise ConnectionError("gone")

    unit = Unit("weight", WEIGHT, {}, {}, {"rewrite": digest}, {}, {}, "", f"file://{tmp_path / 'store'}")
    worker.scratch.cache_clear()
    monkeypatch.setattr(store._system, "get_file", get_file)
    with pytest.raises(remote.Damaged, match="gone"):
        worker.placed(unit, "rewrite")
    monkeypatch.setattr(store._system, "get_file", real)
    assert worker.placed(unit, "rewrite").read_bytes() == bytes(1000)
    assert [path.name for path in worker.placed(unit, "rewrite").parent.iterdir()] == [digest]


def test_a_full_store_is_said_with_a_hint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(worker, "_made", full)
    answer = worker.run(asdict(Unit("weight", WEIGHT, {}, {}, {}, {}, {}, str(tmp_path))))
    assert "a disk is full" in answer["error"] and answer["hint"] and answer["missing"]


@pytest.mark.parametrize("name", ["../../m.fewbits", "row-{key}-../../x.safetensors", "weight-{key}-{digest}.safetensors", ""])
def test_a_name_that_is_not_that_of_the_result_is_not_followed(name: str, tmp_path: Path) -> None:
    store = cache.Cache(tmp_path / "cache", {"code": "1"})
    made = store.keep("row", {}, {}, weight="w")
    _, key, digest = made.path.stem.split("-")
    assert store.take(name.format(key=key, digest=digest), "row", weight="w") is None
    assert store.take(made.path.name, "row", weight="w")
