"""Files of anybody beside each other: the same figures as `verify`, paired differences, the frontier, and what cannot be run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from greedy import recomputed

import fewbits
from fewbits import embedded, model
from fewbits.calibration import split
from fewbits.errors import InputError
from fewbits.planning.accuracy import Thresholds
from fewbits.verification import metrics, runtimes
from fewbits.verification.comparison import candidates, figures, trial
from fewbits.verification.metrics import MeasuredLogits, bootstrap_ci95
from fewbits.verification.runtimes.torch import of_module

TOKENS = 256


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As somebody may have downloaded them: good files, a broken one, one of a kind that nothing here runs, and a card."""
    folder = tmp_path_factory.mktemp("others")
    for name, format in (("q4_0.gguf", "q4_0"), ("q4_k.gguf", "q4_k"), ("q8_0.gguf", "q8_0"), ("model.genai", "int4_g32")):
        fewbits.quantize(embedded.MODEL, folder / name, format=format, method="rtn", no_verify=True)
        shutil.rmtree(folder / f"{name}.work")
    (folder / "broken.gguf").write_bytes((folder / "q4_0.gguf").read_bytes()[:100_000])
    (folder / "weights.bin").write_bytes(b"something")
    (folder / "README.md").write_text("# Files\n")
    return folder


@pytest.fixture(scope="module")
def compared(others: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[figures.Comparison, Path, list[str]]:
    """The comparison of the folder, its page, and every step that was shown on the way."""
    page, steps = tmp_path_factory.mktemp("page") / "files.html", []

    def progress(items: Any, _: int, what: str) -> Iterator[Any]:
        steps.append(what)
        yield from items

    return fewbits.compare_files(others, embedded.MODEL, tokens=TOKENS, out=page, progress=progress), page, steps


def test_each_file_has_the_figures_that_verify_gives_it(compared: Any, others: Path) -> None:
    for file in compared[0].compared:
        alone = fewbits.verify(others / file.name, embedded.MODEL, tokens=TOKENS, no_floor=True)
        assert (file.verdict.kl_mean, file.verdict.kl_ci95, file.verdict.bytes) == (alone.kl_mean, alone.kl_ci95, alone.bytes)
        assert file.verdict.top1_agreement == alone.top1_agreement and file.verdict.runtime == alone.runtime


def test_the_float_model_is_run_once_for_all_files(compared: Any) -> None:
    assert len(compared[0].compared) == 4 and compared[2].count("running the float model") == 1


def test_a_folder_is_taken_apart_and_what_does_not_run_is_listed(compared: Any) -> None:
    names, refused = [file.name for file in compared[0].compared], {Path(each.file).name: each.reason for each in compared[0].refused}
    assert sorted(names) == ["model.genai", "q4_0.gguf", "q4_k.gguf", "q8_0.gguf"]
    assert set(refused) == {"broken.gguf", "weights.bin"} and "ends before" in refused["broken.gguf"]


def test_the_frontier_and_the_speeds_are_said(compared: Any) -> None:
    files = {file.name: file for file in compared[0].compared}
    assert files["q8_0.gguf"].on_frontier and files["q8_0.gguf"].to_best is None
    assert files["q4_k.gguf"].on_frontier and files["q4_k.gguf"].to_best.to == "q8_0.gguf"
    for name in ("q4_0.gguf", "model.genai"):  # the same size as q4_k, or more, and further away
        assert files[name].beaten_by.to == "q4_k.gguf" and files[name].beaten_by.sure and files[name].beaten_by.kl > 0
    assert files["q4_0.gguf"].tokens_per_second > 0 and files["model.genai"].tokens_per_second > 0


def test_what_was_judged_is_not_run_again(compared: Any, others: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def refused(*_: Any) -> Iterator[Any]:
        raise AssertionError("a session was opened")
        yield

    monkeypatch.setattr(trial, "sessions_of", refused)
    again = fewbits.compare_files(others, embedded.MODEL, tokens=TOKENS, out=compared[1])
    assert again == compared[0]


def test_the_page_names_every_file(compared: Any) -> None:
    page = compared[1].read_text(encoding="utf-8")
    for said in ("q4_0.gguf", "model.genai", "weights.bin", "On the frontier", "paired", "fewbits comparison"):
        assert said in page
    assert "q4_k.gguf and q8_0.gguf" in page


def test_names_of_files_cannot_break_out_of_the_page(compared: Any, tmp_path: Path) -> None:
    content = compared[0].to_dict()
    content["compared"][0]["name"] = content["refused"][0]["reason"] = "<script>alert(1)</script>"
    (tmp_path / "results.json").write_text(json.dumps(content))
    assert "<script>alert" not in fewbits.report(tmp_path, tmp_path / "page.html").read_text(encoding="utf-8")


def test_on_the_command_line_the_table_is_data(run: Callable[..., tuple[int, str, str]], others: Path, tmp_path: Path) -> None:
    for name in ("prose", "code"):
        (tmp_path / f"{name}.txt").write_text(embedded.verification_text()[: 20_000 if name == "prose" else 15_000])
    words = ["compare", others / "q4_0.gguf", others / "q8_0.gguf", "--against", embedded.MODEL, "--tokens", TOKENS]
    words += ["--data", f"prose={tmp_path / 'prose.txt'}", "--data", f"code={tmp_path / 'code.txt'}", "-o", tmp_path / "files.html"]
    code, out, err = run(*words)
    assert code == 0, err
    assert "q4_0.gguf" in out and "KL by kind of text" in out and "prose" in out and "1 of 2: q4_0.gguf in llama.cpp" in err
    code, out, _ = run(*words, "--json")
    rows = json.loads(out)["compared"]
    assert code == 0 and [row["on_frontier"] for row in rows] == [True, True] and len(rows[0]["verdict"]["domains"]) == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("q4_0.gguf", "q8_0.gguf"), "to compare files, name the float model"),
        (("gone.gguf", "--against", embedded.MODEL), "there is nothing at"),
        (("weights.bin", "--against", embedded.MODEL), "no file could be run"),
        (("q4_0.gguf", "--against", embedded.MODEL, "--kv"), "`--kv` does not go with `--against`"),
        (("q4_0.gguf", "--out", "x.html"), "`--out` goes with `--against`"),
    ],
)
def test_bad_input_has_a_hint(run: Callable[..., tuple[int, str, str]], others: Path, words: Any, said: str) -> None:
    code, _, err = run("compare", *(others / word if str(word).endswith((".gguf", ".bin")) else word for word in words))
    assert code == 2 and said in " ".join(err.split()) and "hint:" in err


