"""Every hostile file, opened by every verb that reads its kind: refused with a message and a hint, in bounded time and memory.

`python tests/hostile/make.py FOLDER` writes the files and says what each attacks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from pathlib import Path

import benign
import harness
import make
import pytest
from benign import Benign
from cases import CASES, Case

KINDS = sorted({case.kind for case in CASES})
_TRACES = ("remote-code-ran", "pickle-ran")


@pytest.fixture(scope="module")
def runner() -> Iterator[harness.Harness]:
    running = harness.Harness()
    yield running
    running.close()


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Benign:
    root = tmp_path_factory.getbasetemp()
    return benign.make((root.parent if root.name.startswith("popen-") else root) / "honest")  # one for all workers


def judged(case: Case, verb: str, ended: harness.Ended) -> str | None:
    """What is wrong with how it ended; None: nothing."""
    allowed = (ended.code == 0 and verb in case.passes) or (ended.code == 1 and verb in case.fails)
    return ended.excess if allowed and "Traceback" not in ended.said else ended.complaint


def test_the_harness_sees_what_must_not_happen(runner: harness.Harness, honest: Benign, tmp_path: Path) -> None:
    assert runner.run("inspect", honest.gguf).code == 0
    assert runner.run("inspect", tmp_path / "nothing.gguf").complaint is None
    assert runner.run("inspect", honest.gguf).complaint == "it ended with 0"


def test_no_two_cases_have_one_name() -> None:
    assert not make.unlike()


@pytest.mark.parametrize("kind", KINDS)
def test_hostile_files_are_refused(
    kind: str, runner: harness.Harness, honest: Benign, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    record_property("table", opened(kind, {make.FIRST[kind]}, runner, honest, tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(make.OTHERS))
def test_hostile_files_are_refused_by_all_other_verbs(
    kind: str, runner: harness.Harness, honest: Benign, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    record_property("table", opened(kind, make.OTHERS[kind], runner, honest, tmp_path))


def opened(kind: str, verbs: Set[str], runner: harness.Harness, honest: Benign, folder: Path) -> str:
    """Every file of a kind by these verbs; what came of it, in a line."""
    wrong: list[str] = []
    seconds, room, runs = 0.0, 0, 0
    chosen = [case for case in CASES if case.kind == kind]
    for case in chosen:
        hostile = case.write(folder / case.name, honest)
        for verb in sorted(verbs):
            out = folder / "out" / f"{case.name}-{verb}"
            out.mkdir(parents=True)
            words = make.words(verb, kind, hostile, honest, out)
            ended = runner.run(*words)
            seconds, room, runs = max(seconds, ended.seconds), max(room, ended.bytes), runs + 1
            if complaint := judged(case, verb, ended):
                wrong.append(f"{case.name}, {verb}: {complaint}\n{ended.said}")
            left = [path.name for path in out.iterdir() if path.suffix != ".work"]  # where results are kept to go on with
            if left and ended.code in (2, 3) and "--no-verify" in words:  # else it was written, and then could not be run
                wrong.append(f"{case.name}, {verb}: refused, and left {left}")
    assert not wrong, "\n\n".join(wrong)
    assert not [trace for trace in _TRACES if (folder / trace).exists()]
    return f"hostile {kind}: {len(chosen)} files, {runs} runs, at most {seconds:.1f} s and {room >> 20} MB"
