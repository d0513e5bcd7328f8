"""Small random models quantized as they are published (FP8 with block scales, MXFP4 experts, compressed-tensors by its own library), and
what transformers makes of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from compressed_models import SMALL
from mixtures import MIXTURES, with_tokenizer
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM, LlamaConfig, LlamaForCausalLM

from fewbits import model

BLOCK = 32
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
FP8_MAX = torch.finfo(torch.float8_e4m3fn).max
DEEPSEEK: dict[str, Any] = {
    "vocab_size": 2048, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
    "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 16, "v_head_dim": 16, "max_position_embeddings": 128, "bos_token_id": 0, "eos_token_id": 1,
    "initializer_range": 0.1,
}  # fmt: skip


def float_model(cls: Any, config: Any, folder: Path, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """Saves it as it is published (a tensor for every expert's matrix); its tensors."""
    torch.manual_seed(0)
    made = cls(config).to(dtype)
    with torch.no_grad():
        for name, tensor in (*made.named_parameters(), *made.named_buffers()):
            if name.endswith("bias"):  # zero as made: a lost one would not show
                tensor.normal_(std=0.1)
    made.save_pretrained(folder, save_original_format=True)
    with_tokenizer(folder)
    return load_file(folder / "model.safetensors")


def say(folder: Path, tensors: dict[str, Tensor], quantization: dict[str, Any]) -> Path:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": quantization}, indent=2))
    return folder


def fp8_blocks(weight: Tensor, block: tuple[int, int], exponents: bool = False) -> tuple[Tensor, Tensor]:
    """(codes, scales): the largest value of a block is 448, or less if scales are powers of two. The last block may be cut off."""
    rows, cols = weight.shape
    grid = torch.zeros(-(-rows // block[0]), -(-cols // block[1]))
    codes = torch.empty(rows, cols, dtype=torch.float8_e4m3fn)
    for i in range(grid.shape[0]):
        for j in range(grid.shape[1]):
            place = slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
            grid[i, j] = weight[place].float().abs().max() / FP8_MAX
            if exponents:
                grid[i, j] = 2.0 ** torch.ceil(torch.log2(grid[i, j]))
            codes[place] = (weight[place].float() / grid[i, j]).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return codes, grid.to(torch.float8_e8m0fnu) if exponents else grid


def fp8(tensors: dict[str, Tensor], block: tuple[int, int] = (BLOCK, BLOCK), exponents: bool = False) -> dict[str, Tensor]:
    made: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith("proj.weight") or "_proj_with_mqa" in name or "_a_proj" in name:
            made[name], made[f"{name}_scale_inv"] = fp8_blocks(tensor, block, exponents)
        else:
            made[name] = tensor
    return made


def fp8_said(block: tuple[int, int] = (BLOCK, BLOCK), **more: object) -> dict[str, Any]:
    return {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(block), **more}


def deepseek_fp8(folder: Path) -> Path:
    """As DeepSeek V3: one tensor per expert, scales in float32."""
    tensors = float_model(DeepseekV3ForCausalLM, DeepseekV3Config(**DEEPSEEK), folder)
    return say(folder, fp8(tensors), fp8_said())


def qwen_fp8_exponents(folder: Path) -> Path:
    """Scales that are exponents, as since DeepSeek V3.1, one of them under the name that DeepSeek V4 gives it."""
    cls, config = MIXTURES["qwen3_moe"]
    tensors = fp8(float_model(cls, config, folder), exponents=True)
    layer = "model.layers.1.self_attn.q_proj"
    tensors[f"{layer}.scale"] = tensors.pop(f"{layer}.weight_scale_inv")
    return say(folder, tensors, fp8_said(scale_fmt="ue8m0"))


def llama_fp8_tensor(folder: Path) -> Path:
    """One scale for a weight, and one for its inputs, as Mistral publishes; one weight has a scale for each row."""
    tensors = float_model(LlamaForCausalLM, llama_config(), folder)
    made: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if not name.endswith("proj.weight"):
            made[name] = tensor
            continue
        block = (1, tensor.shape[1]) if "layers.1.mlp.up" in name else tuple(tensor.shape)
        made[name], scales = fp8_blocks(tensor, block)
        made[f"{name}_scale_inv"] = scales if "layers.1.mlp.up" in name else scales.reshape(())
        made[name.replace(".weight", ".activation_scale")] = torch.tensor(0.5, dtype=torch.bfloat16)
    said = fp8_said() | {"weight_block_size": None, "activation_scheme": "static"}
    return say(folder, made, said)


def mxfp4_blocks(experts: Tensor) -> tuple[Tensor, Tensor]:
    """(experts, cols, rows) -> blocks (experts, rows, cols / 32, 16) and scales (experts, rows, cols / 32)."""
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    x = experts.float().transpose(1, 2).unflatten(2, (-1, 32))
    exponents = torch.floor(torch.log2(x.abs().amax(-1).clamp(min=2.0**-100))) - 2
    nearest = ((x / 2.0 ** exponents[..., None]).abs()[..., None] - values).abs().argmin(-1)
    codes = (nearest + 8 * (x < 0)).to(torch.uint8)
    return codes[..., 0::2] | codes[..., 1::2] << 4, (exponents + 127).to(torch.uint8)


def gpt_oss_mxfp4(folder: Path) -> Path:
    cls, config = MIXTURES["gpt_oss"]
    tensors = float_model(cls, config, folder)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = mxfp4_blocks(tensors.pop(name))
    return say(folder, tensors, {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]})


def llama_config(**more: Any) -> Any:
    """40 columns fill no whole words of 3, 5 and 6 bits; 24 rows of keys fill no whole words of 4-bit zero points."""
    sizes = {"hidden_size": 40, "intermediate_size": 96, "head_dim": 12, "num_hidden_layers": 2, "tie_word_embeddings": False}
    return LlamaConfig(**(SMALL | sizes | {"vocab_size": 2048, "eos_token_id": 1} | more))


def qparams(weight: Tensor, args: Any) -> dict[str, Tensor]:
    """Scales, zero points and the factor for the whole weight, by the library's own formulas."""
    from compressed_tensors.quantization import QuantizationStrategy
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    x, strategy = weight.float(), args.strategy
    if strategy == QuantizationStrategy.BLOCK:
        tall, wide = args.block_structure
        x = torch.nn.functional.pad(x, (0, -x.shape[1] % wide, 0, -x.shape[0] % tall))
        x = x.unflatten(0, (-1, tall)).unflatten(2, (-1, wide)).permute(0, 2, 1, 3).flatten(2)
    elif strategy in (QuantizationStrategy.GROUP, QuantizationStrategy.TENSOR_GROUP):
        x = x.unflatten(1, (-1, args.group_size))
    elif strategy == QuantizationStrategy.CHANNEL:
        x = x[:, None]
    else:
        x = x.reshape(1, -1)
    low, high, found = x.amin(-1), x.amax(-1), {}
    if strategy == QuantizationStrategy.TENSOR_GROUP:
        found["weight_global_scale"] = generate_gparam(low.amin(), high.amax()).reshape(1)
    scale, zero = calculate_qparams(low, high, args, global_scale=found.get("weight_global_scale"))
    return found | {"weight_scale": scale, "weight_zero_point": zero}


def compressed_by_library(
    folder: Path, tensors: dict[str, Tensor], schemes: dict[str, Any], wanted: Callable[[str], bool], scale_dtype: torch.dtype
) -> Path:
    """`schemes`: group -> QuantizationScheme. Each layer that is wanted is compressed by the group that the library chooses for it."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.format import infer_module_format
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.utils.match import match_targets

    of_target = {target: scheme for scheme in schemes.values() for target in scheme.targets}
    made: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        layer = name.removesuffix(".weight")
        if layer == name or not wanted(layer):
            made[name] = tensor
            continue
        scheme = of_target[match_targets(layer, torch.nn.Linear(1, 1), of_target)[0]]
        scheme.format = scheme.format or infer_module_format(torch.nn.Linear, scheme)
        state = {"weight": tensor.float()} | qparams(tensor, scheme.weights)
        if scheme.weights.num_bits == 8 or scheme.weights.type == "int":
            state["weight_scale"] = state["weight_scale"].to(scale_dtype)
            state["weight"] = tensor.to(scale_dtype)
        packed = BaseCompressor.get_value_from_registry(scheme.format.value).compress(state, scheme)
        made |= {f"{layer}.{part}": value for part, value in packed.items()}
    layouts = {s.format.value for s in schemes.values()}
    config = QuantizationConfig(
        config_groups=schemes,
        format=layouts.pop() if len(layouts) == 1 else "mixed-precision",
        quantization_status="compressed",
        ignore=["lm_head"],
    )
    return say(folder, made, json.loads(config.model_dump_json()))


def opened_as_transformers_does(folder: Path, how: Any) -> model.Model:
    """The folder opened, once every value of it was found equal to what transformers decodes, and every weight of the same type."""
    module, info = AutoModelForCausalLM.from_pretrained(folder, quantization_config=how(dequantize=True), output_loading_info=True)
    assert not info["missing_keys"] and not info["mismatched_keys"] and not info["unexpected_keys"]
    theirs, ours = module.state_dict(), model.open(folder)
    for weight in ours.weights:
        assert torch.equal(weight.view(theirs[weight.parameter]).float(), ours.load(weight)), weight.name
        assert DTYPES[weight.dtype] == theirs[weight.parameter].dtype, weight.name
    for name in ours.rest:
        assert torch.equal(theirs[name].float(), ours.tensor(name).float()), name
    return ours