def test_a_runtime_that_is_not_here_is_said(
    run: Callable[..., tuple[int, str, str]], others: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtimes.get("llama.cpp"), "missing", lambda: "it is not installed", raising=False)
    code, _, err = run("compare", others / "q4_0.gguf", others / "q8_0.gguf", "--against", embedded.MODEL)
    assert code == 3 and "llama.cpp cannot run here: it is not installed (and 1 more)" in " ".join(err.split()) and "fewbits doctor" in err


def test_a_model_in_parts_is_one_candidate(tmp_path: Path) -> None:
    fewbits.quantize(embedded.MODEL, tmp_path / "parts", format="q8_0", method="rtn", split_size=2_000_000, no_verify=True)
    known, refused = candidates.find([tmp_path])
    assert [each.path for each in known] == [tmp_path / "parts"] and not refused
    known, refused = candidates.find(sorted((tmp_path / "parts").glob("*.gguf")))
    assert not known and all("several files" in each.reason for each in refused)


def made(kl: np.ndarray[Any, Any]) -> MeasuredLogits:
    return MeasuredLogits(kl.tolist(), kl.tolist(), [0.0] * len(kl), [True] * len(kl), 1.0)


def ranked(kls: dict[str, np.ndarray[Any, Any]], sizes: dict[str, int]) -> dict[str, figures.ComparedFile]:
    measured = {name: made(kl) for name, kl in kls.items()}
    about: dict[str, Any] = {"bits_per_weight": 4.0, "runtime": "r", "runtime_version": "1"}
    verdicts = {name: metrics.judge(each, Thresholds(), nbytes=sizes[name], **about) for name, each in measured.items()}
    return {file.name: file for file in figures.ranked(measured, verdicts, {})}


def test_a_paired_interval_sees_what_two_intervals_do_not() -> None:
    """Two files that err at the same tokens: each KL is known to 10 %, their difference of 1 % far better."""
    hard = np.random.default_rng(0).gamma(0.3, 0.1, 4096)
    files = ranked({"a": hard, "b": 1.01 * hard}, {"a": 1, "b": 2})
    apart = files["b"].to_best
    assert apart is not None and apart.sure and apart.ci95 == pytest.approx(bootstrap_ci95(0.01 * hard), rel=1e-6)
    (_, high), (low, _) = files["a"].verdict.kl_ci95, files["b"].verdict.kl_ci95
    assert low < high, "the two intervals overlap"


def test_the_frontier_is_what_nothing_beats_by_brute_force() -> None:
    rng = np.random.default_rng(1)
    for _ in range(30):
        kls = {str(i): rng.gamma(1, 0.01, 64) for i in range(6)}
        sizes = {name: int(rng.integers(1, 5)) for name in kls}
        points = {name: (sizes[name], float(np.mean(kl))) for name, kl in kls.items()}
        best = {
            one for one, (size, kl) in points.items()
            if not any(s <= size and k <= kl and (s, k) != (size, kl) for other, (s, k) in points.items() if other != one)
        }  # fmt: skip
        assert {name for name, file in ranked(kls, sizes).items() if file.on_frontier} == best


def test_a_file_that_is_not_finite_is_on_no_frontier() -> None:
    files = ranked({"good": np.full(64, 0.1), "bad": np.full(64, np.nan)}, {"good": 2, "bad": 1})
    assert files["good"].on_frontier and not files["bad"].on_frontier and files["bad"].beaten_by is None and files["good"].to_best is None


def test_an_artifact_is_not_what_files_were_made_of(tmp_path: Path) -> None:
    (tmp_path / "fewbits.json").write_text("{}")
    with pytest.raises(InputError, match="not the float model"):
        fewbits.compare_files(embedded.MODEL, tmp_path)


@pytest.mark.parametrize("name", ["q4_k.gguf", "model.genai"])
def test_what_follows_is_the_likeliest_token_each_time(name: str, others: Path, embedded_model: model.Model) -> None:
    (window,) = split.held_out_windows(embedded_model, (), 64, 63)
    session = runtimes.for_file(others / name).open(others / name, 64)
    assert list(session.following(list(window[:20]), 12)) == recomputed(session, list(window[:20]), 12)


def test_the_float_model_goes_on_with_its_cache_as_without(embedded_model: model.Model) -> None:
    (window,) = split.held_out_windows(embedded_model, (), 64, 63)
    session = of_module(embedded_model.module())
    assert list(session.following(list(window[:20]), 12)) == recomputed(session, list(window[:20]), 12)
