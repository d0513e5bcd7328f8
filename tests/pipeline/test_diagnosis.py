"""`fewbits doctor` tells what is true of this machine."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from fewbits import formats
from fewbits.cli import app
from fewbits.devices import processor
from fewbits.diagnosis import diagnose
from fewbits.kernels import triton


def test_the_converter_is_listed_with_its_folder_or_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("LLAMA_CPP_ROOT", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert diagnose().packages[-1].version is None and "--converter pip" in diagnose().packages[-1].get
    (tmp_path / "convert_hf_to_gguf.py").touch()
    monkeypatch.setenv("LLAMA_CPP_ROOT", str(tmp_path))
    assert diagnose().packages[-1].version == tmp_path.name


def test_it_names_the_kernels_that_bind_would_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEWBITS_KERNEL", raising=False)
    found = diagnose()
    running = [backend.name for backend in found.backends if backend.formats]
    assert next(name for name in running if name != "triton") == processor.backend() and running[-1] == "reference"
    assert all((backend.formats == 0) == (backend.missing is not None) for backend in found.backends)
    capability = torch.backends.cpu.get_cpu_capability()  # an independent opinion
    assert ("native-avx2" in running) == (capability in ("AVX2", "AVX512"))


def test_it_says_what_a_gpu_would_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEWBITS_KERNEL", raising=False)
    monkeypatch.setattr(triton, "runs_here", lambda: "no GPU is here")
    (found,) = [backend for backend in diagnose().backends if backend.name == "triton"]
    assert (found.formats, found.multiplies, found.missing) == (0, 0, "no GPU is here")
    monkeypatch.setattr(triton, "runs_here", lambda: None)
    first = diagnose().backends[0]
    packed = [fmt for fmt in formats.all().values() if not fmt.is_cast]
    assert (first.name, first.formats, first.multiplies, first.missing) == ("triton", len(packed), len(packed), None)


def test_it_names_versions_and_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {package.name: package.version for package in diagnose().packages}
    assert versions["torch"] == metadata.version("torch")
    real = metadata.version

    def without_onnx(name: str) -> str:
        if name == "onnx":
            raise metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(metadata, "version", without_onnx)
    onnx = next(package for package in diagnose().packages if package.name == "onnx")
    assert onnx.version is None and onnx.get == "pip install fewbits[onnx]"


def test_the_command_prints_both_ways() -> None:
    shown = CliRunner().invoke(app, ["doctor"])
    assert shown.exit_code == 0 and "native-scalar" in shown.output
    listed = CliRunner().invoke(app, ["doctor", "--json"])
    assert {backend["name"] for backend in json.loads(listed.output)["backends"]} == set(processor.BACKENDS)


@pytest.mark.skipif(triton._driver_is_here(), reason="which GPU it is, torch is asked")
def test_it_loads_no_torch() -> None:
    script = "import sys; from fewbits.diagnosis import diagnose; diagnose(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)
