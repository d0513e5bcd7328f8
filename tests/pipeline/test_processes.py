"""Processes that measure and quantize where nobody asked for them: when they are started, and what becomes of the work if they fail."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from interrupted import tiny_model
from safetensors.torch import load_file, save_file
from watching import noting
from workers import Fake

from fewbits import formats, model, pipeline, targets
from fewbits.artifact import outcomes
from fewbits.devices import host
from fewbits.errors import InputError
from fewbits.preflight import processes, steps
from fewbits.preflight.sizes import Sizes
from fewbits.preflight.work import Work
from fewbits.store import cache, executors, threads
from fewbits.store.executors.unit import Answer, Unit

GGUF = targets.get("gguf")
RATE = 2e11
SIZE: dict[str, Any] = {
    "size": "6bpw", "formats": ("int4_g32", "int8_channel"), "samples": 8, "length": 32, "to": "fewbits", "no_verify": True,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _one_version() -> None:
    cache.code_version()  # once: the sources may be edited while tests run


@pytest.fixture
def hired(monkeypatch: pytest.MonkeyPatch) -> Fake:
    """Two processes pay for everything."""
    workers = Fake()
    monkeypatch.setattr(executors, "_carrier", lambda _: workers)
    monkeypatch.setattr(processes, "wanted", lambda *_: 2)
    return workers


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def alone(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return made(tiny, tmp_path_factory.mktemp("alone"), executor="local")


def made(source: Path, folder: Path, **options: Any) -> dict[str, bytes]:
    out = pipeline.quantize(source, folder / "m.fewbits", **(SIZE | options)).path
    return {path.relative_to(out).as_posix(): path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()}


class TestHowMany:
    @pytest.fixture
    def machine(self, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
        def of(processors: int, free: int | None = 64 << 30, used: int | None = None) -> None:
            monkeypatch.setattr(host, "processors", lambda: processors)
            monkeypatch.setattr(host, "free_memory", lambda: free)
            monkeypatch.setattr(torch, "get_num_threads", lambda: used or processors)

        return of

    def wanted(self, source: model.Model, times: float = 1.0, **work: Any) -> int:
        """`times`: how slow this machine is."""
        every = tuple(formats.get(name).block or 1 for name in GGUF.candidates)
        asked = replace(Work(samples=64, formats=len(every), divisors=every), **work)
        return processes.wanted(Sizes(source, GGUF, asked, None), asked, RATE / times)

    def test_as_many_as_there_are_processors_up_to_eight(self, embedded_model: model.Model, machine: Callable[..., None]) -> None:
        for processors, count in ((1, 1), (2, 2), (5, 5), (64, 8)):
            machine(processors)
            assert self.wanted(embedded_model, 100) == count

    def test_none_for_work_of_a_few_seconds(self, embedded_model: model.Model, machine: Callable[..., None]) -> None:
        machine(8)
        assert self.wanted(embedded_model, 0.2) == 1
        assert self.wanted(embedded_model, 100, feedback=False) == 1  # rounding alone shares its rows among threads

    def test_no_more_than_threads_were_asked_for(self, embedded_model: model.Model, machine: Callable[..., None]) -> None:
        machine(8, used=3)
        assert self.wanted(embedded_model, 100) == 3

    def test_half_of_the_free_memory_at_the_most(self, embedded_model: model.Model, machine: Callable[..., None]) -> None:
        machine(8, free=4 << 30)
        count = self.wanted(embedded_model, 100)
        sizes = Sizes(embedded_model, GGUF, Work(), None)
        assert 1 < count < 8
        assert steps.of_processes(sizes, count) <= 2 << 30 < steps.of_processes(sizes, count + 1)
        machine(8, free=1 << 20)
        assert self.wanted(embedded_model, 100) == 1

    def test_the_forecast_counts_them(self, embedded_model: model.Model, machine: Callable[..., None]) -> None:
        machine(2)
        work = Work(samples=64, formats=10)
        one, two = (
            {step.name: step for step in steps.steps_of(Sizes(embedded_model, GGUF, each, None), each, RATE)}
            for each in (work, replace(work, processes=2))
        )
        assert two["quantizing"].seconds == one["quantizing"].seconds, "two threads of one process do as much"
        assert two["quantizing"].memory > one["quantizing"].memory + (700 << 20)
        assert two["calibrating"] == one["calibrating"]

    def test_weights_that_stay_are_not_divided(self, tiny: Path, machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
        machine(8)
        source = model.open(tiny)
        alone, work = Work(samples=64, formats=10), Work(samples=64, formats=10, processes=8)

        def of(each: Work) -> dict[str, steps.Step]:
            return {step.name: step for step in steps.steps_of(Sizes(source, GGUF, each, None), each, RATE)}

        monkeypatch.setattr(threads, "_NARROW", 0)  # all of them stay
        assert self.wanted(source, 1e4) == 1
        for name in ("measuring", "quantizing"):
            assert of(work)[name].seconds == of(alone)[name].seconds
            assert of(work)[name].memory >= of(alone)[name].memory + 8 * steps._IDLE, "they wait beside it"

    def test_threads_and_processes_round_weights_side_by_side(self, tiny: Path, machine: Callable[..., None]) -> None:
        source, seconds = model.open(tiny), {}
        for count in (2, 16):
            machine(count)  # at whose speed products are faster
            seconds[count] = steps.feedback_seconds(source.weights, RATE * count / 2)
        assert seconds[2] == pytest.approx(8 * seconds[16])
        assert steps.feedback_seconds(source.weights, RATE * 8, processes=4) == pytest.approx(4 * seconds[16])


class TestWork:
    def test_they_give_the_bytes_of_one_process(self, tiny: Path, alone: dict[str, bytes], tmp_path: Path, hired: Fake) -> None:
        notes: list[str] = []
        assert made(tiny, tmp_path, progress=noting(notes)) == alone
        names = {weight.name for weight in model.open(tiny).weights}
        assert sorted(hired.seen) == sorted(f"{step} {name}" for step in ("row", "weight") for name in names)
        assert [note for note in notes if "2 processes" in note] == [
            f"{what} in 2 processes (`--executor local`: in this one)" for what in ("measuring", "quantizing")
        ]

    def test_not_where_this_process_was_asked_for(self, tiny: Path, alone: dict[str, bytes], tmp_path: Path, hired: Fake) -> None:
        assert made(tiny, tmp_path, executor="local") == alone
        assert not hired.seen

    @pytest.mark.parametrize("option", [{"sequential": True}, {"shards": 3}, {"tune": 2}])
    def test_what_goes_block_by_block_or_by_shards_stays(self, option: dict[str, Any], tiny: Path, tmp_path: Path, hired: Fake) -> None:
        assert made(tiny, tmp_path / "hired", **option) == made(tiny, tmp_path / "alone", **option, executor="local")
        assert {name.split()[0] for name in hired.seen} == (set() if "sequential" in option else {"row", "weight"})

    def test_weights_that_need_all_threads_stay(
        self, tiny: Path, alone: dict[str, bytes], tmp_path: Path, hired: Fake, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        shapes = {weight.name: weight.shape for weight in model.open(tiny).weights}
        widest = max(cols for _, cols in shapes.values())
        monkeypatch.setattr(threads, "_NARROW", widest - 1)
        assert made(tiny, tmp_path) == alone
        assert {name.split()[1] for name in hired.seen} == {name for name, (_, cols) in shapes.items() if cols < widest}

    def test_a_few_weights_are_not_worth_it(self, tiny: Path, alone: dict[str, bytes], tmp_path: Path, hired: Fake) -> None:
        made(tiny, tmp_path)
        hired.seen.clear()
        for path in sorted((tmp_path / "m.fewbits.work" / "cache").glob("weight-*"))[:3]:
            path.unlink()
        assert made(tiny, tmp_path) == alone
        assert not hired.seen

    def test_a_weight_is_rounded_on_one_thread(self, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        seen: list[int] = []
        real = outcomes._quantized

        def noted(*args: Any) -> Any:
            seen.append(torch.get_num_threads())
            return real(*args)

        monkeypatch.setattr(outcomes, "_quantized", noted)
        before = torch.get_num_threads()
        torch.set_num_threads(2)
        try:
            made(tiny, tmp_path / "a", size=None, formats=(), format="int4_g32", executor="local")
            assert set(seen) == {1} and torch.get_num_threads() == 2
            seen.clear()
            made(tiny, tmp_path / "b", size=None, formats=(), format="int4_g32", method="rtn")
            assert set(seen) == {2}
        finally:
            torch.set_num_threads(before)


class TestWhereTheyFail:
    @pytest.mark.parametrize("answer", [Answer(lost="signal 9"), Answer(failed="Traceback\nOSError: no"), Answer(error="no", hint="none")])
    def test_this_process_goes_on_alone(self, answer: Answer, tiny: Path, alone: dict[str, bytes], tmp_path: Path, hired: Fake) -> None:
        def act(_: Unit, run: Callable[[], Answer]) -> Answer:
            return answer if len(hired.seen) > 3 else run()

        hired.act = act
        notes: list[str] = []
        assert made(tiny, tmp_path, progress=noting(notes)) == alone
        assert len(hired.seen) == 4, "none of them was asked again"
        assert [note for note in notes if "goes on alone" in note]

    def test_where_no_process_may_be_started(
        self, tiny: Path, alone: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refused(*_: Any, **__: Any) -> None:
            raise PermissionError("not here")

        monkeypatch.setattr(processes, "wanted", lambda *_: 2)
        monkeypatch.setattr("fewbits.store.executors.local.subprocess.Popen", refused)
        notes: list[str] = []
        assert made(tiny, tmp_path, progress=noting(notes)) == alone
        assert "worker processes fail (not here): this one goes on alone" in notes

    def test_a_mistake_of_the_user_is_told_as_without_them(self, tiny: Path, tmp_path: Path, hired: Fake) -> None:
        broken = shutil.copytree(tiny, tmp_path / "broken")
        tensors = load_file(broken / "model.safetensors")
        tensors["model.layers.0.mlp.up_proj.weight"][3, 5] = float("nan")
        save_file(tensors, broken / "model.safetensors", {"format": "pt"})
        told = []
        for executor in ("auto", "local"):
            with pytest.raises(InputError) as caught:
                made(broken, tmp_path / executor, executor=executor)
            told.append((str(caught.value), caught.value.hint))
        assert told[0] == told[1] and "up_proj" in told[0][0]
