"""Passes on another device than the processor. No GPU is at hand: torch's fake tensors know shapes and devices of everything that is
computed, and fail where an operation mixes devices. A build of torch for the CPU cannot move tensors to `cuda`, fake or not, so the fake
device is one of a backend of our own. What needs values (native code, histograms) stands behind `moments.measured`, which is replaced."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from fewbits import model as models
from fewbits.calibration import moments
from fewbits.calibration.collector import Collector
from fewbits.calibration.histogram import Histogram
from fewbits.model import placement
from fewbits.model.blocks import Blocks
from fewbits.model.walk import Walk, batches
from fewbits.progress import silent
from fewbits.store.mapped import Room
from tests.gguf_models import MODELS, save_random

CARD = "card"
DENSE = ["llama", "gpt2", "gemma 2", "phi 3"]
SAMPLES = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8, 1, 8], [1, 6, 1, 8, 0, 3, 3, 9], [1, 4, 1, 4, 2, 1, 3, 5]]


@pytest.fixture(scope="session")
def card() -> torch.device:
    _setup_privateuseone_for_python_backend(CARD)
    return torch.device(CARD, 0)


@dataclass
class Held:
    """A cache that holds results as they are: fake tensors have nothing to write."""

    kept: dict[Any, Any] = field(default_factory=dict)

    def of(self, **_: Any) -> Held:
        return self

    def find(self, step: str, **key: Any) -> Any:
        return self.kept.get((step, *key.items()))

    def has(self, step: str, **key: Any) -> bool:
        return (step, *key.items()) in self.kept

    def keep(self, step: str, values: Any, tensors: Mapping[str, Tensor], **key: Any) -> Any:
        return self.kept.setdefault((step, *key.items()), SimpleNamespace(values=values, tensors=dict(tensors)))

    def drop(self, *_: Any, **__: Any) -> None:
        pass


def unmeasured(x: Tensor, _: int) -> Any:
    cols = x.shape[1]
    return torch.zeros(cols).double(), torch.zeros(cols).double(), torch.zeros(cols), torch.zeros(cols), Histogram()


def made_fake(blocks: Blocks) -> Blocks:
    """In place, inside a fake mode: what it holds, and what it will load."""
    blocks.replace_tensors(Tensor.detach)
    model = blocks.model
    blocks.model = SimpleNamespace(  # type: ignore[assignment]
        config=model.config, weights=model.weights, rest=model.rest, fingerprint=model.fingerprint,
        load=lambda weight: torch.zeros(weight.shape), tensor=lambda name: torch.zeros(blocks._shapes[name]),
    )  # fmt: skip
    return blocks


@pytest.fixture
def on_card(card: torch.device, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(moments, "measured", unmeasured)
    monkeypatch.setattr(torch, "equal", lambda a, b: a.device == b.device and a.shape == b.shape)  # fakes have no values to compare
    monkeypatch.setattr("fewbits.calibration.entry.torch.bincount", lambda ids, minlength: ids.new_zeros(minlength))
    token = placement._current.set(str(card))
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield
    placement._current.reset(token)


def opened(name: str, folder: Path) -> models.Model:
    return models.open(save_random(MODELS[name](), folder / "model"))


@pytest.mark.parametrize("name", DENSE)
class TestEverythingIsWhereItShouldBe:
    @pytest.fixture
    def blocks(self, name: str, tmp_path: Path) -> Blocks:
        return Blocks(opened(name, tmp_path)).expect_chain()  # what a model is needs values, and is found out on the processor

    def test_all_of_calibration_runs_there_and_its_results_come_back(
        self, blocks: Blocks, on_card: None, card: torch.device, tmp_path: Path
    ) -> None:
        held = Held()
        collector = Collector(made_fake(blocks), SAMPLES, Room(tmp_path, 1 << 30), held, hessians=True, gradients=True)  # type: ignore[arg-type]
        assert all(parameter.device == card for parameter in blocks._parameters.values())
        results = [result for _, _, result in (*collector.forward(silent), *collector.backward(silent))]
        collector.at_entry()
        assert len(results) == 2 * (len(blocks) + 1)
        assert {tensor.device.type for result in held.kept.values() for tensor in result.tensors.values()} == {"cpu"}
        assert any(name.endswith(":moment") for result in results for name in result.tensors)
        assert any(name.endswith(":fisher") for result in results for name in result.tensors)

    def test_logits_come_back(self, blocks: Blocks, on_card: None, tmp_path: Path) -> None:
        walk = Walk(made_fake(blocks), batches(SAMPLES), Room(tmp_path, 1 << 30))
        hidden = walk.enter()
        for index in range(len(blocks)):
            walk.advance(index, hidden)
        assert hidden.device.type == "cpu"
        assert walk.blocks.leave(hidden[None, :8]).device.type == CARD


@pytest.mark.usefixtures("on_card")
def test_an_operation_that_mixes_devices_fails(card: torch.device) -> None:
    with pytest.raises(Exception, match="same device"):
        torch.zeros(2, 2) @ torch.zeros(2, 2, device=card)


@pytest.mark.usefixtures("on_card")
def test_sums_are_on_the_device_as_long_as_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "room_for_sums", lambda _: 4 * 100)
    walk = Walk(SimpleNamespace(to=lambda device: SimpleNamespace(device=device)), (), Room(tmp_path, 1 << 20))  # type: ignore[arg-type]
    new = walk.sums()
    assert [new(shape).device.type for shape in ((2, 5, 5), (2, 6, 6), (2, 5, 5), (1,))] == [CARD, "cpu", CARD, "cpu"]
