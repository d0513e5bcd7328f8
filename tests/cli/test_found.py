"""What people type is found or recognised: mixes given as formats, files in the place of artifacts, folders that are no models."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fewbits import embedded, quantize

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("made") / "m.gguf"
    quantize(embedded.MODEL, out, format="q4_k", override="down_proj=q6_k", method="rtn", no_verify=True)
    return out


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("Q4_K_M", "`--size q4_k_m`"),
        ("q4_k_m", "`--format q4_k`"),
        ("iq2_m", "`--size iq2_m`"),
        ("int4", "`int4_g32`"),
        ("INT8", "`int8_g32`"),
    ],
)
def test_a_format_that_is_a_mix_or_half_a_name_gets_the_option_that_is_meant(name: str, hint: str, tmp_path: Path, run: Run) -> None:
    code, _, said = run("quantize", embedded.MODEL, "-o", tmp_path / "m.gguf", "--format", name)
    assert code == 2 and hint in said.partition("hint:")[2]


def test_a_file_and_its_work_folder_mean_the_artifact(made: Path, tmp_path: Path, run: Run) -> None:
    work = made.with_name("m.gguf.work")
    texts = {run("run", path, "The function", "-n", 6, "--raw")[1] for path in (made, work, work / "artifact")}
    assert len(texts) == 1 and texts.pop().strip()
    for path in (made, work):
        out = tmp_path / f"{path.name}.again.gguf"
        assert run("export", path, "-o", out, "--quiet")[0] == 0 and out.read_bytes() == made.read_bytes()


def test_a_gguf_of_anybody_is_run_by_itself(made: Path, tmp_path: Path, run: Run) -> None:
    alone = shutil.copyfile(made, tmp_path / "theirs.gguf")
    (_, theirs, _), (_, ours, _) = (run("run", path, "The function", "-n", 6, "--json") for path in (alone, made))
    assert json.loads(theirs)["tokens"] == json.loads(ours)["tokens"] and json.loads(theirs)["stats"]["engine"] == "native"
    code, _, said = run("export", alone, "-o", tmp_path / "x.gguf")
    assert code == 2 and "--requantize" in said


def test_an_artifact_beside_another_file_of_the_name_is_not_taken(made: Path, tmp_path: Path) -> None:
    from fewbits.artifact.located import located

    shutil.copytree(made.with_name("m.gguf.work"), tmp_path / "m.gguf.work")
    (tmp_path / "m.gguf").write_bytes(made.read_bytes() + b"\0")
    assert located(tmp_path / "m.gguf") is None
    shutil.copyfile(made, tmp_path / "m.gguf")
    assert located(tmp_path / "m.gguf") == tmp_path / "m.gguf.work" / "artifact"


def folder_of(kind: str, folder: Path) -> Path:
    """A folder as people have them."""
    folder.mkdir()
    config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 96}
    packed = {"model.layers.0.mlp.up_proj.qweight": torch.zeros(8, 8, dtype=torch.int32)}
    if kind == "lora":
        (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "acme/Base", "r": 8}))
        save_file({"lora_A.weight": torch.zeros(8, 64)}, folder / "adapter_model.safetensors")
        return folder
    if kind == "bin":
        (folder / "pytorch_model.bin").write_bytes(b"not opened")
    if kind == "gguf":
        (folder / "tiny-Q8_0.gguf").write_bytes(b"GGUF")
    if kind in ("gptq", "mlx"):
        config["quantization_config"] = {"quant_method": "gptq", "bits": 4} if kind == "gptq" else {"group_size": 64, "bits": 4}
        save_file(packed, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("kind", "said", "hint"),
    [
        ("lora", "is an adapter (LoRA) of `acme/Base`", "merge_and_unload"),
        ("bin", "holds only pickled weights (pytorch_model.bin)", "save_pretrained"),
        ("gguf", "holds GGUF files", "tiny-Q8_0.gguf"),
        ("gptq", "quantized already, by `gptq`", "float model"),
        ("mlx", "quantized already, by `mlx`", "float model"),
    ],
)
def test_a_folder_that_is_no_float_model_is_said_for_what_it_is(kind: str, said: str, hint: str, tmp_path: Path, run: Run) -> None:
    folder = folder_of(kind, tmp_path / kind)
    code, _, err = run("quantize", folder, "-o", tmp_path / "m.gguf", "--format", "q4_0")
    message, _, advice = err.partition("hint:")
    assert code == 2 and said in message and hint in advice


def test_the_usual_short_questions_are_answered(run: Run) -> None:
    code, out, _ = run("--version")
    assert code == 0 and out.startswith("fewbits ") and out.split()[1][0].isdigit()
    for words in (("-h",), ("fit", "-h"), ("bench", "-h"), ("bench", "kernels", "-h")):
        code, out, _ = run(*words)
        assert code == 0 and "Usage: " in out and "--help" in out
