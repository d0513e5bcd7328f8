"""Compiled kernels that travel: a launch finds them in Triton's cache, and what does not fit is left out with a reason."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fewbits.errors import InputError
from fewbits.kernels.triton.tooling.shipped import seed, seed_from_environment, write

CASES = ("product int4_g128 float16 1", "norm_and_quantize")

# Triton's own way from a launch to a compiled kernel, with a driver that names a GPU and has none
LAUNCH = """
import sys, torch, triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from fewbits.kernels.triton.tooling import cases
from fewbits.kernels.triton.device import Device

architecture, processors, *names = sys.argv[1:]
target = GPUTarget("cuda", int(architecture[3:]), 32) if architecture.startswith("sm_") else GPUTarget("hip", architecture, 64)

class Absent:
    def get_current_target(self): return target
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0

driver.set_active(Absent())
triton.knobs.compilation.listener = lambda **told: print(told["cache_hit"])
for name in names:
    call = cases.all()[name].call(Device(architecture, int(processors)))
    call.kernel.warmup(**call.arguments, **call.constants, **call.options, grid=call.grid)
"""


def launched(cache: Path, architecture: str, processors: int, *names: str) -> list[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(cache)}
    words = [sys.executable, "-c", LAUNCH, architecture, str(processors), *names]
    return subprocess.run(words, env=environment, capture_output=True, text=True, check=True).stdout.split()


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shipping") / "kernels"
    write(folder, [(case, architecture) for case in CASES for architecture in ("sm_80", "gfx942")])
    return folder


def changed(shipped: Path, tmp_path: Path, **fields: object) -> Path:
    folder = tmp_path / "kernels"
    folder.mkdir()
    for path in shipped.iterdir():
        if path.is_dir():
            (folder / path.name).symlink_to(path)
    index = json.loads((shipped / "index.json").read_text()) | fields
    (folder / "index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize("architecture, processors", [("sm_80", 108), ("gfx942", 304)])
def test_a_launch_finds_what_was_compiled_elsewhere(shipped: Path, tmp_path: Path, architecture: str, processors: int) -> None:
    seeded = seed(shipped, architecture, tmp_path)
    assert seeded.taken == 2 and len(seeded.skipped) == 2
    assert all(f"this is {architecture}" in entry.reason for entry in seeded.skipped)
    # and what was not shipped is compiled at its launch
    assert launched(tmp_path, architecture, processors, *CASES, "add_up 16") == ["True", "True", "False"]


def test_what_is_stale_or_foreign_is_left_out_with_a_reason(shipped: Path, tmp_path: Path) -> None:
    for fields, reason in (({"triton": "2.0.0"}, "compiled by Triton 2.0.0"), ({"sources": "0" * 64}, "from other sources")):
        own = tmp_path / reason.split()[-1]
        own.mkdir()
        seeded = seed(changed(shipped, own, **fields), "sm_80", own / "cache")
        assert seeded.taken == 0 and all(reason in entry.reason for entry in seeded.skipped) and len(seeded.skipped) == 4
        assert not (own / "cache").exists()


def test_a_damaged_file_and_a_path_that_leads_out_are_left_out(shipped: Path, tmp_path: Path) -> None:
    kernels = json.loads((shipped / "index.json").read_text())["kernels"]
    first, second, *_ = [entry for entry in kernels if entry["architecture"] == "sm_80"]
    first["files"] = dict.fromkeys(first["files"], "0" * 64)
    second["key"] = "../outside"
    wrong = [first, second, {"files": 3}, "no entry", {**first, "files": {}}]
    seeded = seed(changed(shipped, tmp_path, kernels=wrong), "sm_80", tmp_path / "cache")
    assert seeded.taken == 0
    assert ["damaged" in entry.reason for entry in seeded.skipped] == [True] * 5
    assert not (tmp_path / "outside").exists()


def test_a_folder_that_the_environment_names_is_taken_once(
    shipped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seed_from_environment.cache_clear()
    monkeypatch.delenv("FEWBITS_TRITON_KERNELS", raising=False)
    assert seed_from_environment("sm_90") is None
    monkeypatch.setenv("FEWBITS_TRITON_KERNELS", str(shipped))
    monkeypatch.setattr("triton.knobs.cache.dir", str(tmp_path))
    found = seed_from_environment("sm_80")
    assert found is not None and found.taken == 2 and len(list(tmp_path.iterdir())) == 2
    assert seed_from_environment("sm_80") is found
    assert [record.getMessage() for record in caplog.records] == [
        f"2 of the kernels in `{shipped}` are compiled anew: compiled for gfx942, this is sm_80"
    ]
    seed_from_environment.cache_clear()


def test_a_newer_index_and_none_are_refused(shipped: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="schema 2, this fewbits reads up to 1"):
        seed(changed(shipped, tmp_path, schema=2), "sm_80", tmp_path)
    with pytest.raises(InputError, match="no compiled kernels"):
        seed(tmp_path / "nowhere", "sm_80", tmp_path)
    with pytest.raises(InputError, match="is there already"):
        write(tmp_path, [])
