"""The command line as a user meets it: what it prints, where, and with which exit code."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from enumerated import one_of

from fewbits import embedded
from fewbits.devices import processor


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return Path(shutil.copytree(embedded.MODEL, tmp_path / "model"))


def leftovers(folder: Path) -> list[str]:
    """But for finished weights, which the next run goes on from."""
    files = (str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in files if "model/" not in name and ".work/cache/" not in name)


@pytest.mark.parametrize("words", one_of([["formats"], ["--help"], ["quantize", "--help"], ["verify", "--help"]]), ids=" ".join)
def test_verbs_that_need_no_weights_answer_in_half_the_time_that_torch_takes_to_load(words: list[str]) -> None:
    def seconds(*asked: str) -> float:  # of processor time: other tests run beside this one
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *asked], check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime

    loading = min(seconds("-c", "import torch") for _ in range(2))
    assert min(seconds("-m", "fewbits.cli", *words) for _ in range(4)) < loading / 2


def test_formats_lists_all_on_stdout(run) -> None:
    code, out, err = run("formats")
    assert code == 0 and "q3_s6" in out and err == ""
    code, out, err = run("formats", "--json")
    rows = {row["name"]: row for row in json.loads(out)}
    assert code == 0 and err == ""
    assert rows["q4_k"]["bits_per_weight"] == 4.5 and rows["q4_k"]["targets"] == ["gguf"]
    assert rows["int4_g32"]["targets"] == ["safetensors", "gguf", "mlx", "onnx", "onnx-genai"]


def test_quantize_writes_a_verified_file_and_a_plan(run, tmp_path: Path) -> None:
    out = tmp_path / "q.gguf"
    code, text, _ = run(
        "quantize", embedded.MODEL, "--method", "rtn", "-o", out, "--format", "Q4_K", "--override", "down_proj=q8_0", "--json"
    )
    result = json.loads(text)
    assert code == 0 and out.is_file()
    assert result["verdict"]["runtime"] == "llama.cpp" and result["verdict"]["passed"]
    formats = {name: row["format"] for name, row in result["plan"]["weights"].items()}
    assert formats["model.layers.0.mlp.down_proj"] == "q8_0" and formats["model.layers.0.mlp.up_proj"] == "q4_k"
    assert json.loads((tmp_path / "q.gguf.work" / "results.json").read_text()) == result

    plan = tmp_path / "edited.json"
    edited = json.loads((tmp_path / "q.gguf.work" / "artifact" / "plan.json").read_text())
    edited["weights"]["model.embed_tokens"]["format"] = "q8_0"
    plan.write_text(json.dumps(edited))
    code, text, _ = run("quantize", embedded.MODEL, "--method", "rtn", "-o", tmp_path / "p.gguf", "--plan", plan, "--no-verify", "--json")
    assert code == 0
    assert json.loads(text)["plan"]["weights"]["model.embed_tokens"]["format"] == "q8_0"


def test_thresholds_decide_the_exit_code(run, tmp_path: Path) -> None:
    out = tmp_path / "q.gguf"
    assert run("quantize", embedded.MODEL, "--method", "rtn", "-o", out, "--format", "q3_k", "--no-verify", "--quiet")[0] == 0
    words = ("verify", out, "--against", embedded.MODEL, "--tokens", 1022, "--no-floor", "--json")
    code, text, _ = run(*words, "--max-kl", 5, "--min-agreement", 0.01, "--max-ppl-ratio", 9)
    verdict = json.loads(text)
    assert code == 0 and verdict["passed"] and verdict["tokens"] == 1022
    wanted = "tokens kl_mean kl_ci95 kl_p99 kl_max kl_floor ppl ppl_base ppl_ratio top1_agreement max_logit_diff bytes bits_per_weight"
    assert set(wanted.split()) | {"runtime", "runtime_version", "thresholds", "passed"} <= verdict.keys()
    assert verdict["kl_ci95"][0] < verdict["kl_mean"] < verdict["kl_ci95"][1]
    for limit in (("--max-kl", 1e-9), ("--min-agreement", 0.99999), ("--max-ppl-ratio", 0.5)):
        code, text, _ = run(*words, *limit)
        assert code == 1 and not json.loads(text)["passed"]


@pytest.mark.slow
def test_an_artifact_is_exported_to_every_target_that_accepts_it(run, tmp_path: Path) -> None:
    assert (
        run("quantize", embedded.MODEL, "--method", "rtn", "-o", tmp_path / "a.gguf", "--format", "int4_g32", "--no-verify", "--quiet")[0]
        == 0
    )
    artifact = tmp_path / "a.gguf.work" / "artifact"
    code, _, _ = run("export", artifact, "--to", "onnx", "-o", tmp_path / "a.onnx", "--quiet")
    assert code == 0 and (tmp_path / "a.onnx").is_file()
    words = ("--against", embedded.MODEL, "--tokens", 1022, "--no-floor", "--json")
    verdicts = [json.loads(run("verify", path, *words)[1]) for path in (tmp_path / "a.gguf", tmp_path / "a.onnx", artifact)]
    assert [v["runtime"] for v in verdicts] == ["llama.cpp", "onnxruntime", "torch"]
    spread = max(v["kl_mean"] for v in verdicts) / min(v["kl_mean"] for v in verdicts)
    assert spread < 1.05  # the same weights in three runtimes; int8 activations move the KL by a few per cent

    assert (
        run("quantize", embedded.MODEL, "--method", "rtn", "-o", tmp_path / "k.gguf", "--format", "q4_k", "--no-verify", "--quiet")[0] == 0
    )
    code, _, err = run("export", tmp_path / "k.gguf.work" / "artifact", "--to", "onnx", "-o", tmp_path / "k.onnx")
    assert code == 2 and "q4_k" in err and "hint:" in err and not (tmp_path / "k.onnx").exists()


def test_inspect_looks_into_all_four_kinds(run, tmp_path: Path) -> None:
    assert (
        run("quantize", embedded.MODEL, "--method", "rtn", "-o", tmp_path / "a.gguf", "--format", "int4_g32", "--no-verify", "--quiet")[0]
        == 0
    )
    artifact = tmp_path / "a.gguf.work" / "artifact"
    run("export", artifact, "--to", "onnx", "-o", tmp_path / "a.onnx", "--quiet")
    for path, kind in (
        (embedded.MODEL, "checkpoint"), (tmp_path / "a.gguf", "gguf"), (tmp_path / "a.onnx", "onnx"), (artifact, "fewbits artifact"),
    ):  # fmt: skip
        code, text, _ = run("inspect", path, "--json")
        found = json.loads(text)
        assert code == 0 and found["kind"] == kind and found["tensors"]
        assert run("inspect", path, "--no-values")[0] == 0


def test_compare_shows_granularity_ratios_and_the_custom_format_beside_q4_0(run) -> None:
    code, text, _ = run("compare", embedded.MODEL, "--weight", "layers.1", "--formats", "q3_k,q3_s6,q4_0", "--json")
    result = json.loads(text)
    assert code == 0 and [row["format"] for row in result["formats"]] == ["q3_k", "q3_s6", "q4_0"]
    for row in result["weights"]:
        assert row["per_tensor"] > row["per_channel"] > row["per_group"] > 0
        assert row["group_ratio"] == pytest.approx(row["per_tensor"] / row["per_group"])
    errors = {row["format"]: row["error"] for row in result["formats"]}
    assert errors["q4_0"] < errors["q3_k"] < errors["q3_s6"]
    assert all(row["gigaweights_per_second"] > 0 for row in result["formats"])
    assert "q3_s6" in run("compare", embedded.MODEL, "--weight", "layers.1", "--formats", "q3_k,q3_s6,q4_0")[1]


def test_compare_takes_formats_whose_codes_stand_for_vectors(run) -> None:
    code, text, _ = run("compare", embedded.MODEL, "--weight", "layers.1.mlp", "--formats", "iq2_xs,iq3_s,q3_k", "--json")
    errors = {row["format"]: row["error"] for row in json.loads(text)["formats"]}
    assert code == 0 and errors["iq2_xs"] > errors["q3_k"] > errors["iq3_s"]


def test_what_fell_back_and_why_is_on_the_screen(run, tmp_path: Path, narrow_checkpoint: Path) -> None:
    code, _, err = run("quantize", narrow_checkpoint, "--method", "rtn", "-o", tmp_path / "n.gguf", "--format", "q4_k", "--no-verify")
    text = " ".join(err.split())
    assert code == 0
    assert "stored as q4_0: 64 columns do not divide into q4_k's blocks of 256" in text
    assert "stored as fp16: 172 columns do not divide into q4_k's blocks of 256" in text
    code, _, err = run("quantize", narrow_checkpoint, "--method", "rtn", "-o", tmp_path / "m.gguf", "--format", "iq2_xs", "--no-verify")
    assert code == 0 and "stored as mxfp4: 64 columns do not divide into iq2_xs's blocks of 256" in " ".join(err.split())


class TestWrongInput:
    """Each a message with a hint, exit code 2, no traceback, and nothing left behind."""

    @pytest.fixture
    def fails(self, run, tmp_path: Path):
        def check(model: object, *extra: object, code: int = 2) -> str:
            before = leftovers(tmp_path)
            words = extra or ("--format", "q4_k")
            ended, out, err = run("quantize", model, "--method", "rtn", "-o", tmp_path / "out.gguf", *words)
            text = " ".join(err.split())
            assert ended == code and out == ""
            assert "error: " in text and "hint: " in text and "Traceback" not in text
            assert leftovers(tmp_path) == before
            return text

        return check

    def test_unknown_format(self, fails) -> None:
        assert "did you mean `q4_k`?" in fails(embedded.MODEL, "--format", "q4-k")

    def test_two_budgets(self, fails, tmp_path: Path) -> None:
        assert "one budget" in fails(embedded.MODEL, "--format", "q4_k", "--plan", tmp_path / "plan.json")

    def test_unknown_method(self, fails) -> None:
        assert "known methods" in fails(embedded.MODEL, "--format", "q4_k", "--method", "magic")

    def test_a_name_that_contradicts_the_target(self, fails) -> None:
        assert "named like a file of gguf" in fails(embedded.MODEL, "--format", "q8_0", "--to", "onnx")

    @pytest.mark.parametrize("limit", [("--max-kl", "nan"), ("--max-kl", "-1"), ("--min-agreement", "90")], ids=" ".join)
    def test_a_threshold_that_is_none(self, fails, limit: tuple[str, str]) -> None:
        assert "is no threshold" in fails(embedded.MODEL, "--format", "q8_0", *limit)

    def test_a_plan_that_is_not_text(self, fails, tmp_path: Path) -> None:
        (tmp_path / "plan.json").write_bytes(bytes(range(256)))
        assert "not UTF-8" in fails(embedded.MODEL, "--plan", tmp_path / "plan.json")

    def test_a_folder_of_somebody_else_in_the_way(self, fails, tmp_path: Path) -> None:
        (tmp_path / "out.gguf").mkdir()
        (tmp_path / "out.gguf" / "thesis.txt").write_text("precious")
        assert "did not make" in fails(embedded.MODEL, "--format", "q8_0", "--no-verify")
        assert (tmp_path / "out.gguf" / "thesis.txt").read_text() == "precious"

    def test_no_budget(self, fails) -> None:
        assert "--format" in fails(embedded.MODEL, "--method", "rtn")

    def test_unknown_target(self, fails) -> None:
        said = fails(embedded.MODEL, "--format", "q4_k", "--to", "ggml")
        assert "known targets: safetensors, fewbits, gguf, mlx, onnx, onnx-genai" in said

    def test_missing_folder(self, fails, tmp_path: Path) -> None:
        assert "nothing at" in fails(tmp_path / "modle")

    def test_broken_config(self, fails, checkpoint: Path) -> None:
        (checkpoint / "config.json").write_text('{"model_type": "llama", ')
        assert "not valid JSON" in fails(checkpoint)

    def test_config_without_a_type(self, fails, checkpoint: Path) -> None:
        (checkpoint / "config.json").write_text("{}")
        assert "model_type" in fails(checkpoint)

    def test_config_of_an_unknown_architecture(self, fails, checkpoint: Path) -> None:
        config = json.loads((checkpoint / "config.json").read_text()) | {"model_type": "mystery", "architectures": ["MysteryForCausalLM"]}
        (checkpoint / "config.json").write_text(json.dumps(config))
        assert "config.json" in fails(checkpoint)

    def test_config_that_contradicts_the_weights(self, fails, checkpoint: Path) -> None:
        config = json.loads((checkpoint / "config.json").read_text()) | {"intermediate_size": 512}
        (checkpoint / "config.json").write_text(json.dumps(config))
        assert "(768, 256) in the weights and (512, 256) by config.json" in fails(checkpoint)

    def test_truncated_safetensors(self, fails, checkpoint: Path) -> None:
        weights = checkpoint / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1000])
        assert "truncated or damaged" in fails(checkpoint)

    def test_missing_tokenizer(self, fails, checkpoint: Path) -> None:
        (checkpoint / "tokenizer.json").unlink()
        (checkpoint / "tokenizer_config.json").unlink()
        assert "no tokenizer" in fails(checkpoint)

    def test_pickled_weights(self, fails, checkpoint: Path) -> None:
        (checkpoint / "model.safetensors").rename(checkpoint / "pytorch_model.bin")
        assert "pickled" in fails(checkpoint)

    def test_a_shard_that_leads_out_of_the_folder(self, fails, checkpoint: Path) -> None:
        index = {"weight_map": {"model.norm.weight": "../model.safetensors"}}
        (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
        assert "outside its folder" in fails(checkpoint)

    def test_nan_in_a_weight(self, fails, checkpoint: Path) -> None:
        from safetensors.torch import load_file, save_file

        tensors = load_file(checkpoint / "model.safetensors")
        tensors["model.layers.2.mlp.up_proj.weight"][5, 7] = float("nan")
        save_file(tensors, checkpoint / "model.safetensors", metadata={"format": "pt"})
        assert "`model.layers.2.mlp.up_proj` holds nan at row 5, column 7" in fails(checkpoint)

    def test_nan_in_a_kept_tensor(self, fails, checkpoint: Path) -> None:
        from safetensors.torch import load_file, save_file

        tensors = load_file(checkpoint / "model.safetensors")
        tensors["model.norm.weight"][3] = float("inf")
        save_file(tensors, checkpoint / "model.safetensors", metadata={"format": "pt"})
        assert "`model.norm.weight` holds inf at position 3" in fails(checkpoint)

    def test_missing_data_file(self, fails, tmp_path: Path) -> None:
        assert "does not exist" in fails(embedded.MODEL, "--format", "q8_0", "--data", tmp_path / "none.txt")

    def test_full_disk(self, fails, monkeypatch: pytest.MonkeyPatch) -> None:
        import safetensors.torch

        def full(*_: object, **__: object) -> None:
            raise safetensors.SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

        monkeypatch.setattr(safetensors.torch, "save_file", full)
        assert "the disk is full" in fails(embedded.MODEL, code=3)


def test_the_model_itself_is_never_overwritten(run, tmp_path: Path) -> None:
    file = tmp_path / "a.gguf"
    assert run("quantize", embedded.MODEL, "--method", "rtn", "-o", file, "--format", "q8_0", "--no-verify", "--quiet")[0] == 0
    before = file.read_bytes()
    code, _, err = run("quantize", file, "--method", "rtn", "-o", file, "--format", "q4_0", "--no-verify")
    assert code == 2 and "is the model itself" in err and file.read_bytes() == before


def test_wrong_files_for_verify_and_export_are_refused(run, tmp_path: Path) -> None:
    file, artifact = tmp_path / "a.gguf", tmp_path / "a.gguf.work" / "artifact"
    assert run("quantize", embedded.MODEL, "--method", "rtn", "-o", file, "--format", "q8_0", "--no-verify", "--quiet")[0] == 0
    for words, message in [
        (("verify", file, "--against", embedded.MODEL, "--runtime", "onnxruntime"), "does not run files like"),
        (("verify", file, "--against", embedded.MODEL, "--runtime", "torch"), "does not run files like"),
        (("verify", file, "--against", embedded.MODEL, "--length", "513"), "beyond the model's 512 positions"),
        (("verify", file, "--against", tmp_path / "nothing"), "nothing at"),
        (("export", embedded.MODEL / "config.json", "-o", tmp_path / "z.onnx"), "is no artifact"),
        (("export", tmp_path / "nothing", "-o", tmp_path / "z.onnx"), "is missing"),
        (("export", artifact, "-o", "/proc/nowhere/z.gguf"), "cannot write to"),
    ]:
        code, out, err = run(*words)
        assert code == 2 and out == "" and message in " ".join(err.split()) and "hint:" in err, words
    (artifact / "config.json").unlink()
    code, _, err = run("export", artifact, "-o", tmp_path / "z.gguf")
    assert code == 2 and "hint:" in err


def test_a_file_of_another_model_is_refused_not_judged(run, tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    other = tmp_path / "other"
    LlamaForCausalLM(
        LlamaConfig(vocab_size=2050, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
    ).save_pretrained(other)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(embedded.MODEL / name, other / name)
    for name in ("o.gguf", "o.onnx"):
        assert run("quantize", other, "--method", "rtn", "-o", tmp_path / name, "--format", "q8_0", "--no-verify", "--quiet")[0] == 0
        code, _, err = run("verify", tmp_path / name, "--against", embedded.MODEL, "--no-floor", "--tokens", 511)
        assert code == 2 and "a vocabulary of 2050, the model one of 2048" in " ".join(err.split())


def test_json_has_no_number_that_is_not_one() -> None:
    from fewbits.store.files import to_json

    assert json.loads(to_json({"a": float("nan"), "b": [float("inf"), 1.5]}), parse_constant=pytest.fail) == {"a": None, "b": [None, 1.5]}


def test_a_terminated_run_leaves_nothing_but_finished_weights(tmp_path: Path) -> None:
    words = [
        sys.executable,
        "-m",
        "fewbits.cli",
        "quantize",
        str(embedded.MODEL),
        "--method",
        "rtn",
        "-o",
        str(tmp_path / "t.gguf"),
        "--format",
        "iq1_s",
    ]
    slow = os.environ | {processor.FORCE: "scalar"}  # enough to be stopped in the middle
    running = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=slow)
    while not list(tmp_path.rglob("weight-*")) and running.poll() is None:  # the first weight is finished
        time.sleep(0.002)
    running.terminate()
    _, said = running.communicate()
    assert running.returncode == 143, said
    work = tmp_path / "t.gguf.work"
    assert (set(tmp_path.iterdir()) <= {work} and not work.exists()) or list(work.iterdir()) == [work / "cache"]
    assert all(path.name.startswith("weight-") for path in (work / "cache").glob("*"))


def test_a_disk_that_really_fills_up_ends_with_code_3_and_nothing_left(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is too small is refused before the work; what fills up meanwhile, without a pre-flight, in the middle of it."""
    disk = tmp_path / "small"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=5m", "tmpfs", str(disk)], capture_output=True, check=False).returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        code, _, err = run("quantize", embedded.MODEL, "--method", "rtn", "-o", disk / "out.gguf", "--format", "q4_k", "--no-verify")
        assert code == 3 and "are free" in " ".join(err.split()) and not list(disk.iterdir())
        monkeypatch.setattr("fewbits.preflight.Preflight.check", lambda _: None)
        for target, name in (("gguf", "q4_k"), ("onnx", "int4_g32")):  # weights and artifact fit, the file beside them does not
            code, _, err = run(
                "quantize", embedded.MODEL, "--method", "rtn", "-o", disk / f"out.{target}", "--to", target, "--format", name, "--no-verify"
            )
            assert code == 3 and "the disk is full" in " ".join(err.split()) and "hint: " in err
            assert not list(disk.glob("out.*")) or all(p.is_dir() for p in disk.glob("out.*"))
            assert not [p for p in disk.rglob("*") if "partial" in p.name]
            shutil.rmtree(disk / f"out.{target}.work", ignore_errors=True)
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)
