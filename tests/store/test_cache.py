"""Results that outlive their process: whole or absent, found by what they were made from, never mistaken for another's."""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open

from fewbits.artifact import outcomes
from fewbits.errors import InputError, MissingError
from fewbits.methods import Outcome
from fewbits.store import cache, maker
from fewbits.store.cache import Cache, open_cache
from fewbits.store.files import Staged

TENSORS = {"codes": torch.arange(12, dtype=torch.uint8).reshape(3, 4), "scales": torch.tensor([0.1, -2.5], dtype=torch.float16)}
VALUES = {"damage": 0.1 + 0.2, "nothing": None, "names": ["a", "b"]}


def a_cache(folder: Path) -> Cache:
    return Cache(folder, {"code": "1"})


def the_file(folder: Path) -> Path:
    (path,) = folder.glob("*.safetensors")
    return path


class TestCache:
    def test_a_cached_result_is_found_by_another_process_to_the_bit(self, tmp_path: Path) -> None:
        a_cache(tmp_path).keep("weight", VALUES, TENSORS, name="w", bits=4)
        result = a_cache(tmp_path).find("weight", bits=4, name="w")
        assert result is not None and result.values == VALUES
        assert result.tensors.keys() == TENSORS.keys()
        assert all(
            torch.equal(result.tensors[name], tensor) and result.tensors[name].dtype == tensor.dtype for name, tensor in TENSORS.items()
        )

    def test_everything_it_was_made_from_is_in_its_name(self, tmp_path: Path) -> None:
        a_cache(tmp_path).of(source="m").keep("weight", {}, {}, name="w", bits=4)
        others = [
            a_cache(tmp_path).of(source="n").find("weight", name="w", bits=4),
            a_cache(tmp_path).find("weight", name="w", bits=4),
            Cache(tmp_path, {"code": "2"}).of(source="m").find("weight", name="w", bits=4),
            a_cache(tmp_path).of(source="m").find("row", name="w", bits=4),
            a_cache(tmp_path).of(source="m").find("weight", name="w", bits=5),
            a_cache(tmp_path).of(source="m").find("weight", name="w"),
        ]
        assert others == [None] * 6
        assert a_cache(tmp_path).of(source="m").find("weight", name="w", bits=4)

    def test_its_file_is_named_by_its_bytes_and_read_by_others(self, tmp_path: Path) -> None:
        a_cache(tmp_path).keep("weight", VALUES, TENSORS, name="w")
        path = the_file(tmp_path)
        assert path.stem.split("-")[2] == hashlib.sha256(path.read_bytes()).hexdigest()[:32]
        with safe_open(path, framework="pt") as file:
            assert json.loads(file.metadata()["about"])["values"] == VALUES and set(file.keys()) == set(TENSORS)

    def test_a_file_damaged_anywhere_counts_as_absent_and_is_replaced(self, tmp_path: Path) -> None:
        a_cache(tmp_path).keep("weight", VALUES, TENSORS, name="w")
        path = the_file(tmp_path)
        whole = path.read_bytes()
        for place in range(0, len(whole), 7):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
            assert a_cache(tmp_path).find("weight", name="w") is None and not path.exists()
        again = a_cache(tmp_path)
        again.keep("weight", VALUES, TENSORS, name="w")
        assert again.find("weight", name="w") and the_file(tmp_path).read_bytes() == whole

    def test_a_file_cut_short_anywhere_counts_as_absent(self, tmp_path: Path) -> None:
        a_cache(tmp_path).keep("weight", VALUES, TENSORS, name="w")
        path = the_file(tmp_path)
        whole = path.read_bytes()
        for length in range(0, len(whole), 5):
            path.write_bytes(whole[:length])
            assert a_cache(tmp_path).find("weight", name="w") is None

    def test_what_a_run_did_not_use_goes_at_its_end(self, tmp_path: Path) -> None:
        first = a_cache(tmp_path)
        for name in "abc":
            first.keep("weight", {}, {}, name=name)
        second = a_cache(tmp_path)
        second.of(source="m").keep("weight", {}, {}, name="d")
        second.find("weight", name="b")
        second.forget_unused()
        third = a_cache(tmp_path)
        assert [third.has("weight", name=name) for name in "abc"] == [False, True, False]
        assert third.of(source="m").has("weight", name="d") and len(list(tmp_path.iterdir())) == 2

    def test_a_linked_file_outlives_the_result(self, tmp_path: Path) -> None:
        store = a_cache(tmp_path / "cache")
        store.keep("weight", {}, TENSORS, name="w").link(tmp_path / "mine.safetensors")
        store.drop("weight", name="w")
        assert store.find("weight", name="w") is None and not list((tmp_path / "cache").iterdir())
        with safe_open(tmp_path / "mine.safetensors", framework="pt") as file:
            assert torch.equal(file.get_tensor("codes"), TENSORS["codes"])

    def test_an_outcome_comes_back_as_it_was(self, tmp_path: Path) -> None:
        damage, places = {"rtn": 0.1 + 0.2, "gptq": 1e-9}, {"rtn": (float("inf"), 1 / 3)}
        made = Outcome({"codes": TENSORS["codes"]}, "gptq", 0.01, damage, places, ("a note",), torch.ones(3))
        outcomes.keep(a_cache(tmp_path), "weight", made, weight="w")
        result = a_cache(tmp_path).find("weight", weight="w")
        assert result is not None
        back = outcomes.restored(result)
        same = ("method", "damping", "damage", "places", "notes")
        assert all(getattr(back, name) == getattr(made, name) for name in same) and made.bias is not None
        assert torch.equal(back.parts["codes"], TENSORS["codes"]) and back.bias is not None and torch.equal(back.bias, made.bias)


