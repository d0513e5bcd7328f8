"""Checkpoints as they are published: every weight that is opened equals what transformers' own dequantization loads, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import published_models
import pytest
import torch
from mixtures import MIXTURES
from published_models import opened_as_transformers_does
from safetensors.torch import load_file
from torch import Tensor
from transformers import FineGrainedFP8Config, LlamaForCausalLM, Mxfp4Config
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, _dequantize_fp8_weight
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.quantizers import quantizer_finegrained_fp8

from fewbits import model
from fewbits.model import checkpoints
from fewbits.model.checkpoints import fp8, mxfp4

FOLDERS = {
    "deepseek": (published_models.deepseek_fp8, FineGrainedFP8Config, "fp8 e4m3, 32 x 32 blocks"),
    "exponents": (published_models.qwen_fp8_exponents, FineGrainedFP8Config, "fp8 e4m3, 32 x 32 blocks"),
    "whole tensors": (published_models.llama_fp8_tensor, FineGrainedFP8Config, "fp8 e4m3, a scale per tensor; fp8 e4m3, a scale per row"),
    "mxfp4": (published_models.gpt_oss_mxfp4, Mxfp4Config, "mxfp4 experts"),
}
LAYER = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: make(tmp_path_factory.mktemp("published")) for name, (make, _, _) in FOLDERS.items()}


@pytest.fixture(autouse=True)
def without_accelerate(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers asks for accelerate before it looks whether it will dequantize, and then does without."""
    monkeypatch.setattr(quantizer_finegrained_fp8, "is_accelerate_available", lambda: True)


@pytest.mark.parametrize("name", FOLDERS)
def test_every_weight_is_what_transformers_decodes(name: str, folders: dict[str, Path]) -> None:
    _, how, said = FOLDERS[name]
    ours = opened_as_transformers_does(folders[name], how)
    assert ours.checkpoint.source_quantization == said
    assert not hasattr(ours.config, "quantization_config")
    assert not [n for n in ours.checkpoint.names() if "scale" in n or "blocks" in n]
    assert {weight.dtype for weight in ours.weights} == {"bf16"}


def test_a_float_checkpoint_has_no_quantization(narrow_checkpoint: Path) -> None:
    opened = checkpoints.open(narrow_checkpoint)
    assert type(opened).__name__ == "Folder" and opened.source_quantization is None  # type: ignore[attr-defined]


def test_what_is_exported_does_not_claim_to_be_quantized(folders: dict[str, Path], tmp_path: Path) -> None:
    checkpoints.open(folders["deepseek"]).save_assets(tmp_path)
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (folders["deepseek"], tmp_path))
    assert before.pop("quantization_config") and before == after
    assert (tmp_path / "tokenizer.json").exists()


def test_the_last_block_may_be_cut_off(tmp_path: Path) -> None:
    """DeepSeek V3 has 576 rows under 5 scales. transformers' loader refuses them; its backward pass decodes them, here as the judge."""
    tensors = published_models.float_model(LlamaForCausalLM, published_models.llama_config(), tmp_path)
    folder = published_models.say(tmp_path, published_models.fp8(tensors, (16, 32)), published_models.fp8_said((16, 32)))
    stored, opened = load_file(folder / "model.safetensors"), checkpoints.open(folder)
    codes, scales = stored[f"{LAYER}.weight"], stored[f"{LAYER}.weight_scale_inv"]
    assert codes.shape == (48, 40) and scales.shape == (3, 2)
    exact = _dequantize_fp8_weight(codes, scales, [16, 32], torch.float32)
    assert torch.equal(opened.load(f"{LAYER}.weight"), exact.bfloat16())
    assert torch.equal(opened.load_slice(f"{LAYER}.weight", 47), exact[47].bfloat16())


def stacked(folder: Path, tensors: dict[str, Tensor]) -> checkpoints.Checkpoint:
    """A folder of these tensors alone, said to be FP8."""
    config = published_models.llama_config()
    config.architectures, config.dtype = ["LlamaForCausalLM"], torch.bfloat16
    config.save_pretrained(folder)
    return checkpoints.open(published_models.say(folder, tensors, published_models.fp8_said((16, 16))))


