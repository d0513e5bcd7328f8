"""Units of work done elsewhere: the same bytes as in one process, whatever is lost, damaged or done twice on the way."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from interrupted import tiny_model
from safetensors.torch import load_file, save_file
from watching import children, killing, noting
from workers import Fake

from fewbits import calibration, embedded, model, pipeline, sensitivity
from fewbits.artifact import outcomes
from fewbits.errors import InputError, MissingError
from fewbits.store import cache, executors, maker, remote
from fewbits.store.executors import worker
from fewbits.store.executors.crew import TRIES, Crew
from fewbits.store.executors.local import Processes
from fewbits.store.executors.unit import Answer, Unit
from fewbits.store.files import sampled

WEIGHT = "fewbits.artifact.units:weight"
FAST: dict[str, Any] = {"samples": 8, "length": 32, "tokens": 64, "to": "fewbits"}
SIZE: dict[str, Any] = {"size": "6bpw", "formats": ("int4_g32", "int8_channel"), **FAST}
WAYS: dict[str, dict[str, Any]] = {
    "a size": SIZE,
    "shards": {**SIZE, "shards": 3},
    "a rewrite": {"format": "int4_g32", "rewrite": "awq", **FAST},
    "no statistics": {"format": "int4_g32", "method": "rtn", **FAST},
}


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    """In the place of whatever executor is asked for."""
    workers = Fake()
    monkeypatch.setattr(executors, "_carrier", lambda _: workers)
    return workers


@pytest.fixture(autouse=True)
def _one_version() -> None:
    cache.code_version()  # once: the sources may be edited while tests run


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def whole(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, bytes]]:
    """What one process makes, by the way it is asked."""
    made: dict[str, dict[str, bytes]] = {}

    def of(way: str) -> dict[str, bytes]:
        if way not in made:
            made[way] = quantized(tiny, tmp_path_factory.mktemp("local") / "m.fewbits", WAYS[way])
        return made[way]

    return of


def quantized(source: Path, out: Path, options: dict[str, Any], **more: Any) -> dict[str, bytes]:
    """The output, the artifact, and every cached result that is named by a unit."""
    pipeline.quantize(source, out, no_verify=True, **options, **more)
    work = out.with_name(f"{out.name}.work")
    files = [*(path for path in out.rglob("*") if path.is_file())] if out.is_dir() else [out]
    files += [path for folder in ("artifact", "statistics") for path in (work / folder).rglob("*") if path.is_file()]
    files += [path for step in ("row", "weight") for path in (work / "cache").glob(f"{step}-*")]
    return {str(path.relative_to(out.parent)): path.read_bytes() for path in files}


def weights_of(folder: Path) -> int:
    return len(model.open(folder).weights)


class TestSameBytes:
    @pytest.mark.parametrize("way", WAYS)
    def test_units_told_by_json_give_what_one_process_gives(
        self, way: str, tiny: Path, whole: Callable[[str], dict[str, bytes]], tmp_path: Path, fake: Fake
    ) -> None:
        assert quantized(tiny, tmp_path / "m.fewbits", WAYS[way], executor="local:2") == whole(way)
        steps = Counter(name.split()[0] for name in fake.seen)
        assert steps["weight"] == weights_of(tiny) and len(set(fake.seen)) == len(fake.seen)
        assert steps["row"] == (weights_of(tiny) if "size" in WAYS[way] else 0) and steps["shard"] == (3 if way == "shards" else 0)

    def test_and_through_a_store(self, tiny: Path, whole: Callable[[str], dict[str, bytes]], tmp_path: Path, fake: Fake) -> None:
        store = tmp_path / "store"
        for way in ("shards", "a rewrite"):
            made = quantized(tiny, tmp_path / way / "m.fewbits", WAYS[way], executor="local:2", store=f"file://{store}")
            assert made == whole(way)
        assert fake.seen and not [path for path in store.rglob("*") if path.is_file()], "it only passes through"

    def test_and_with_llama_cpps_importance_matrix(self, tiny: Path, tmp_path: Path, fake: Fake) -> None:
        calibration.calibrate(tiny, tmp_path / "stats", samples=4, length=32, imatrix=tmp_path / "imatrix.gguf")
        options = {"format": "int4_g32", "stats": tmp_path / "imatrix.gguf", "to": "fewbits", "tokens": 64}
        alone = quantized(tiny, tmp_path / "a" / "m.fewbits", options)
        assert quantized(tiny, tmp_path / "b" / "m.fewbits", options, executor="local:2") == alone
        assert len(fake.seen) == weights_of(tiny)

    def test_what_is_lost_late_or_done_twice_changes_nothing(
        self, tiny: Path, whole: Callable[[str], dict[str, bytes]], tmp_path: Path, fake: Fake
    ) -> None:
        turn = iter(range(1000))

        def act(_: Unit, run: Callable[[], Answer]) -> Answer:
            match next(turn) % 4:
                case 0:
                    return Answer(lost="the cable was pulled")
                case 1:
                    run()  # done, and the worker lost before it could say so
                    return Answer(lost="the node died")
                case 2:
                    run()
            return run()

        fake.act = act
        assert quantized(tiny, tmp_path / "m.fewbits", SIZE, executor="local:2") == whole("a size")
        assert max(Counter(fake.seen).values()) > 1

    @pytest.mark.slow
    def test_processes_of_this_machine_one_of_them_killed(self, tmp_path: Path) -> None:
        """The embedded model, whole way; a worker is killed in the middle of its work."""
        options = {"size": "5bpw", "formats": ("int4_g32", "int8_channel"), "samples": 4, "length": 64}
        alone = quantized(embedded.MODEL, tmp_path / "a" / "m.gguf", options)
        notes: list[str] = []
        with killing(tmp_path / "b" / "m.gguf.work" / "cache", "row-*", 3, _a_worker) as killed:
            made = quantized(embedded.MODEL, tmp_path / "b" / "m.gguf", options, executor="local:2", progress=noting(notes))
        assert killed and made == alone
        assert any("signal 9" in note for note in notes), notes


class TestFaults:
    def test_a_unit_that_is_always_lost_is_named_and_the_rest_is_not_done_again(
        self, tiny: Path, whole: Callable[[str], dict[str, bytes]], tmp_path: Path, fake: Fake
    ) -> None:
        bad = "weight model.layers.1.mlp.up_proj"
        fake.act = lambda unit, run: Answer(lost="out of memory") if unit.name == bad else run()
        with pytest.raises(MissingError, match=f"`{bad}` was lost {TRIES} times.*out of memory"):
            quantized(tiny, tmp_path / "m.fewbits", SIZE, executor="local:2")
        done = set(fake.seen) - {bad}
        assert fake.seen.count(bad) == TRIES and len(done) > weights_of(tiny)
        fake.seen, fake.act = [], lambda _, run: run()
        assert quantized(tiny, tmp_path / "m.fewbits", SIZE, executor="local:2") == whole("a size")
        assert not done & set(fake.seen) and bad in fake.seen

    def test_an_interrupted_run_goes_on_in_one_process(
        self, tiny: Path, whole: Callable[[str], dict[str, bytes]], tmp_path: Path, fake: Fake, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def act(_: Unit, run: Callable[[], Answer]) -> Answer:
            if len(fake.seen) > 5:
                raise KeyboardInterrupt
            return run()

        fake.act = act
        with pytest.raises(KeyboardInterrupt):
            quantized(tiny, tmp_path / "m.fewbits", SIZE, executor="local:2")
        measured: list[str] = []
        real = sensitivity.row_of
        monkeypatch.setattr(sensitivity, "row_of", lambda *args: measured.append(args[2].name) or real(*args))
        assert quantized(tiny, tmp_path / "m.fewbits", SIZE) == whole("a size")
        assert len(measured) == weights_of(tiny) - 5

    def test_a_result_damaged_in_the_shared_folder_is_made_again(
        self, tiny: Path, whole: Callable[[str], dict[str, bytes]], tmp_path: Path, fake: Fake
    ) -> None:
        def act(unit: Unit, run: Callable[[], Answer]) -> Answer:
            answer = run()
            if fake.seen.count(unit.name) == 1 and unit.step == "weight":
                _flip(Path(unit.folder) / answer.file)
            return answer

        fake.act = act
        assert quantized(tiny, tmp_path / "m.fewbits", SIZE, executor="local:2") == whole("a size")
        assert Counter(name.split()[0] for name in fake.seen)["weight"] == 2 * weights_of(tiny)

    @pytest.mark.parametrize(("way", "what"), [("a size", "cache"), ("a size", "blobs"), ("shards", "blobs")])
    def test_what_the_store_damages_is_sent_again(
        self,
        way: str,
        what: str,
        tiny: Path,
        whole: Callable[[str], dict[str, bytes]],
        tmp_path: Path,
        fake: Fake,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """A byte of the first result, or of the first input, flipped between the store and whoever fetches it."""
        damaged: list[str] = []
        real = remote.Store.get

        def get(self: remote.Store, name: str, path: Path) -> None:
            real(self, name, path)
            if name.startswith(what) and not damaged:
                damaged.append(name)
                _flip(path)

        worker.scratch.cache_clear()  # nothing of an earlier test is there already
        monkeypatch.setattr(remote.Store, "get", get)
        made = quantized(tiny, tmp_path / "m.fewbits", WAYS[way], executor="local:2", store=f"file://{tmp_path / 'store'}")
        assert damaged and made == whole(way)
        assert Counter(fake.seen).most_common(1)[0][1] == 2, "one unit had to be done again"

    def test_no_more_units_are_out_than_there_are_workers_and_those_end_with_the_work(self) -> None:
        nothing = Unit("no such step", WEIGHT, {"machine": ["?", 1, "?"]}, {}, {}, {}, {}, "")
        carrier, waiting, before = Processes(1), deque([nothing] * 3), set(children(os.getpid()))
        left = []
        for _, answer in carrier.carry(waiting):
            left.append(len(waiting))
            assert "KeyError" in answer.failed, "told as it is, with its traceback"
        (worker,) = set(children(os.getpid())) - before
        carrier.close()
        assert left == [2, 1, 0] and worker not in children(os.getpid())

    def test_a_worker_ends_when_nobody_waits_for_it(self) -> None:
        worker = subprocess.Popen(
            [sys.executable, "-m", "fewbits.store.executors.local_worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert worker.stdin and worker.stdout
        worker.stdin.close()
        assert worker.wait(60) == 0
        worker.stdout.close()


class TestRefused:
    @pytest.fixture
    def unit(self, tiny: Path, tmp_path: Path) -> Unit:
        source = model.open(tiny)
        with cache.open_cache(tmp_path / "w") as store:
            about = store.about
        files = {path.name: sampled(path) for path in source.checkpoint.files()}
        where = {"where": str(tiny), "offline": True, "files": files, "fingerprint": source.fingerprint}
        parameters = {"weight": source.weights[1].name, "format": "int4_g32", "version": 1, "method": "rtn"}
        return Unit("weight", WEIGHT, about, parameters, {}, where, worker.versions(), str(tmp_path / "cache"))

    def test_none_of_what_follows_is_refused_as_it_is(self, unit: Unit, monkeypatch: pytest.MonkeyPatch) -> None:
        """And it has the threads that the work began with, while it runs."""
        real, threads = outcomes.quantized, []
        monkeypatch.setattr(outcomes, "quantized", lambda *args: threads.append(torch.get_num_threads()) or real(*args))
        unit = replace(unit, about={**unit.about, "machine": [unit.about["machine"][0], 3, maker.processor_name()]})
        assert worker.run(asdict(unit))["file"].startswith("weight-")
        assert threads == [3] and torch.get_num_threads() == 1

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"versions": {"torch": "0.4.1"}}, rf"has torch {torch.__version__.partition('+')[0]}.* began with torch 0\.4\.1"),
            ({"about": {"code": "other"}}, "files of fewbits .* differ"),
            ({"versions": {"transformers": "1.0"}}, r"has transformers .* began with transformers 1\.0"),
            ({"about": {"machine": ["Z80", 1, "?"]}}, f"adds up with {torch.backends.cpu.get_cpu_capability()}.* began with Z80"),
            ({"about": {"machine": [torch.backends.cpu.get_cpu_capability(), 1, "a Z80"]}}, "adds up with .* began with a Z80"),
            ({"model": {"files": {"model.safetensors": "7"}}}, "is another model here: .*model.safetensors"),
            ({"model": {"where": "/nowhere/at-all"}}, "there is nothing at `/nowhere/at-all`"),
        ],
    )
    def test_a_worker_that_would_give_other_bytes_says_what_differs(self, unit: Unit, change: dict[str, Any], message: str) -> None:
        for name, values in change.items():
            unit = replace(unit, **{name: {**getattr(unit, name), **values}})
        answer = worker.run(asdict(unit))
        assert answer["hint"] and "worker on" in answer["error"]
        assert re.search(message, answer["error"])

    def test_another_model_of_the_same_size(self, unit: Unit, tiny: Path, tmp_path: Path) -> None:
        other = shutil.copytree(tiny, tmp_path / "other")
        tensors = load_file(tiny / "model.safetensors")
        save_file({name: 2 * tensor for name, tensor in tensors.items()}, other / "model.safetensors", {"format": "pt"})
        assert (other / "model.safetensors").stat().st_size == (tiny / "model.safetensors").stat().st_size
        answer = worker.run(asdict(replace(unit, model={**unit.model, "where": str(other)})))
        assert "is another model here: model.safetensors" in answer["error"]

    def test_the_workers_message_and_hint_reach_the_user(self, tiny: Path, tmp_path: Path, fake: Fake) -> None:
        broken = tmp_path / "broken"
        shutil.copytree(tiny, broken)
        tensors = load_file(broken / "model.safetensors")
        tensors["model.layers.0.mlp.up_proj.weight"][3, 5] = float("nan")
        save_file(tensors, broken / "model.safetensors", {"format": "pt"})
        with pytest.raises(InputError, match=r"up_proj` holds nan at row 3, column 5.*worker on") as caught:
            quantized(broken, tmp_path / "m.fewbits", WAYS["no statistics"], executor="local:2")
        assert caught.value.hint == "the checkpoint is damaged" and fake.seen

    @pytest.mark.parametrize(
        ("executor", "store", "message"),
        [
            ("loca", None, "is no executor"),
            ("local:0", None, "0 processes"),
            ("local:100000", None, "processes"),
            ("ray://nowhere", None, "is no executor"),
            ("local", "file:///x", "goes with workers"),
            ("local:2", "/no/address", "is no address"),
            ("local:2", "nonsense://x", "no kind that fsspec knows"),
            ("LOCAL:2", "memory://x", "memory of one process"),
            ("local:2", "file:///proc/1/x", "cannot be used"),
        ],
    )
    def test_what_is_no_executor_is_refused_with_a_hint(self, executor: str, store: str | None, message: str) -> None:
        with pytest.raises(InputError, match=message) as caught:
            executors.parse(executor, store)
        assert caught.value.hint

    @pytest.mark.parametrize("option", [("--sequential",), ("--tune", 3)])
    def test_chains_stay_in_one_process(self, option: tuple[Any, ...], run: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
        code, _, said = run("quantize", embedded.MODEL, "-o", tmp_path / "m.gguf", "--format", "q4_0", "--executor", "local:2", *option)
        assert code == 2 and option[0] in said and "leave `--executor` out" in " ".join(said.split()) and not list(tmp_path.iterdir())

    def test_ray_that_is_not_installed(
        self, run: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real = executors.importlib.util.find_spec
        monkeypatch.setattr(executors.importlib.util, "find_spec", lambda name, *rest: None if name == "ray" else real(name, *rest))
        code, _, said = run("quantize", embedded.MODEL, "-o", tmp_path / "m.gguf", "--format", "q4_0", "--executor", "ray")
        assert code == 3 and "pip install 'fewbits[ray]'" in " ".join(said.split()) and not list(tmp_path.iterdir())

    def test_more_shards_than_samples_before_any_work(self, run: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
        words = ("calibrate", embedded.MODEL, "-o", tmp_path / "stats", "--samples", 4, "--shards", 3)
        code, _, said = run(*words)
        assert code == 2 and "there are 4 samples" in said and not list(tmp_path.iterdir())


def test_what_only_carries_units_is_no_part_of_a_result() -> None:
    assert all(cache._only_shows(Path("store/executors") / name) for name in ("__init__.py", "crew.py", "worker.py", "local.py", "ray.py"))
    assert not any(cache._only_shows(Path(room) / "units.py") for room in ("artifact", "calibration", "sensitivity"))


def test_a_unit_takes_the_processors_that_its_threads_use(tmp_path: Path) -> None:
    made = cache.Cache(tmp_path, {"machine": ["AVX2", 4, "?"]})
    crew = Crew(Fake(), {}, shapes={"narrow": (8, 4096), "wide": (8, 4097)})

    def cores(step: str, **parameters: str) -> int:
        return crew._unit(step, WEIGHT, parameters, {}, made).cores

    assert cores("row", weight="wide") == cores("weight", weight="narrow", method="gptq") == 1
    assert cores("weight", weight="wide", method="gptq") == cores("weight", weight="narrow", method="rtn") == cores("shard") == 4


def _flip(path: Path) -> None:
    """One bit of a byte in the middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _a_worker() -> bool:
    """One of this process's workers is killed."""
    workers = [pid for pid, line in children(os.getpid()).items() if "fewbits.store.executors.local_worker" in line]
    os.kill(workers[0], signal.SIGKILL)
    return True
