"""What a person meets who calls the verbs from Python: results that print in three lines, and progress as they like it."""

from __future__ import annotations

import functools
import io
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tqdm import tqdm

import fewbits
from fewbits import embedded
from fewbits.errors import InputError, MissingError
from fewbits.progress import silent
from fewbits.reporting import meanwhile
from fewbits.reporting.results.demonstration import Demo
from fewbits.verification.comparison.figures import Comparison

MODEL = embedded.MODEL


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("made")
    return fewbits.quantize(MODEL, folder / "out", to="fewbits", format="q8_0", method="rtn", tokens=256, max_kl=0.5, answers=0)


def three(result: Any) -> list[str]:
    lines = str(result).split("\n")
    assert len(lines) == 3 and all(line.strip() and len(line) < 250 for line in lines), result
    return lines


class TestPrinted:
    def test_what_quantize_made(self, made: Any) -> None:
        first, second, third = three(made)
        assert str(made.path) in first and "8.5 bits per weight" in first and "MB" in first
        assert second.endswith("in q8_0") and "KL " in third and third.endswith(": passed") and "in torch" in third
        assert three(made.plan)[1] == second and three(made.verdict)[2] == "passed"

    def test_what_run_wrote(self, made: Any) -> None:
        said = fewbits.run(made.path, "The function returns", max_tokens=12, temperature=0.7, seed=1)
        first, second, third = three(said)
        assert first == " ".join(said.text.split()) and "12 written" in second and third == "native"

    def test_what_is_known_before(self, tmp_path: Path) -> None:
        assert "q4_k_m" in three(fewbits.fit(params="7B", memory="8GB"))[1]
        assert "nothing" in three(fewbits.fit(params="70B", memory="1GB"))[1]
        assert "values were not read" in three(fewbits.inspect(MODEL, no_values=True))[2]
        assert "0 with values that are not finite" in three(fewbits.inspect(MODEL))[2]
        assert "q8_0" in three(fewbits.compare(MODEL, weight="layers.0.mlp.up", formats=["q4_0", "q8_0"]))[2]
        stats = fewbits.calibrate(MODEL, tmp_path / "stats", samples=2, length=32, memory="100MB")
        assert "2 samples, 64 tokens" in three(stats)[1]
        table = fewbits.measure(MODEL, tmp_path / "s.json", stats=tmp_path / "stats", formats=["q4_0", "q8_0"], method="rtn")
        assert three(table)[2] == "3 formats: fp16, q4_0, q8_0"
        decision = fewbits.plan(MODEL, tmp_path / "s.json", size="6bpw", formats="q4_0,q8_0")
        assert "q4_0" in three(decision)[1] and "predicted" in three(decision)[2]

    def test_what_was_compared(self) -> None:
        assert three(Demo("embedded", "folder", (), ()))[2] == "failed"
        assert "none could be opened" in three(Comparison("m", 16, "this machine", ()))[1]


class TestProgress:
    def test_tqdm_shows_the_steps(self, tmp_path: Path) -> None:
        said = io.StringIO()
        bars = functools.partial(tqdm, file=said, mininterval=0)
        fewbits.quantize(MODEL, tmp_path / "m.gguf", format="q8_0", method="rtn", no_verify=True, progress=bars)
        assert "quantizing" in said.getvalue() and "100%" in said.getvalue()

    def test_a_class_of_bars_is_called_as_tqdm_is(self) -> None:
        seen = list[tuple[int | None, str]]()

        class Bars:
            """As tqdm.auto's: its arguments are not named."""

            def __init__(self, *args: Any, **kwargs: Any) -> None:
                self._items: Iterable[Any] = args[0]
                seen.append((kwargs["total"], kwargs["desc"]))

            def __iter__(self) -> Iterator[Any]:
                return iter(self._items)

            @staticmethod
            def write(text: str, file: Any) -> None:  # noqa: ARG004
                seen.append((None, text))

        fewbits.inspect(MODEL, progress=Bars)
        assert seen and seen[0][1] == "reading" and (seen[0][0] or 0) > 10
        meanwhile_said = meanwhile.shown_by(Bars)
        from fewbits.progress import doing, say

        say(meanwhile_said, "a note")
        with doing(meanwhile_said, "one thing"):
            pass
        assert seen[-2:] == [(None, "a note"), (1, "one thing")]

    def test_a_function_or_nothing_will_do(self, capsys: pytest.CaptureFixture[str]) -> None:
        told = list[str]()

        def mine(items: Iterable[Any], total: int, what: str) -> Iterator[Any]:
            told.append(f"{what} {total}")
            yield from items

        fewbits.inspect(MODEL, False, mine)
        assert told and told[0].startswith("reading")
        for none in (False, None):
            assert meanwhile.shown_by(none) is silent
            fewbits.inspect(MODEL, progress=none)
        assert not capsys.readouterr().err
        assert meanwhile.shown_by(True) in (meanwhile.in_log, meanwhile.on_terminal)
        with pytest.raises(InputError, match="`progress=3` shows nothing"):
            fewbits.inspect(MODEL, progress=3)  # type: ignore[arg-type]


def test_errors_of_the_workbench_name_arguments(tmp_path: Path) -> None:
    with pytest.raises(InputError) as refused:
        fewbits.Workbench(tmp_path / "b", model=MODEL, progress=False).quantize()  # type: ignore[arg-type]
    assert "`max_kl=0.01`" in refused.value.hint
    with pytest.raises(MissingError) as missing:
        fewbits.calibrate("nobody/nothing", tmp_path / "s", offline=True)
    assert "`offline=True`" in missing.value.hint


def test_a_verb_keeps_its_name_and_its_arguments() -> None:
    import inspect

    assert fewbits.run is fewbits.run and fewbits.run.__name__ == "run" and "temperature" in inspect.signature(fewbits.run).parameters
    with pytest.raises(TypeError, match="temprature"):
        fewbits.run("x", "y", temprature=1)  # type: ignore[call-arg]
