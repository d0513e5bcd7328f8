"""Folders of compressed-tensors, packed by its own library or by fewbits: what is opened equals what transformers decodes, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import compressed_models
import published_models
import pytest
import torch
from mixtures import MIXTURES
from published_models import opened_as_transformers_does
from safetensors.torch import load_file, save_file
from transformers import CompressedTensorsConfig, LlamaForCausalLM

from fewbits import model
from fewbits.errors import InputError
from fewbits.model import checkpoints

compressed_tensors = pytest.importorskip("compressed_tensors")

INPUTS = {"type": "int", "num_bits": 8, "strategy": "token", "dynamic": True}
FLOAT_INPUTS = INPUTS | {"type": "float"}
INT4 = {"num_bits": 4, "strategy": "group", "group_size": 8}
FLOAT8 = {"num_bits": 8, "type": "float", "strategy": "channel"}
SCHEMES: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {  # weights, inputs
    "int4 in groups": (INT4, None),
    "int4 in groups with zero points": (INT4 | {"symmetric": False}, None),
    "int8 packed": ({"num_bits": 8, "strategy": "channel"}, None),
    "int3 with zero points": ({"num_bits": 3, "strategy": "channel", "symmetric": False}, None),
    "int6 of whole tensors": ({"num_bits": 6, "strategy": "tensor"}, None),
    "int4 of whole tensors with zero points": ({"num_bits": 4, "strategy": "tensor", "symmetric": False}, None),
    "int8 beside int8": ({"num_bits": 8, "strategy": "channel"}, INPUTS),
    "int8 with zero points beside int8": ({"num_bits": 8, "strategy": "channel", "symmetric": False}, INPUTS),
    "float8": (FLOAT8, FLOAT_INPUTS),
    "float8 of whole tensors": (FLOAT8 | {"strategy": "tensor"}, FLOAT_INPUTS),
    "float8 in blocks": (FLOAT8 | {"strategy": "block", "block_structure": [16, 8]}, FLOAT_INPUTS),
    "nvfp4": ({"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"}, None),
    "mxfp4": ({"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}, None),
    "mxfp8": ({"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}, None),
}
MERGED_BY_TRANSFORMERS = ("int4 in groups", "int8 packed", "int6 of whole tensors", "float8", "float8 of whole tensors", "mxfp4")
LAYER = "model.layers.1.mlp.up_proj"


def scheme(weights: dict[str, Any], inputs: dict[str, Any] | None = None, targets: tuple[str, ...] = ("Linear",)) -> Any:
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    return QuantizationScheme(
        targets=list(targets), weights=QuantizationArgs(**weights), input_activations=QuantizationArgs(**inputs) if inputs else None
    )


def is_projection(layer: str) -> bool:
    return layer.endswith("_proj")


def llama(folder: Path, name: str, scales: torch.dtype = torch.bfloat16) -> Path:
    wide = {"hidden_size": 64, "head_dim": 16} if name in ("nvfp4", "mxfp4", "mxfp8") else {}
    tensors = published_models.float_model(LlamaForCausalLM, published_models.llama_config(**wide), folder)
    return published_models.compressed_by_library(folder, tensors, {"group_0": scheme(*SCHEMES[name])}, is_projection, scales)


def mixture(folder: Path, schemes: dict[str, Any], scales: torch.dtype) -> Path:
    cls, config = MIXTURES["qwen3_moe"]
    return published_models.compressed_by_library(folder, published_models.float_model(cls, config, folder), schemes, is_projection, scales)


@pytest.mark.parametrize("scales", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("name", SCHEMES)
def test_every_layer_is_what_transformers_decodes(name: str, scales: torch.dtype, tmp_path: Path) -> None:
    ours = opened_as_transformers_does(llama(tmp_path, name, scales), CompressedTensorsConfig)
    assert ours.checkpoint.source_quantization.startswith("compressed-tensors: ")
    assert not hasattr(ours.config, "quantization_config")


@pytest.mark.parametrize("scales", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("name", MERGED_BY_TRANSFORMERS)
def test_experts_are_what_transformers_merges(name: str, scales: torch.dtype, tmp_path: Path) -> None:
    """It decodes them in another type than layers, wherever scales are not stored in the type of the model."""
    opened_as_transformers_does(mixture(tmp_path, {"group_0": scheme(*SCHEMES[name])}, scales), CompressedTensorsConfig)


@pytest.mark.parametrize("name", [name for name in SCHEMES if name not in MERGED_BY_TRANSFORMERS])
def test_experts_that_transformers_cannot_merge_are_what_the_library_decodes(name: str, tmp_path: Path) -> None:
    """transformers 5.22 fails on these, or leaves zero points and global scales out without a word."""
    from compressed_tensors.compressors import BaseCompressor

    how = scheme(*SCHEMES[name])
    folder = mixture(tmp_path, {"group_0": how}, torch.bfloat16)
    ours, stored = model.open(folder), load_file(folder / "model.safetensors")
    expert = "model.layers.1.mlp.experts.2.down_proj"
    parts = {part.removeprefix(f"{expert}."): tensor for part, tensor in stored.items() if part.startswith(f"{expert}.")}
    theirs = BaseCompressor.get_value_from_registry(how.format.value).decompress(parts, how)["weight"]
    weight = next(w for w in ours.weights if w.name == "model.layers.1.mlp.experts.down_proj.2")
    assert torch.equal(ours.load(weight), theirs.float())


def test_the_group_that_names_a_layer_most_closely_is_its_own(tmp_path: Path) -> None:
    schemes = {
        "group_0": scheme({"num_bits": 8, "strategy": "channel"}),
        "group_1": scheme(FLOAT8, FLOAT_INPUTS, ("re:.*self_attn.*", "re:.*up_proj")),
        "group_2": scheme(INT4, targets=(LAYER,)),
    }
    tensors = published_models.float_model(LlamaForCausalLM, published_models.llama_config(), tmp_path)
    folder = published_models.compressed_by_library(tmp_path, tensors, schemes, is_projection, torch.bfloat16)
    opened = opened_as_transformers_does(folder, CompressedTensorsConfig).checkpoint
    said = {name: opened.storage(f"model.layers.1.{name}.weight")[0] for name in ("self_attn.q_proj", "mlp.up_proj", "mlp.down_proj")}  # type: ignore[attr-defined]
    assert list(said.values()) == ["fp8 e4m3, a scale per row", "int4, 8 columns per scale", "int8, a scale per row"]


@pytest.mark.parametrize("fmt", ["q4_0", "int4_g32_asym", "int8_channel", "fp8_e4m3_channel", "mxfp4", "nvfp4"])
def test_what_fewbits_wrote_is_read_again(fmt: str, tmp_path: Path) -> None:
    config = published_models.llama_config(hidden_size=64, head_dim=16)
    published_models.float_model(LlamaForCausalLM, config, tmp_path / "float")
    source = model.open(tmp_path / "float")
    written = compressed_models.write(source, compressed_models.uniform(source, fmt), tmp_path)
    ours = opened_as_transformers_does(written.path, CompressedTensorsConfig)
    assert written.quantized and ours.checkpoint.source_quantization


def test_all_verbs_take_a_compressed_folder(tmp_path: Path, run: Callable[..., tuple[int, str, str]]) -> None:
    folder = mixture(tmp_path / "published", {"group_0": scheme(*SCHEMES["int4 in groups"])}, torch.bfloat16)
    assert run("inspect", folder)[0] == 0
    assert run("calibrate", folder, "-o", tmp_path / "stats", "--samples", 2, "--length", 32, "--offline")[0] == 0
    out = tmp_path / "x"
    assert run("quantize", folder, "-o", out, "--to", "fewbits", "--format", "q8_0", "--method", "rtn", "--no-verify", "--offline")[0] == 0
    assert json.loads(next(out.rglob("config.json")).read_text())["quantization_config"]["quant_method"] == "fewbits"


def damaged(folder: Path, change: Any) -> str:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(InputError) as refused:
        opened = checkpoints.open(folder)
        opened.load(f"{LAYER}.weight")
    return str(refused.value)


def put(tensors: dict[str, torch.Tensor], name: str, tensor: torch.Tensor) -> None:
    tensors[name] = tensor


DAMAGE: dict[str, tuple[Any, str]] = {
    "no scales": (lambda t: t.pop(f"{LAYER}.weight_scale"), "weight_scale"),
    "no weight": (lambda t: t.pop(f"{LAYER}.weight_packed"), f"the weight of `{LAYER}` is not"),
    "no zero points": (lambda t: t.pop(f"{LAYER}.weight_zero_point"), f"`{LAYER}.weight_zero_point` is not"),
    "short scales": (lambda t: put(t, f"{LAYER}.weight_scale", torch.ones(96, 4)), f"`{LAYER}.weight_"),
    "long scales": (lambda t: put(t, f"{LAYER}.weight_scale", torch.ones(97, 5)), f"`{LAYER}.weight_scale` is F32 (97, 5)"),
    "another shape": (lambda t: put(t, f"{LAYER}.weight_shape", torch.tensor([96, 39])), f"`{LAYER}.weight_shape` says 96 x 39"),
    "no numbers": (lambda t: t[f"{LAYER}.weight_scale"][3].fill_(float("nan")), f"`{LAYER}.weight_scale` holds a scale of nan"),
    "infinite": (lambda t: t[f"{LAYER}.weight_scale"][3].fill_(float("inf")), f"`{LAYER}.weight_scale` holds a scale of inf"),
    "zeros": (lambda t: t[f"{LAYER}.weight_scale"][3].fill_(0), f"`{LAYER}.weight_scale` holds a scale of 0 at (3, 0)"),
    "twice": (lambda t: put(t, f"{LAYER}.weight", torch.zeros(96, 40)), f"`{LAYER}.weight` is there twice"),
    "other integers": (lambda t: put(t, f"{LAYER}.weight_packed", torch.zeros(96, 5, dtype=torch.int64)), "is stored as I64"),
    "columns in another order": (
        lambda t: put(t, f"{LAYER}.weight_g_idx", torch.arange(40).flip(0).int() // 8), "do not lie side by side"
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_layers_are_named(kind: str, tmp_path: Path) -> None:
    change, said = DAMAGE[kind]
    assert said in damaged(llama(tmp_path, "int4 in groups with zero points"), change)


def test_groups_of_columns_in_order_are_no_damage(tmp_path: Path) -> None:
    folder = llama(tmp_path, "int4 in groups")
    before = checkpoints.open(folder).load(f"{LAYER}.weight")
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {f"{LAYER}.weight_g_idx": torch.arange(40).int() // 8}, folder / "model.safetensors")
    assert torch.equal(checkpoints.open(folder).load(f"{LAYER}.weight"), before)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format": "marlin-24", "config_groups": {"a": {"targets": ["Linear"], "weights": INT4}}}, "`marlin-24`"),
        ({"config_groups": 3}, "does not say how"),
        ({"config_groups": {"a": {"targets": ["Linear"], "weights": INT4 | {"num_bits": "x"}}}}, "does not say how"),
        ({"config_groups": {"a": {"targets": ["Linear"], "weights": INT4 | {"group_size": 0}}}}, "does not say how"),
        ({"config_groups": {"a": {"targets": ["re:("], "weights": INT4}}}, "`re:(`"),
        ({"transform_config": {"config_groups": {"a": {}}}}, "`transform_config`"),
    ],
)
def test_what_config_says_of_groups_is_checked(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    folder = llama(tmp_path, "int4 in groups")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= change
    if "config_groups" not in change:
        config["quantization_config"] |= {"config_groups": {"a": {"targets": ["Linear"], "weights": INT4}}}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError) as refused:
        checkpoints.open(folder)
    assert said in str(refused.value) and refused.value.hint
