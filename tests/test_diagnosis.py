"""`fewbits doctor` tells what is true of this machine."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata

import pytest
import torch
from typer.testing import CliRunner

from fewbits import kernels
from fewbits.cli import app
from fewbits.diagnosis import diagnose


def test_it_names_the_kernels_that_bind_would_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEWBITS_KERNEL", raising=False)
    found = diagnose()
    running = [backend.name for backend in found.backends if backend.formats]
    assert running[0] == kernels.backend() and running[-1] == "reference"
    assert all((backend.formats == 0) == (backend.missing is not None) for backend in found.backends)
    capability = torch.backends.cpu.get_cpu_capability()  # an independent opinion
    assert ("native-avx2" in running) == (capability in ("AVX2", "AVX512"))


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
    assert {backend["name"] for backend in json.loads(listed.output)["backends"]} == set(kernels.BACKENDS)


def test_it_loads_no_torch() -> None:
    script = "import sys; from fewbits.diagnosis import diagnose; diagnose(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)
