"""`quantize --like FLOAT.gguf`: files laid out as a float GGUF of the same model, and GGUFs of architectures that nobody here knows."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from zoo.models import build

Run = Callable[..., tuple[int, str, str]]
FEW = ("--samples", "16", "--length", "64", "--tokens", "256")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("llama", tmp_path_factory.mktemp("like") / "llama")


@pytest.fixture(scope="module")
def float_file(checkpoint: Path) -> Path:
    """Written by fewbits' own table, whose architecture this is: a judge for what matching finds."""
    from fewbits import quantize

    return quantize(checkpoint, checkpoint.parent / "float.gguf", format="bf16", no_verify=True).path


def tensors(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {t.name: (t.tensor_type.name, tuple(map(int, t.shape)), t.data.tobytes()) for t in gguf.GGUFReader(path).tensors}


def rewritten(source: Path, out: Path, tensor: Callable[[str, np.ndarray[Any, Any]], np.ndarray[Any, Any] | None], name: str = "") -> Path:
    """A copy of a GGUF with other tensors, and, if `name` is given, of another architecture."""
    reader = gguf.GGUFReader(source)
    old = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(out, name or old)
    for key, entry in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        kind, item = entry.types[0], entry.types[-1] if len(entry.types) > 1 else None
        writer.add_key_value(key.replace(f"{old}.", f"{name}.", 1) if name else key, entry.contents(), kind, item)
    for each in reader.tensors:
        data = tensor(each.name, np.array(each.data))
        if data is not None:
            writer.add_tensor(each.name, data, raw_dtype=each.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def unchanged(_: str, data: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return data


@pytest.mark.parametrize("budget", [("--format", "q4_k"), pytest.param(("--size", "4.6bpw"), marks=pytest.mark.slow)])
def test_matching_by_content_gives_the_bytes_of_the_table(
    budget: tuple[str, str], run: Run, checkpoint: Path, float_file: Path, tmp_path: Path
) -> None:
    """The same codes: rotary rows lie in another order than in the checkpoint, and their statistics follow them."""
    for name, more in (("table", ()), ("like", ("--like", float_file))):
        code, _, said = run("quantize", checkpoint, "-o", tmp_path / f"{name}.gguf", *budget, *FEW, *more, "--json")
        assert code == 0, said
    assert tensors(tmp_path / "like.gguf") == tensors(tmp_path / "table.gguf")


def test_the_verdict_has_the_floor_of_the_float_file(run: Run, checkpoint: Path, float_file: Path, tmp_path: Path) -> None:
    code, out, said = run("quantize", checkpoint, "-o", tmp_path / "m.gguf", "--format", "q4_0", *FEW, "--like", float_file, "--json")
    verdict = json.loads(out)["verdict"]
    assert code == 0, said
    assert 0 < verdict["kl_floor"] < verdict["kl_mean"] / 100
    code, out, said = run("verify", tmp_path / "m.gguf", "--against", checkpoint, "--like", float_file, *FEW[2:], "--json")
    again = json.loads(out)
    assert code == 0 and again["kl_mean"] == pytest.approx(verdict["kl_mean"], rel=1e-6), said
    assert again["bits_per_weight"] == pytest.approx(4.5, abs=1e-9)


def test_an_artifact_that_is_laid_out_for_llama_cpp_goes_nowhere_else(run: Run, checkpoint: Path, float_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "m.gguf"
    assert run("quantize", checkpoint, "-o", out, "--format", "q8_0", "--method", "rtn", "--no-verify", "--like", float_file)[0] == 0
    artifact = tmp_path / "m.gguf.work" / "artifact"
    assert run("export", artifact, "-o", tmp_path / "again.gguf")[0] == 0
    assert tensors(tmp_path / "again.gguf") == tensors(out)
    code, _, said = run("export", artifact, "-o", tmp_path / "m.onnx")
    assert code == 2 and "laid out for gguf" in said
    code, _, said = run("run", artifact, "Once")
    assert code == 2 and "laid out for gguf" in said


def test_a_float_file_of_another_model_is_refused(run: Run, float_file: Path, tmp_path: Path) -> None:
    other = build("qwen3", tmp_path / "qwen3")
    code, _, said = run("quantize", other, "-o", tmp_path / "m.gguf", "--format", "q8_0", "--like", float_file)
    assert code == 2 and "holds none of the weights of `qwen3`" in said


def test_a_float_file_of_another_revision_is_refused_with_what_differs(
    run: Run, checkpoint: Path, float_file: Path, tmp_path: Path
) -> None:
    def noisy(name: str, data: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        if "ffn" in name and data.dtype == np.uint8:
            data = data.copy()
            data[:, ::4] ^= 1  # the last bit of half the numbers
        return data

    other = rewritten(float_file, tmp_path / "other.gguf", noisy)
    code, _, said = run("quantize", checkpoint, "-o", tmp_path / "m.gguf", "--format", "q8_0", "--like", other)
    assert code == 2 and "ffn_down.weight" in said and "of its" in said and "--accept-unmatched" in said


def test_a_changed_matrix_is_named_and_carried_over_only_if_the_user_says_so(
    run: Run, checkpoint: Path, float_file: Path, tmp_path: Path
) -> None:
    def changed(name: str, data: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        if name == "blk.1.attn_k.weight":
            data = data.copy()
            data[3, 0] ^= 1
        return data

    other = rewritten(float_file, tmp_path / "other.gguf", changed)
    words = (
        "quantize",
        checkpoint,
        "-o",
        tmp_path / "m.gguf",
        "--format",
        "q8_0",
        "--method",
        "rtn",
        *FEW[4:],
        "--length",
        "64",
        "--like",
        other,
    )
    code, _, said = run(*words)
    assert code == 2 and "blk.1.attn_k.weight" in said and "rows are in the checkpoint" in said
    code, _, said = run(*words, "--accept-unmatched")
    held = tensors(tmp_path / "m.gguf")
    assert code == 0, said
    assert held["blk.1.attn_k.weight"] == tensors(other)["blk.1.attn_k.weight"] and held["blk.1.attn_q.weight"][0] == "Q8_0"


def test_a_float_file_that_computes_something_else_stops_the_work(run: Run, checkpoint: Path, float_file: Path, tmp_path: Path) -> None:
    """A converter can be silently wrong: here a norm lost its values."""

    def wrong(name: str, data: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return np.ones_like(data) * 3 if name == "blk.0.attn_norm.weight" else data

    other = rewritten(float_file, tmp_path / "other.gguf", wrong)
    words = ("quantize", checkpoint, "-o", tmp_path / "m.gguf", "--format", "q8_0", *FEW, "--like", other)
    code, _, said = run(*words)
    assert code == 2 and "a KL of" in said and "above 0.001" in said and not (tmp_path / "m.gguf").exists()
    assert run(*words, "--max-floor", "10")[0] == 0


def test_a_truncated_float_file_is_refused(run: Run, checkpoint: Path, float_file: Path, tmp_path: Path) -> None:
    (tmp_path / "cut.gguf").write_bytes(float_file.read_bytes()[:-100_000])
    code, _, said = run("quantize", checkpoint, "-o", tmp_path / "m.gguf", "--format", "q8_0", "--like", tmp_path / "cut.gguf")
    assert code == 2 and "it ends before" in said


def test_what_works_on_modules_is_refused_for_a_layout(run: Run, checkpoint: Path, float_file: Path, tmp_path: Path) -> None:
    for option in (("--tune", "5"), ("--sequential",), ("--rewrite", "awq")):
        code, _, said = run("quantize", checkpoint, "-o", tmp_path / "m.gguf", "--format", "q8_0", "--like", float_file, *option)
        assert code == 2 and option[0] in said
    code, _, said = run("quantize", checkpoint, "-o", tmp_path / "m.onnx", "--format", "int8_g32", "--like", float_file)
    assert code == 2 and "--like" in said


def test_a_gguf_of_an_architecture_that_nobody_knows_is_requantized(run: Run, float_file: Path, tmp_path: Path) -> None:
    strange = rewritten(float_file, tmp_path / "strange.gguf", unchanged, "neverheard")
    code, _, said = run("quantize", strange, "-o", tmp_path / "m.gguf", "--format", "q4_k")
    held, before = tensors(tmp_path / "m.gguf"), tensors(strange)
    assert code == 0 and "this llama.cpp knows no such architecture" in " ".join(said.split()), said
    assert held.keys() == before.keys()
    assert {held[name][0] for name in held if "ffn" in name and "norm" not in name} == {"Q4_K"}
    assert all(held[name] == before[name] for name in held if "norm" in name)
    fields = gguf.GGUFReader(tmp_path / "m.gguf").fields
    assert fields["general.architecture"].contents() == "neverheard"
    old = gguf.GGUFReader(strange).fields["neverheard.rope.freq_base"].contents()
    assert fields["neverheard.rope.freq_base"].contents() == old
    # the same matrices by the table: the same bytes
    assert run("quantize", float_file, "-o", tmp_path / "known.gguf", "--format", "q4_k", "--method", "rtn", "--no-verify")[0] == 0
    assert held == tensors(tmp_path / "known.gguf")


def test_a_gguf_whose_vocabulary_is_not_known_here_is_judged_in_llama_cpp_against_itself(
    run: Run, float_file: Path, tmp_path: Path
) -> None:
    """Its text is tokenized by llama.cpp, which knows more rules than fewbits."""
    reader_of = gguf.GGUFReader(float_file)
    assert "tokenizer.ggml.pre" in reader_of.fields
    strange = rewritten(float_file, tmp_path / "strange.gguf", unchanged)
    content = bytearray(strange.read_bytes())
    pre = str(reader_of.fields["tokenizer.ggml.pre"].contents()).encode()
    at = content.index(pre, content.index(b"tokenizer.ggml.pre"))
    assert pre == b"gpt-2", "as long as the name that takes its place"
    content[at : at + len(pre)] = b"bloom"
    strange.write_bytes(content)
    code, out, said = run("quantize", strange, "-o", tmp_path / "m.gguf", "--size", "4.5bpw", "--tokens", "256", "--length", "64", "--json")
    assert code == 0, said
    result = json.loads(out)
    assert result["verdict"]["kl_floor"] is None and 0 < result["verdict"]["kl_mean"] < 1
    assert result["plan"].get("predicted_kl") is None and result["plan"]["bits_per_weight"] <= 4.5


def test_a_size_needs_no_gradients_with_an_importance_matrix(run: Run, checkpoint: Path, float_file: Path, tmp_path: Path) -> None:
    assert run("calibrate", checkpoint, "-o", tmp_path / "stats", "--imatrix", tmp_path / "im.gguf", *FEW[:4])[0] == 0
    words = ("quantize", checkpoint, "-o", tmp_path / "m.gguf", "--size", "4.5bpw", "--imatrix", tmp_path / "im.gguf", *FEW[2:], "--json")
    for more in ((), ("--like", float_file)):
        code, out, said = run(*words, *more)
        assert code == 0 and json.loads(out)["plan"].get("predicted_kl") is None, said
    code, _, said = run(*words[:4], "--max-kl", "0.1", *words[6:])
    assert code == 2 and "gradients" in said
    code, _, said = run(*words[:6], "--imatrix", tmp_path / "nothing.dat")
    assert code == 2 and "there is no file" in said


@pytest.mark.slow
def test_a_split_float_file_is_read_and_a_split_file_written(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    code, _, said = run("quantize", checkpoint, "-o", tmp_path / "float", "--format", "bf16", "--split-size", "1MB", "--no-verify")
    assert code == 0, said
    first = next((tmp_path / "float").glob("*-00001-of-*.gguf"))
    code, _, said = run("quantize", checkpoint, "-o", tmp_path / "m", "--split-size", "500kB", "--format", "q4_0", *FEW, "--like", first)
    assert code == 0 and len(list((tmp_path / "m").glob("*.gguf"))) > 1, said


def test_without_a_converter_the_three_ways_are_named(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LLAMA_CPP_ROOT", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = build("granite", tmp_path / "granite")
    code, _, said = run("quantize", model, "-o", tmp_path / "m.gguf", "--format", "q8_0")
    assert code == 2 and all(way in said for way in ("--like", "--converter PATH", "--converter pip", "LLAMA_CPP_ROOT"))
    code, _, said = run("quantize", model, "-o", tmp_path / "m.gguf", "--format", "q8_0", "--converter", tmp_path)
    assert code == 3 and "holds no convert_hf_to_gguf.py" in said
    shutil.rmtree(model)


class TestUnderThreeBits:
    """Of a model of which nothing is known but its weights."""

    @pytest.fixture
    def strange(self, float_file: Path, tmp_path: Path) -> Path:
        return rewritten(float_file, tmp_path / "strange.gguf", unchanged, "neverheard")

    @pytest.mark.parametrize(
        ("words", "named"),
        [
            (("--format", "iq2_xs"), "`token_embd` in iq2_xs: 2.31 bits, under 3,"),
            (("--format", "q4_k", "--override", "ffn_up=q2_k"), "`blk.0.ffn_up` in q2_k: 2.62 bits"),
            (("--size", "4bpw", "--formats", "iq3_s,iq1_m"), "`--formats iq1_m`: 1.75 bits"),
            (("--size", "4bpw", "--override", "ffn_up<=iq2_xxs"), "`--override ffn_up<=iq2_xxs`: 2.06 bits"),
            (("--size", "iq3_xxs"), "`--size iq3_xxs`, which needs iq2_s: 2.56 bits"),
        ],
    )
    def test_they_are_refused_where_they_are_named(
        self, run: Run, strange: Path, tmp_path: Path, words: tuple[str, ...], named: str
    ) -> None:
        code, _, said = run("quantize", strange, "-o", tmp_path / "m.gguf", *words)
        said = " ".join(said.split())
        assert code == 2 and named in said and "nothing is known of this model but its weights" in said
        assert "--imatrix FILE" in said and "--method rtn" in said
        assert not (tmp_path / "m.gguf").exists()

    def test_a_plan_that_does_not_ask_for_rounding_is_refused(self, run: Run, strange: Path, tmp_path: Path) -> None:
        to = ("-o", tmp_path / "m.gguf", "--no-verify")
        assert run("quantize", strange, *to, "--format", "q2_k", "--method", "rtn")[0] == 0
        plan = tmp_path / "plan.json"
        text = (tmp_path / "m.gguf.work" / "artifact" / "plan.json").read_text()
        plan.write_text(text)
        assert run("quantize", strange, *to, "--plan", plan)[0] == 0  # rtn is named in it, weight by weight
        plan.write_text(text.replace('"rtn"', '"auto"'))
        code, _, said = run("quantize", strange, *to, "--plan", plan)
        assert code == 2 and "in q2_k: 2.62 bits" in " ".join(said.split())

    def test_a_size_is_made_up_of_others_unless_rounding_is_asked_for(self, run: Run, strange: Path, tmp_path: Path) -> None:
        words = ("quantize", strange, "-o", tmp_path / "m.gguf", "--size", "4bpw", "--no-verify", "--json")
        code, out, said = run(*words)
        chosen = {row["format"] for row in json.loads(out)["plan"]["weights"].values()}
        assert code == 0 and chosen.isdisjoint({"iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "q2_k"}), said
        code, _, said = run(*words[:5], "2.7bpw", *words[6:])
        assert code == 2 and "they take at least" in said and "3.06 bits per weight" in said  # iq3_xxs
        code, out, said = run(*words[:5], "2.7bpw", *words[6:], "--method", "rtn", "--formats", "q2_k,q4_0")
        assert code == 0 and "q2_k" in {row["format"] for row in json.loads(out)["plan"]["weights"].values()}, said