@pytest.mark.parametrize("kind", ["float32", "float16", "exponents", "bytes", "4-bit floats", "e5m2"])
def test_experts_in_one_tensor_are_decoded_one_at_a_time(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    codes = torch.randint(0, 256, (3, 48, 64), dtype=torch.uint8)
    codes[codes & 127 == 127] = 0  # NaN of e4m3
    scales: Tensor = (torch.rand(3, 3, 4) + 0.5).half().float()
    stored = codes.view(torch.int8 if kind == "4-bit floats" else torch.float8_e5m2 if kind == "e5m2" else torch.float8_e4m3fn)
    if kind == "e5m2":
        stored = (torch.randn(3, 48, 64) * 7).to(torch.float8_e5m2)
    if kind == "4-bit floats":
        scales = torch.rand(3, 48, 4) + 0.5
    if kind == "float16":
        scales = scales.half()
    if kind in ("bytes", "exponents"):
        scales = torch.arange(36, dtype=torch.uint8).reshape(3, 3, 4) * 5 + 30
        scales = scales if kind == "bytes" else scales.view(torch.float8_e8m0fnu)
    opened = stacked(tmp_path, {"experts.up": stored, "experts.up_scale_inv": scales})
    theirs = Fp8Dequantize(None)._dequantize_one(stored, scales, torch.bfloat16)
    sizes = []
    monkeypatch.setattr(fp8, "scaled", lambda codes, *rest, whole=fp8.scaled: sizes.append(codes.numel()) or whole(codes, *rest))
    assert opened.shape("experts.up") == tuple(theirs.shape) and torch.equal(opened.load_slice("experts.up", 1), theirs[1])
    assert sizes == [theirs[1].numel()]
    assert torch.equal(opened.load("experts.up"), theirs)


def test_every_code_and_every_scale_of_mxfp4_is_decoded_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16).expand(2, 255, 16, 16).contiguous()
    scales = torch.arange(255, dtype=torch.uint8).reshape(1, 255, 1).expand(2, 255, 16).contiguous()
    config = published_models.llama_config()
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    tensors = {"up_blocks": blocks, "up_scales": scales}
    opened = checkpoints.open(published_models.say(tmp_path, tensors, {"quant_method": "mxfp4"}))
    theirs = convert_moe_packed_tensors(blocks, scales)
    sizes = []
    monkeypatch.setattr(mxfp4, "scaled", lambda codes, *rest, whole=mxfp4.scaled: sizes.append(codes.numel()) or whole(codes, *rest))
    assert opened.shape("up") == tuple(theirs.shape) and torch.equal(opened.load_slice("up", 1), theirs[1])
    assert sizes == [theirs[1].numel()]
    assert torch.equal(opened.load("up"), theirs)


def test_loading_an_expert_decodes_that_expert_alone(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """One of four experts: its gate and its up, which DeepSeek publishes as a tensor each and transformers merges."""
    ours = model.open(folders["deepseek"])
    weight = next(w for w in ours.weights if w.name.endswith("experts.gate_up_proj.2"))
    sizes = []
    monkeypatch.setattr(fp8, "scaled", lambda codes, *rest, whole=fp8.scaled: sizes.append(codes.numel()) or whole(codes, *rest))
    matrix = ours.load(weight)
    assert len(sizes) == 2 and sum(sizes) == matrix.numel()


def test_the_type_is_that_of_the_published_model(tmp_path: Path) -> None:
    cls, config = MIXTURES["qwen3_moe"]
    tensors = published_models.float_model(cls, config, tmp_path, torch.float16)
    folder = published_models.say(tmp_path, published_models.fp8(tensors), published_models.fp8_said())
    ours = opened_as_transformers_does(folder, FineGrainedFP8Config)
    assert {weight.dtype for weight in ours.weights} == {"fp16"}
