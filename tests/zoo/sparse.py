"""Mixtures of experts over attention."""

from __future__ import annotations

from dataclasses import replace

from zoo.dense import ROPE
from zoo.tiny import Tiny

EIGHT = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
FOUR = {**EIGHT, "num_experts": 4}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 256}
ROUTED = {
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "n_shared_experts": 1, "first_k_dense_replace": 1},
}
LATENT = {  # attention over compressed keys and values
    **{"kv_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64, "num_key_value_heads": 4},
    "head_dim": 32,
}
V3 = {
    **ROUTED,
    **LATENT,
    "n_routed_experts": 8,
    "q_lora_rank": 256,
    "n_group": 2,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}
SIGMOID = {"scoring_func": "sigmoid"}  # published; transformers has it in code
QUIET = {"experts.down_proj": 0.5}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 256}
OSS = {
    **{**LOCAL, "sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"]},
    "rope_parameters": {**YARN, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": True},
}

MODELS = [replace(tiny, dtype="float16") for tiny in (
    Tiny("mixtral", "MixtralForCausalLM", LOCAL),
    Tiny("qwen3_moe", "Qwen3MoeForCausalLM", {**FOUR, "norm_topk_prob": True, "moe_intermediate_size": 320}),
    Tiny("olmoe", "OlmoeForCausalLM", {"num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 256, "num_key_value_heads": 4}),
    Tiny("phimoe", "PhimoeForCausalLM", {**LOCAL, "attention_bias": True, "lm_head_bias": True}, residual=0.3, extra={
        "architectures": ["PhiMoEForCausalLM"], "original_max_position_embeddings": 1024,
    }),
    Tiny("gpt_oss", "GptOssForCausalLM", OSS, residual=0.3, factors=QUIET),
    Tiny("gpt_oss_published", "GptOssForCausalLM", OSS, published="mxfp4", residual=0.3, factors=QUIET),
    Tiny("deepseek_v2", "DeepseekV2ForCausalLM", {**ROUTED, **LATENT, "q_lora_rank": 256}, extra={"scoring_func": "softmax"}),
    Tiny("deepseek_v3", "DeepseekV3ForCausalLM", V3, extra=SIGMOID, residual=0.35, factors=QUIET),
    # transformers takes the number of rows over that of scales for the height of a block: right where 128 divides the rows alone
    Tiny("deepseek_v3_fp8", "DeepseekV3ForCausalLM", {
        **V3, "qk_rope_head_dim": 128, "head_dim": 128,
    }, published="fp8", extra=SIGMOID, residual=0.35, factors=QUIET),
    Tiny("glm4_moe", "Glm4MoeForCausalLM", {**ROUTED, "use_qk_norm": True, "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}}),
    Tiny("glm4_moe_lite", "Glm4MoeLiteForCausalLM", {**ROUTED, **LATENT, "q_lora_rank": 256}, extra=SIGMOID),
    Tiny("ernie4_5_moe", "Ernie4_5_MoeForCausalLM", {
        "moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 256, "moe_num_shared_experts": 1,
    }, logits=0.7),
    Tiny("hunyuan_moe", "HunYuanMoEV1ForCausalLM", {"num_experts": 4, "moe_topk": [2, 2], "intermediate_size": 256}, extra={
        "moe_intermediate_size": [256, 256], "num_shared_expert": [1, 1],
    }),
    Tiny("minimax_m2", "MiniMaxM2ForCausalLM", {**LOCAL, "rotary_dim": 32}, extra=SIGMOID),
    Tiny("dots1", "Dots1ForCausalLM", {**ROUTED, "num_key_value_heads": 4, "norm_topk_prob": True}, extra=SIGMOID),
    Tiny("exaone_moe", "ExaoneMoeForCausalLM", {
        **FOUR, "num_hidden_layers": 4, "sliding_window": 32, "num_shared_experts": 1,
    }, logits=0.7, residual=0.35, factors=QUIET, extra=SIGMOID),
    Tiny("afmoe", "AfmoeForCausalLM", {
        **FOUR, "num_hidden_layers": 4, "sliding_window": 32, "num_shared_experts": 1, "mup_enabled": True,
    }, logits=0.7, embedding=1 / 16, extra={"route_norm": True}),
    Tiny("deepseek_v4", "DeepseekV4ForCausalLM", {
        "moe_intermediate_size": 256, "num_hidden_layers": 3, "num_key_value_heads": 1, "q_lora_rank": 256, "num_experts_per_tok": 2,
        "layer_types": ["sliding_attention", "heavily_compressed_attention", "compressed_sparse_attention"],
        "mlp_layer_types": ["hash_moe", "moe", "moe"], "n_routed_experts": 4,
        "o_groups": 2, "o_lora_rank": 256, "index_n_heads": 4, "index_head_dim": 64, "index_topk": 64,
        "sliding_window": 32, "partial_rotary_factor": 0.5,
    }),
)]  # fmt: skip
