"""Models that see images: a language part beside a tiny vision tower. Gemma 3n's tower needs timm: it is here without."""

from __future__ import annotations

from typing import Any

from zoo.hybrid import DELTA
from zoo.sparse import FOUR
from zoo.tiny import VOCABULARY, Tiny

SEEING: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 56}
QWEN_EYES = {"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "out_hidden_size": 256, "num_position_embeddings": 64}
QWEN_IDS = {
    **{"image_token_id": VOCABULARY, "video_token_id": VOCABULARY + 1},
    **{"vision_start_token_id": VOCABULARY + 2, "vision_end_token_id": VOCABULARY + 3},
}
MROPE = {"rope_type": "default", "rope_theta": 1e7, "mrope_interleaved": True}
HALF = {**MROPE, "partial_rotary_factor": 0.5, "mrope_section": [6, 5, 5]}
GEMMA_IDS = {"boi_token_id": VOCABULARY + 1, "eoi_token_id": VOCABULARY + 2, "image_token_id": VOCABULARY}
GEMMA4_IDS = {
    **GEMMA_IDS, "video_token_id": VOCABULARY + 3, "audio_token_id": VOCABULARY + 4, "boa_token_id": VOCABULARY + 5,
    "eoa_token_index": VOCABULARY + 6,
}  # fmt: skip
GEMMA4 = {
    **{"model_type": "gemma4_text", "num_hidden_layers": 3, "layer_types": ["sliding_attention"] * 2 + ["full_attention"]},
    **{"sliding_window": 32, "global_head_dim": 128, "final_logit_softcapping": 30.0, "hidden_size_per_layer_input": 0, "pad_token_id": 0},
    "vocab_size_per_layer_input": VOCABULARY + 16,
}
GEMMA4_EYES = {
    **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2},
    **{"head_dim": 32, "position_embedding_size": 64},
}
# attention does not divide by the width of a head; norms would make experts loud however small their matrices are
QUIET = {"q_norm.weight": 0.125, "post_feedforward_layernorm_2.weight": 0.25}


def gemma4(name: str, **settings: Any) -> Tiny:
    parts = {"text_config": {**GEMMA4, **settings}, "vision_config": GEMMA4_EYES, "audio_config": None}
    return Tiny(name, "Gemma4ForConditionalGeneration", {**parts, **GEMMA4_IDS}, logits=0.6, final=8.0, factors=QUIET, dtype="float16")


MODELS = [
    Tiny("qwen3_vl", "Qwen3VLForConditionalGeneration", {
        "text_config": {"model_type": "qwen3_vl_text", "rope_parameters": {**MROPE, "mrope_section": [12, 10, 10]}},
        "vision_config": {**QWEN_EYES, "deepstack_visual_indexes": [0, 1]}, **QWEN_IDS,
    }),
    Tiny("qwen3_5", "Qwen3_5ForConditionalGeneration", {
        "text_config": {"model_type": "qwen3_5_text", **DELTA, "rope_parameters": HALF}, "vision_config": QWEN_EYES, **QWEN_IDS,
    }),
    Tiny("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", {
        "text_config": {
            "model_type": "qwen3_5_moe_text", **DELTA, **FOUR, "shared_expert_intermediate_size": 256, "rope_parameters": HALF,
        },
        "vision_config": QWEN_EYES, **QWEN_IDS,
    }, dtype="float16"),
    Tiny("gemma3", "Gemma3ForConditionalGeneration", {
        "text_config": {
            "model_type": "gemma3_text", "num_hidden_layers": 6, "intermediate_size": 256, "sliding_window": 32,
            "query_pre_attn_scalar": 64, "pad_token_id": 0,
        },
        "vision_config": {**SEEING, "patch_size": 14}, "mm_tokens_per_image": 4,
        "boi_token_index": VOCABULARY + 1, "eoi_token_index": VOCABULARY + 2, "image_token_index": VOCABULARY,
    }, logits=0.6, final=8.0),
    Tiny("gemma3n", "Gemma3nForCausalLM", {
        "num_hidden_layers": 5, "layer_types": ["sliding_attention"] * 4 + ["full_attention"], "num_kv_shared_layers": 0,
        "sliding_window": 32, "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": VOCABULARY + 16, "laurel_rank": 64,
        "intermediate_size": 256, "activation_sparsity_pattern": [0.95] * 5, "pad_token_id": 0,
    }, logits=0.6, final=8.0, factors=QUIET, dtype="float16"),
    gemma4("gemma4"),
    gemma4("gemma4_moe", enable_moe_block=True, num_experts=4, top_k_experts=2, moe_intermediate_size=256, intermediate_size=256),
    gemma4(
        "gemma4_shared", num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2, num_kv_shared_layers=2,
        hidden_size_per_layer_input=256, intermediate_size=256,
    ),
    Tiny("mistral3", "Mistral3ForConditionalGeneration", {
        "text_config": {"model_type": "mistral", "sliding_window": None},
        "vision_config": {"model_type": "pixtral", **SEEING, "head_dim": 32, "patch_size": 14}, "image_token_index": VOCABULARY,
        "tie_word_embeddings": False,
    }),
    Tiny("llava", "LlavaForConditionalGeneration", {
        "text_config": {"model_type": "llama"},
        "vision_config": {"model_type": "clip_vision_model", **SEEING, "patch_size": 14, "projection_dim": 64},
        "image_token_index": VOCABULARY, "image_seq_length": 16,
    }),
    Tiny("llama4", "Llama4ForConditionalGeneration", {
        "text_config": {
            "model_type": "llama4_text", "num_hidden_layers": 4, "intermediate_size": 256, "intermediate_size_mlp": 512,
            "num_local_experts": 4, "interleave_moe_layer_step": 2,
        },
        "vision_config": {
            **SEEING, "patch_size": 14, "vision_output_dim": 64, "projector_input_dim": 64, "projector_output_dim": 64,
        },
        "boi_token_index": VOCABULARY + 1, "eoi_token_index": VOCABULARY + 2, "image_token_index": VOCABULARY,
    }, dtype="float16"),
]  # fmt: skip
