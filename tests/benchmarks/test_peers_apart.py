"""Peers in environments of their own: who is named, who is missing, and how a program is run. What the real ones give is in
docs/comparison.md; here a stand-in environment makes the files."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fewbits import embedded
from fewbits.benchmarks.peers import environments, named
from fewbits.benchmarks.quality.contest import Texts
from fewbits.benchmarks.quality.outside import outside
from fewbits.errors import InputError, MissingError

_STAND_IN = """#!{python}
import json, pathlib, sys
flag, program, asked = sys.argv[1:]
job = json.loads(pathlib.Path(asked).read_text())
{body}
"""
_MAKES = """
import os
seen = {"flag": flag, "program": pathlib.Path(program).name, "offline": os.environ["HF_HUB_OFFLINE"], "path": os.environ["PYTHONPATH"]}
seen["job"], seen["samples"] = job, json.loads(pathlib.Path(job["samples"]).read_text())
out = pathlib.Path(job["out"])
(out / "deep").mkdir()
(out / "deep" / "file.gguf").write_text(json.dumps(seen))
(out / "made.json").write_text(json.dumps({"path": "deep/file.gguf", "versions": {"stand-in": "1.0"}}))
print("at work")
"""


def _stand_in(folder: Path, name: str, body: str) -> Path:
    """An environment whose interpreter is a script that runs `body` with this Python."""
    python = folder / name / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(_STAND_IN.format(python=sys.executable, body=body))
    python.chmod(0o755)
    return python


needs_scripts = pytest.mark.skipif(sys.platform == "win32", reason="a script stands in for an interpreter")


@needs_scripts
def test_a_peer_gets_the_job_and_the_samples_and_its_file_is_moved_into_place(tmp_path: Path) -> None:
    python = _stand_in(tmp_path, "autoround", _MAKES)
    out, log = tmp_path / "contest" / "q4_0-autoround.gguf", tmp_path / "contest" / "logs" / "q4_0.log"
    versions = environments.run(python, "autoround", {"model": "m", "format": "gguf:q4_0"}, [(1, 2), (3, 4)], out, log)
    seen = json.loads(out.read_text())
    assert versions == {"stand-in": "1.0"} and seen["samples"] == [[1, 2], [3, 4]] and seen["job"]["format"] == "gguf:q4_0"
    assert (seen["flag"], seen["program"], seen["offline"], seen["path"]) == ("-P", "autoround.py", "1", "")
    assert log.read_text() == "at work\n" and sorted(path.name for path in out.parent.iterdir()) == ["logs", out.name]


@needs_scripts
def test_a_peer_that_fails_leaves_its_last_words_and_no_file(tmp_path: Path) -> None:
    python = _stand_in(tmp_path, "autoround", "print('first'); print('ValueError: 7 columns'); sys.exit('100% of 96')")
    out, log = tmp_path / "contest" / "x.gguf", tmp_path / "contest" / "x.log"
    with pytest.raises(environments.PeerError, match="ValueError: 7 columns") as failure:
        environments.run(python, "autoround", {}, [], out, log)
    assert str(log) in failure.value.hint and [path.name for path in out.parent.iterdir()] == ["x.log"]


@needs_scripts
def test_a_peer_that_ends_without_a_file_has_failed(tmp_path: Path) -> None:
    python = _stand_in(tmp_path, "autoround", "pass")
    with pytest.raises(environments.PeerError, match="does not say why"):
        environments.run(python, "autoround", {}, [], tmp_path / "x.gguf", tmp_path / "x.log")


def test_a_missing_peer_is_refused_before_any_work_with_the_command_that_installs_it(
    run: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    asked = ("bench", "plans", embedded.MODEL, "-o", tmp_path / "b", "--mixes", "q4_k_m", "--peer", "autoround", "--peer-env", tmp_path)
    code, _, err = run(*asked)
    said = " ".join(err.split())
    assert code == 3 and "the peer `autoround` is not installed" in said and "fewbits bench install autoround --peer-env" in said
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("verb", "more", "said"),
    [
        ("quality", ("--formats", "int4_g32", "--peer", "gptqmodel"), "no peer is named `gptqmodel`"),
        ("quality", ("--formats", "int4_g32"), "`int4_g32` has no peer in llama.cpp"),
        ("quality", ("--formats", "int4_g32,q4_0", "--peer", "autoround"), "`q4_0` is judged in llama.cpp and `int4_g32` in transformers"),
        ("quality", ("--formats", "int4_g32", "--peer", "autoround", "--whole"), "leaves the embedding in float"),
        ("quality", ("--formats", "int4_g32", "--peer", "autoscheme"), "`autoscheme` writes no file of one format"),
        ("quality", ("--formats", "q4_0", "--peer", "autoround"), "`autoround` makes no file of one GGUF format"),
        (
            "quality",
            (
                "--formats",
                "int8_channel",
            ),
            "llama.cpp has no quantizer for `int8_channel`",
        ),
        ("plans", ("--peer", "llmcompressor"), "`llmcompressor-gptq` writes no GGUF"),
        ("plans", ("--mixes", "iq2_m,3bpw", "--peer", "autoround"), "`autoround` has none of the mixes iq2_m, 3bpw"),
    ],
)
def test_what_a_peer_does_not_make_is_refused(
    verb: str, more: tuple[str, ...], said: str, run: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    code, _, err = run("bench", verb, embedded.MODEL, "-o", tmp_path / "b", "--peer-env", tmp_path, *more)
    assert code == 2 and said in " ".join(err.split()) and not (tmp_path / "b").exists()


def test_a_peer_needs_the_text_that_statistics_were_made_from(tmp_path: Path) -> None:
    _stand_in(tmp_path, "autoround", "pass")
    with pytest.raises(InputError, match="holds no text"):
        outside(["autoround"], tmp_path).check(Texts(stats=tmp_path))
    outside(["autoround"], tmp_path).check(Texts(stats=tmp_path, data=["text.txt"]))


def test_names_stand_for_settings() -> None:
    assert [peer.name for peer in named.parse(["LLMcompressor", "llmcompressor-gptq"])] == ["llmcompressor-gptq", "llmcompressor-awq"]
    assert outside(["target-size", "autoround"]).target_size and not outside(["autoround"]).target_size
    (plain,) = named.parse(["autoround"])
    (few,) = named.parse(["autoround"], 3)
    assert plain.gguf_job("q4_k_m", 1, 1) == {"format": "gguf:q4_k_m", "scheme": "GGUF:Q4_K_M", "arguments": {"iters": 200}}
    assert few.gguf_job("q4_k_m", 1, 1)["arguments"] == {"iters": 3} and few.maker == "autoround, 3 steps"
    assert few.folder_job("int4_g32") == {"format": "llm_compressor", "scheme": "W4A16", "arguments": {"iters": 3, "group_size": 32}}
    (untuned,) = named.parse(["autoround-rtn"], 3)
    assert untuned.maker == "autoround-rtn" and untuned.folder_job("int4_g128")["arguments"]["iters"] == 0
    (feedback, rounding) = named.parse(["llmcompressor-gptq", "llmcompressor-rtn"])
    assert feedback.folder_job("int4_g32")["weights"]["observer"] == "mse"
    assert feedback.folder_job("nvfp4_tensor")["weights"]["observer"] == "nvfp4_expanded_mse"
    assert rounding.folder_job("nvfp4_tensor")["weights"]["observer"] == "memoryless_minmax"
    assert feedback.makes_folder("mxfp4") and not plain.makes_folder("nvfp4_tensor")
    (scheme,) = named.parse(["autoscheme"])
    job = scheme.gguf_job("iq4_xs", 1000, 1600)
    assert job["bits"] == 5 and job["weight_bytes"] == 1000 and job["format"] == "gguf:q4_k_m" and scheme.makes("iq4_xs")
    gptq, awq = named.parse(["llmcompressor"])
    assert gptq.folder_job("int4_g128")["method"] == "gptq" and gptq.folder_job("int4_g128")["weights"]["group_size"] == 128
    assert awq.folder_job("int4_g32")["method"] == "awq" and not awq.makes("q4_0") and not plain.makes("iq4_xs")


def test_only_known_peers_are_installed_and_no_folder_is_overwritten(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="gptqmodel"):
        environments.install("gptqmodel", tmp_path)
    (tmp_path / "autoround").mkdir()
    with pytest.raises(InputError, match="no environment of Python"):
        environments.install("autoround", tmp_path)


@needs_scripts
def test_what_pip_says_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = "sys.stderr.write('ERROR: nothing matches\\n'); sys.exit(1)"
    monkeypatch.setattr(environments.venv, "create", lambda place, **_: _pip(place, body))
    with pytest.raises(MissingError, match="nothing matches"):
        environments.install("autoround", tmp_path)


def _pip(place: Path, body: str) -> None:
    python = place / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!{sys.executable}\nimport sys\n{body}\n")
    python.chmod(0o755)


_ROUNDS = """
import fewbits
assert job["scheme"] == "W4A16" and job["arguments"] == {"iters": 200, "group_size": 32}
out = pathlib.Path(job["out"])
asked = {"to": "safetensors", "format": "int4_g32", "method": "rtn", "override": ["embed|lm_head=keep"], "no_verify": True}
fewbits.quantize(job["model"], out / "folder.ct", **asked)
(out / "made.json").write_text(json.dumps({"path": "folder.ct", "versions": {}}))
"""


@pytest.mark.slow
@needs_scripts
def test_a_peers_folder_is_judged_beside_ours_and_made_once(run: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    """The stand-in rounds to nearest, so ours must be nearer to the float model."""
    python = _stand_in(tmp_path / "envs", "autoround", _ROUNDS)
    asked = ("bench", "quality", embedded.MODEL, "-o", tmp_path / "b", "--samples", 4, "--tokens", 511, "--formats", "int4_g32", "--json")
    code, out, err = run(*asked, "--peer", "autoround", "--peer-env", tmp_path / "envs")
    assert code == 0, err
    found = json.loads(out)
    rows = {row["maker"]: row for row in found["texts"][0]["rows"]}
    assert found["runtime"] == "transformers" and rows.keys() == {"fewbits", "autoround"}
    assert rows["fewbits"]["ours"] is None and rows["autoround"]["ours"]["kl_ratio"] < 1
    assert rows["autoround"]["bits_per_weight"] == pytest.approx(rows["fewbits"]["bits_per_weight"])
    python.write_text("#!/bin/false\n")
    code, again, err = run(*asked, "--peer", "autoround", "--peer-env", tmp_path / "envs")
    assert code == 0 and json.loads(again) == found, err
