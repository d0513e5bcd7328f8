"""Processes that fewbits starts take no module from the folder that one happens to be in: it may be a model's, from anywhere."""

from __future__ import annotations

from pathlib import Path

import pytest
from gguf import GGUFWriter

from fewbits.errors import InputError
from fewbits.store.executors.local import _Process
from fewbits.verification import runtimes, sandbox


@pytest.fixture(autouse=True)
def _in_a_folder_with_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("resource", "queue", "json", "signal"):
        Path(f"{name}.py").write_text("open('ran', 'w')\nraise SystemExit(9)\n")


def test_a_file_that_is_tried(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    try:
        sandbox.check(runtimes.get("llama.cpp"), tmp_path / "m.gguf")
    except InputError as failure:
        assert "exit code 9" not in str(failure)
    assert not Path("ran").exists()


def test_a_worker() -> None:
    worker = _Process(1)
    worker._units.write("nonsense\n")
    worker._units.flush()
    worker.answers.readline()
    worker.end()
    assert not Path("ran").exists()