class TestOrderOfWriting:
    """A system that loses power keeps what was flushed; what it does to the rest, nobody knows. So: content, then name, then folder."""

    def recorded(self, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
        calls: list[tuple[str, str]] = []
        real = os.fsync, os.replace

        def fsync(handle: int) -> None:
            calls.append(("fsync", Path(f"/proc/self/fd/{handle}").resolve().name))
            real[0](handle)

        def replace(source: Any, target: Any) -> None:
            calls.append(("replace", Path(source).name))
            real[1](source, target)

        monkeypatch.setattr(os, "fsync", fsync)
        monkeypatch.setattr(os, "replace", replace)
        return calls

    def test_a_result(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        calls = self.recorded(monkeypatch)
        a_cache(tmp_path).keep("weight", VALUES, TENSORS, name="w")
        (temporary,) = {name for call, name in calls if call == "replace"}
        assert temporary.endswith(".partial") and calls == [("fsync", temporary), ("replace", temporary), ("fsync", tmp_path.name)]

    def test_a_staged_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        calls = self.recorded(monkeypatch)
        with Staged(tmp_path / "out", "marker") as folder:
            folder.mkdir()
            (folder / "marker").write_text("whole")
            (folder / "inside").mkdir()
            (folder / "inside" / "more").write_text("whole")
        order = [name for call, name in calls if call == "fsync"]
        assert order.index("more") < order.index("inside") < order.index(folder.name) and order.index("marker") < order.index(folder.name)
        assert calls[-2:] == [("replace", folder.name), ("fsync", tmp_path.name)]


class TestLock:
    def test_a_second_process_is_refused_and_told_who(self, tmp_path: Path) -> None:
        script = f"""
from pathlib import Path
from fewbits.errors import FewbitsError
from fewbits.store.cache import open_cache
try:
    with open_cache(Path({str(tmp_path / "w")!r})):
        print("entered")
except FewbitsError as error:
    print(error.exit_code, error)
"""
        with open_cache(tmp_path / "w") as store:
            store.keep("weight", {}, {}, name="w")
            said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
        assert said.startswith("2 ") and f"in use by process {os.getpid()}" in said and "hint: " in said
        with open_cache(tmp_path / "w") as store:
            assert store.has("weight", name="w")

    def test_a_second_call_in_this_process_is_refused_too(self, tmp_path: Path) -> None:
        with open_cache(tmp_path / "w"), pytest.raises(InputError, match="in use"), open_cache(tmp_path / "w"):
            pass

    def test_a_lock_left_by_a_dead_process_does_not_block(self, tmp_path: Path) -> None:
        ready, tell = os.pipe()
        child = os.fork()
        if child == 0:
            with open_cache(tmp_path / "w"):
                os.write(tell, b"!")
                signal.pause()
        os.read(ready, 1)
        with pytest.raises(InputError, match=f"process {child}"), open_cache(tmp_path / "w"):
            pass
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(ready)
        os.close(tell)
        assert (tmp_path / "w" / "lock").read_text() == str(child)
        with open_cache(tmp_path / "w"):
            assert (tmp_path / "w" / "lock").read_text() == str(os.getpid())

    def test_nothing_is_left_of_a_run_that_made_nothing(self, tmp_path: Path) -> None:
        with pytest.raises(InputError), open_cache(tmp_path / "deep" / "w"):
            raise InputError("no", "hint")
        assert not list(tmp_path.iterdir())

    def test_fresh_takes_results_away_and_nothing_else(self, tmp_path: Path) -> None:
        with open_cache(tmp_path / "w") as store:
            store.keep("weight", {}, {}, name="w")
            (tmp_path / "w" / "mine").mkdir()
            (tmp_path / "w" / "shards" / "1-of-2" / "cache").mkdir(parents=True)  # results too
        with open_cache(tmp_path / "w", fresh=True) as store:
            assert not store.has("weight", name="w") and {path.name for path in (tmp_path / "w").iterdir()} == {"lock", "mine"}

    def test_what_the_killed_had_begun_is_removed(self, tmp_path: Path) -> None:
        begun = [tmp_path / "w" / ".artifact.1.partial", tmp_path / "w" / "cache" / ".weight-a.1.partial"]
        for path in begun:  # process 1 is alive, and not the one that wrote them: another container's was
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("half")
        with open_cache(tmp_path / "w"):
            assert not any(path.exists() for path in begun)

    def test_what_was_put_aside_and_not_replaced_stays_to_be_put_back(self, tmp_path: Path) -> None:
        for name in ("artifact", ".artifact.1.old", ".statistics.1.old"):
            (tmp_path / "w" / name).mkdir(parents=True)
        with open_cache(tmp_path / "w"):
            assert {path.name for path in (tmp_path / "w").iterdir()} == {"lock", "artifact", ".statistics.1.old"}

    def test_a_lock_that_its_owner_removed_meanwhile_holds_nobody(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Opened just before it was removed, locked just after: it is another file by now, and a third process could lock the new one."""
        real, removed = cache.fcntl.flock, []

        def flock(file: Any, how: int) -> None:
            if not removed:
                removed.append((tmp_path / "w" / "lock").unlink())
            real(file, how)

        monkeypatch.setattr(cache.fcntl, "flock", flock)
        with open_cache(tmp_path / "w"):
            assert (tmp_path / "w" / "lock").read_text() == str(os.getpid())
            monkeypatch.undo()
            with pytest.raises(InputError, match="in use"), open_cache(tmp_path / "w"):
                pass

    def test_where_nothing_can_be_written_is_said(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(InputError, match="cannot write"), open_cache(tmp_path / "file" / "w"):
            pass


class TestStagedAfterAKill:
    def dead(self) -> int:
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        return child

    def test_leftovers_of_the_dead_go_and_those_of_the_living_stay(self, tmp_path: Path) -> None:
        dead, alive = tmp_path / f".out.{self.dead()}.partial", tmp_path / f".out.{os.getppid()}.partial"
        for path in (dead, alive):
            path.write_text("half")
        with Staged(tmp_path / "out") as staged:
            staged.write_text("whole")
        assert {path.name for path in tmp_path.iterdir()} == {"out", alive.name}

    @pytest.mark.parametrize("same_process", [True, False], ids=["same process number", "another"])
    def test_a_folder_killed_between_the_two_steps_of_replacing_is_put_back(self, tmp_path: Path, same_process: bool) -> None:
        old = tmp_path / f".out.{os.getpid() if same_process else self.dead()}.old"
        old.mkdir()
        (old / "marker").write_text("old")
        with pytest.raises(InputError, match="later"), Staged(tmp_path / "out", "marker"):
            raise InputError("later", "")
        assert (tmp_path / "out" / "marker").read_text() == "old" and [path.name for path in tmp_path.iterdir()] == ["out"]


class TestFullDisk:
    @pytest.mark.parametrize("call", ["fsync", "replace"])
    def test_no_space_is_a_clear_error_and_leaves_nothing_half(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
        def fails(*_: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        store = a_cache(tmp_path / "cache")
        store.keep("weight", {}, {}, name="first")
        with monkeypatch.context() as patch:
            patch.setattr(os, call, fails)
            with pytest.raises(MissingError, match="disk is full") as said:
                store.keep("weight", VALUES, TENSORS, name="w")
            with pytest.raises(MissingError, match="disk is full"), Staged(tmp_path / "out") as staged:
                staged.write_text("whole")
        assert said.value.exit_code == 3 and "again" in said.value.hint
        assert not (tmp_path / "out").exists() and not [path for path in tmp_path.rglob("*") if path.suffix == ".partial"]
        again = a_cache(tmp_path / "cache")
        assert again.find("weight", name="first") and not again.has("weight", name="w")
        again.keep("weight", VALUES, TENSORS, name="w")
        assert a_cache(tmp_path / "cache").find("weight", name="w")

    def test_a_real_one_in_the_middle_of_a_file(self, tmp_path: Path) -> None:
        """A limit on the size of files is where a real write fails half-way, for everybody, root too."""
        with limited(1 << 16):
            store = a_cache(tmp_path)
            store.keep("weight", {}, {"small": torch.zeros(100)}, name="small")
            with pytest.raises(Exception, match=r"too large|os error 27"):
                store.keep("weight", {}, {"large": torch.zeros(1 << 16)}, name="large")
        assert [path.suffix for path in tmp_path.iterdir()] == [".safetensors"]
        assert a_cache(tmp_path).find("weight", name="small") and not a_cache(tmp_path).has("weight", name="large")


class limited:  # noqa: N801 - reads as what it does
    """Files of at most so many bytes, and no signal where one would grow beyond."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._before: tuple[tuple[int, int], Callable[..., Any] | int | None]

    def __enter__(self) -> None:
        self._before = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (self._nbytes, self._before[0][1]))

    def __exit__(self, *_: object) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self._before[0])
        signal.signal(signal.SIGXFSZ, self._before[1])


def test_the_code_has_a_version_of_its_own_and_how_it_is_shown_does_not_count() -> None:
    package = Path(cache.__file__).parents[1]
    assert len(cache.code_version()) == 64
    assert cache._only_shows(Path("reporting/terminal/plans.py")) and cache._only_shows(Path("cli/plan.py"))
    for path in ("methods/gptq.py", "store/cache.py", "calibration/collector.py", "planning/solver.py"):
        assert (package / path).is_file() and not cache._only_shows(Path(path))


def test_what_decides_the_bytes_decides_the_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The native module, torch and transformers; and of the machine its instructions, threads and processor."""
    from importlib import metadata

    version = cache.code_version.__wrapped__
    versions = {version()}
    for module, name, value in (
        (torch, "__version__", "0.4.1"),
        (metadata, "version", lambda _: "0.1"),
        (importlib.util, "find_spec", lambda _: SimpleNamespace(origin=str(tmp_path / "other.so"))),
    ):
        (tmp_path / "other.so").write_bytes(b"other")
        with monkeypatch.context() as changed:
            changed.setattr(module, name, value)
            versions.add(version())
    assert len(versions) == 4
    threads, seen = torch.get_num_threads(), [cache.machine()]
    try:
        torch.set_num_threads(threads + 1)
        seen.append(cache.machine())
    finally:
        torch.set_num_threads(threads)
    monkeypatch.setattr(maker, "processor_name", lambda: "a Z80")
    seen.append(cache.machine())
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "none")
    assert len({json.dumps(each) for each in [*seen, cache.machine()]}) == 4
