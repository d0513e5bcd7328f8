"""State spaces, gated delta rules and convolutions, mostly beside attention."""

from __future__ import annotations

from dataclasses import replace

from zoo.sparse import EIGHT, FOUR, LATENT
from zoo.tiny import Tiny

LINEAR = ["linear_attention"] * 3 + ["full_attention"]
DELTA = {
    **{"linear_key_head_dim": 64, "linear_value_head_dim": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"num_hidden_layers": 4, "layer_types": LINEAR},
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 64, "mamba_d_state": 64, "mamba_n_groups": 1, "mamba_expand": 2}
STATE = {
    **{"mamba_num_heads": 8, "mamba_head_dim": 64, "ssm_state_size": 64, "n_groups": 2, "expand": 2, "chunk_size": 64},
    **{"time_step_min": 1e-6, "time_step_floor": 0.01},  # transformers takes no step below the minimum, llama.cpp does
}
CONVOLUTIONS = {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]}

MODELS = [replace(tiny, dtype="float16") for tiny in (
    Tiny("qwen3_next", "Qwen3NextForCausalLM", {
        **FOUR, **DELTA, "shared_expert_intermediate_size": 256,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.5},
    }, residual=0.35),
    Tiny("lfm2", "Lfm2ForCausalLM", {**CONVOLUTIONS, "block_auto_adjust_ff_dim": False}, logits=0.6),
    Tiny("lfm2_moe", "Lfm2MoeForCausalLM", {**EIGHT, **CONVOLUTIONS, "num_dense_layers": 1}, logits=0.6),
    Tiny("falcon_h1", "FalconH1ForCausalLM", {**MAMBA, "mamba_d_ssm": 512, "head_dim": 64}),
    Tiny("falcon_h1_scaled", "FalconH1ForCausalLM", {
        **MAMBA, "mamba_d_ssm": 512, "head_dim": 64, "embedding_multiplier": 5.656854249492381, "lm_head_multiplier": 0.0390625,
        "key_multiplier": 0.3952847075210474, "attention_out_multiplier": 0.9375, "ssm_in_multiplier": 1.25,
        "ssm_out_multiplier": 0.23570226039551587, "mlp_multipliers": [0.8838834764831844, 0.5859375],
        "ssm_multipliers": [0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738],
    }, logits=25.6, embedding=0.2, notes="the converter multiplies the factors into the weights"),
    Tiny("granitemoehybrid", "GraniteMoeHybridForCausalLM", {
        **MAMBA, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 256, "shared_intermediate_size": 256,
        "num_hidden_layers": 3, "layer_types": ["mamba", "attention", "mamba"], "position_embedding_type": None,
        "embedding_multiplier": 12.0, "logits_scaling": 4.0, "residual_multiplier": 0.5, "attention_multiplier": 0.125,
    }, logits=4.0, embedding=1 / 12, residual=0.35, extra={"layer_types": ["mamba", "attention", "mamba"]}),
    Tiny("nemotron_h", "NemotronHForCausalLM", {**STATE, "layers_block_type": ["mamba", "mlp", "attention", "mlp"]}, extra={
        "num_hidden_layers": 4, "hybrid_override_pattern": "M-*-", "layers_block_type": ..., "num_experts_per_tok": ...,
        "n_group": ..., "topk_group": ..., "n_routed_experts": ..., "n_shared_experts": ..., "moe_intermediate_size": ...,
        "moe_shared_expert_intermediate_size": ...,
    }),
    Tiny("nemotron_h_moe", "NemotronHForCausalLM", {
        **STATE, "layers_block_type": ["mamba", "moe", "attention", "moe"], "n_routed_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 256, "moe_shared_expert_intermediate_size": 256,
    }),
    Tiny("mamba2", "Mamba2ForCausalLM", {"num_heads": 8, "state_size": 64, "n_groups": 1, "chunk_size": 64}),
    Tiny("jamba", "JambaForCausalLM", {
        "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_offset": 0, "num_experts": 4, "mamba_dt_rank": 16,
        "use_mamba_kernels": False, "intermediate_size": 256,
    }, residual=0.25),
    Tiny("kimi_linear", "KimiLinearForCausalLM", {
        **LATENT, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "num_hidden_layers": 4,
        "layer_types": LINEAR, "linear_head_dim": 64, "linear_num_heads": 4,
    }, residual=0.35, renames={"layers.0.block_sparse_moe.": "layers.0.mlp."}, extra={
        "num_shared_experts": 1, "first_k_dense_replace": 1, "moe_router_activation_func": "sigmoid", "linear_attn_config": {
            "full_attn_layers": [4], "kda_layers": [1, 2, 3], "head_dim": 64, "num_heads": 4, "short_conv_kernel_size": 4,
        },
    }),
)]  # fmt: skip
