"""Quantized checkpoints that are damaged or of another kind are refused by the name of the tensor or the method; others run all verbs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import published_models
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fewbits.errors import InputError
from fewbits.model import checkpoints

WEIGHT = "model.layers.0.self_attn.q_proj.weight"
SCALES = f"{WEIGHT}_scale_inv"
EXPERTS = "model.layers.1.mlp.experts.down_proj"
MAKERS = {
    "fp8": published_models.deepseek_fp8,
    "exponents": published_models.qwen_fp8_exponents,
    "tensors": published_models.llama_fp8_tensor,
    "mxfp4": published_models.gpt_oss_mxfp4,
}


def put(name: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.update({name: tensor})


def fill(name: str, place: Any, value: float) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors[name].__setitem__(place, value)


DAMAGE: dict[str, tuple[str, Callable[[dict[str, Tensor]], Any], str, str]] = {
    "scales are missing": ("tensors", lambda t: t.pop(SCALES), WEIGHT, f"`{WEIGHT}` is stored as F8_E4M3, and there is no `{SCALES}`"),
    "a weight is missing": ("tensors", lambda t: t.pop(WEIGHT), WEIGHT, f"`{SCALES}` has scales for `{WEIGHT}`, which is missing"),
    "a weight is float": ("tensors", put(WEIGHT, torch.zeros(48, 40)), WEIGHT, f"has scales for `{WEIGHT}`, which is stored as F32"),
    "scales for other rows": ("tensors", put(SCALES, torch.ones(7, 1)), WEIGHT, f"`{SCALES}` is (7, 1) and should be (1, 1)"),
    "scales that are integers": ("tensors", put(SCALES, torch.ones(1, 1).long()), WEIGHT, f"`{SCALES}` is stored as I64"),
    "a scale is NaN": ("tensors", put(SCALES, torch.tensor(float("nan"))), WEIGHT, f"`{SCALES}` holds a scale of nan"),
    "a scale is infinite": ("tensors", put(SCALES, torch.tensor(float("inf"))), WEIGHT, f"`{SCALES}` holds a scale of inf"),
    "a scale is zero": ("tensors", put(SCALES, torch.tensor(0.0)), WEIGHT, f"`{SCALES}` holds a scale of 0 at (0, 0)"),
    "an exponent is NaN": (
        "exponents", lambda t: t[SCALES].view(torch.uint8).fill_(255), WEIGHT, f"`{SCALES}` holds a scale of nan"
    ),
    "scales of mxfp4 are missing": ("mxfp4", lambda t: t.pop(f"{EXPERTS}_scales"), EXPERTS, f"`{EXPERTS}_scales` is not"),
    "blocks of mxfp4 are missing": ("mxfp4", lambda t: t.pop(f"{EXPERTS}_blocks"), EXPERTS, f"`{EXPERTS}_blocks` is not"),
    "scales of mxfp4 for other rows": (
        "mxfp4", put(f"{EXPERTS}_scales", torch.ones(4, 63, 2, dtype=torch.uint8)), EXPERTS, f"`{EXPERTS}_scales` is U8 (4, 63, 2)"
    ),
    "blocks of mxfp4 of 15 bytes": (
        "mxfp4", put(f"{EXPERTS}_blocks", torch.ones(4, 64, 2, 15, dtype=torch.uint8)), EXPERTS, f"`{EXPERTS}_blocks` is U8 (4, 64, 2, 15)"
    ),
    "a scale of mxfp4 is NaN": ("mxfp4", fill(f"{EXPERTS}_scales", (2, 3, 1), 255), EXPERTS, f"`{EXPERTS}_scales` holds a scale of nan"),
    "experts are there twice": ("mxfp4", put(EXPERTS, torch.zeros(4, 64, 64)), EXPERTS, f"`{EXPERTS}` is there twice"),
    "bytes that are nothing": ("mxfp4", put("model.other", torch.zeros(4, dtype=torch.uint8)), EXPERTS, "`model.other` is stored as U8"),
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named(kind: str, tmp_path: Path) -> None:
    which, change, name, said = DAMAGE[kind]
    folder = MAKERS[which](tmp_path)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(InputError) as refused:
        checkpoints.open(folder).load(name)
    assert said in str(refused.value) and refused.value.hint


def test_a_scale_of_zero_over_zeros_is_no_damage(tmp_path: Path) -> None:
    folder = MAKERS["fp8"](tmp_path)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name].view(torch.uint8)[:32, :32] = 0
    tensors[f"{name}_scale_inv"][0, 0] = 0
    save_file(tensors, folder / "model.safetensors")
    decoded = checkpoints.open(folder).load(name)
    assert not decoded[:32, :32].any() and decoded.any()


def configure(folder: Path, said: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": said}))


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "modelopt"])
def test_other_methods_are_refused_by_name(method: str, tmp_path: Path) -> None:
    folder = MAKERS["mxfp4"](tmp_path)
    configure(folder, {"quant_method": method, "bits": 4})
    with pytest.raises(InputError, match=f"quantized already, by `{method}`") as refused:
        checkpoints.open(folder)
    assert "fp8, mxfp4, compressed-tensors" in refused.value.hint


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("yes", "says nothing"),
        ({"bits": 4}, "does not name"),
        ({"quant_method": ["fp8"]}, "quantized already"),
        ({"quant_method": "fp8", "weight_block_size": [32]}, "`weight_block_size`"),
        ({"quant_method": "fp8", "weight_block_size": [0, 32]}, "`weight_block_size`"),
        ({"quant_method": "fp8", "weight_block_size": "32x32"}, "`weight_block_size`"),
        ({"quant_method": "fp8", "weight_block_size": [16, 32]}, "_scale_inv` is"),
    ],
)
def test_what_config_says_is_checked(said: object, message: str, tmp_path: Path) -> None:
    folder = MAKERS["fp8"](tmp_path)
    configure(folder, said)
    with pytest.raises(InputError, match=message):
        checkpoints.open(folder)


@pytest.mark.parametrize("kind", MAKERS)
def test_all_verbs_take_a_published_checkpoint(kind: str, tmp_path: Path, run: Callable[..., tuple[int, str, str]]) -> None:
    folder = MAKERS[kind](tmp_path / "published")
    code, said, _ = run("inspect", folder, "--json")
    assert code == 0 and ("mxfp4 experts" if kind == "mxfp4" else "fp8 e4m3") in json.loads(said)["metadata"]["source_quantization"]
    assert run("calibrate", folder, "-o", tmp_path / "stats", "--samples", 2, "--length", 32, "--offline")[0] == 0
    out = tmp_path / "x"
    assert run("quantize", folder, "-o", out, "--to", "fewbits", "--format", "q8_0", "--method", "rtn", "--no-verify", "--offline")[0] == 0
    config = json.loads(next(out.rglob("config.json")).read_text())
    assert config["quantization_config"]["quant_method"] == "fewbits"
    assert "published" in config["quantization_config"] and config["quantization_config"]["published"]["dtype"] == "bfloat16"
