"""Where passes run: names of devices, sums of one, and what happens when its memory ends."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fewbits
from fewbits import model as models
from fewbits.calibration import moments
from fewbits.calibration.collector import Collector
from fewbits.errors import InputError, MissingError
from fewbits.model import placement
from fewbits.model.blocks import Blocks
from fewbits.model.walk import LoadedBlock
from fewbits.request import Request
from fewbits.store.cache import Cache
from fewbits.store.mapped import Room
from tests.gguf_models import MODELS, save_random

SAMPLES = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8, 1, 8], [1, 6, 1, 8, 0, 3, 3, 9], [1, 4, 1, 4, 2, 1, 3, 5]]


def opened(name: str, folder: Path) -> models.Model:
    return models.open(save_random(MODELS[name](), folder / "model"))


def test_calibration_and_logits_on_a_fake_device() -> None:
    """In a process of its own: a backend that torch was told of stays, and autograd counts devices once."""
    script = Path(__file__).with_name("on_a_fake_device.py")
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", script]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, cwd=script.parents[2])
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def test_sums_of_a_device_are_those_of_the_processor() -> None:
    x = torch.randn(700, 48, generator=torch.Generator().manual_seed(0)) * 3
    ours, theirs = moments._on_device(x), moments._reference(x)
    assert ours[4] == theirs[4]
    assert torch.equal(ours[2], theirs[2])
    assert torch.equal(ours[3], theirs[3])
    eps = torch.finfo(torch.float32).eps
    assert bool(((ours[0] - theirs[0]).abs() <= len(x) * eps * x.double().abs().sum(0)).all())
    assert bool(((ours[1] - theirs[1]).abs() <= (len(x) + 1) * eps * theirs[1]).all())


class TestOutOfMemory:
    def collected(self, source: models.Model, folder: Path, said: list[str]) -> dict[str, Tensor]:
        def progress(items: Any, _: Any, what: str) -> Any:
            said.append(what)
            return items

        folder.mkdir()
        collector = Collector(Blocks(source), SAMPLES, Room(folder, 1 << 30), Cache(folder / "cache"), hessians=True, gradients=True)
        found: dict[str, Tensor] = {}
        for way in (collector.forward, collector.backward):
            for block, _, result in way(progress):
                found |= {f"{way.__name__} {block} {name}": tensor.clone() for name, tensor in result.tensors.items()}
        return found

    def failing(self, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
        plain: Callable[..., Tensor] = LoadedBlock.call

        def call(block: LoadedBlock, batch: Any, *args: Any, **kwargs: Any) -> Tensor:
            out = plain(block, batch, *args, **kwargs)  # hooks have seen the batch when memory ends
            if len(batch.ids) > most:
                raise torch.OutOfMemoryError("no room")
            return out

        monkeypatch.setattr(LoadedBlock, "call", call)

    def test_batches_are_halved_and_nothing_is_counted_twice(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        source, said = opened("llama", tmp_path), list[str]()
        whole = self.collected(source, tmp_path / "whole", [])
        self.failing(monkeypatch, 1)
        parts = self.collected(source, tmp_path / "parts", said)
        assert sum("out of memory: batches of at most 1 samples" in line for line in said) == 1
        assert parts.keys() == whole.keys()
        for name, tensor in whole.items():
            if not name.endswith((":extremes", ":some")):  # of each batch; positions are drawn by batches
                assert parts[name].shape == tensor.shape, name
                close = torch.allclose(parts[name].double(), tensor.double(), rtol=1e-4, atol=1e-4 * float(tensor.double().abs().max()))
                assert close, name

    def test_one_sample_that_does_not_fit_is_said(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        source = opened("llama", tmp_path)
        self.failing(monkeypatch, 0)
        with pytest.raises(MissingError, match="no room for one sample"):
            self.collected(source, tmp_path / "out", [])


class TestNames:
    @pytest.mark.parametrize("name", ["auto", "cpu", "cuda", "cuda:1", "MPS", "xpu:0"])
    def test_known(self, name: str) -> None:
        assert placement.check_name(name) == name.lower()

    @pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:x", "cpu:1", ""])
    def test_unknown(self, name: str, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="no device") as failure:
            Request(model="MODEL", out=tmp_path / "m.gguf", size="4bpw", device=name)
        assert "cuda" in str(failure.value.hint)

    def test_one_that_is_not_here(self) -> None:
        absent = next(gpu for gpu in ("xpu", "mps", "cuda") if not placement._is_here(gpu))
        with pytest.raises(MissingError, match="finds none"), placement.passes_on(absent):
            pass

    def test_it_is_refused_before_anything_is_opened(self, tmp_path: Path) -> None:
        absent = next(gpu for gpu in ("xpu", "mps", "cuda") if not placement._is_here(gpu))
        for verb in (
            lambda: fewbits.quantize(tmp_path / "none", tmp_path / "m.gguf", size="4bpw", device=absent),
            lambda: fewbits.calibrate(tmp_path / "none", tmp_path / "stats", device=absent),
            lambda: fewbits.verify(tmp_path / "none.gguf", tmp_path / "none", device=absent),
            lambda: fewbits.compare_files(tmp_path / "none.gguf", tmp_path / "none", device=absent),
        ):
            with pytest.raises(MissingError, match="finds none"):
                verb()

    def test_a_number_too_large(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        with pytest.raises(MissingError, match="there are 2") as failure, placement.passes_on("cuda:2"):
            pass
        assert "cuda:1" in str(failure.value.hint)

    def test_auto_takes_a_gpu_where_there_is_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(placement, "_is_here", lambda gpu: gpu == "xpu")
        assert placement.find("auto") == "xpu"
        monkeypatch.setattr(placement, "_is_here", lambda _: False)
        assert placement.find("auto") == "cpu"

    def test_workers_run_on_the_processor(self, tmp_path: Path) -> None:
        asked = {"model": "MODEL", "out": tmp_path / "m.gguf", "size": "4bpw", "executor": "local:2"}
        assert Request(**asked).passes_on == "cpu"  # type: ignore[arg-type]
        with pytest.raises(InputError, match="executor"):
            Request(**asked, device="cuda")  # type: ignore[arg-type]

    def test_results_of_another_device_are_other_results(self) -> None:
        assert placement.part_of_key() == {}
        token = placement._current.set("mps")
        try:
            assert placement.part_of_key() == {"device": "mps"}
        finally:
            placement._current.reset(token)
