"""Dense decoders: attention and one feed-forward part in every block."""

from __future__ import annotations

from zoo.tiny import Tiny

SLIDING = ["sliding_attention"] * 3 + ["full_attention"]
ROPE = {"rope_type": "default", "rope_theta": 10000.0}

MODELS = [
    Tiny("llama", "LlamaForCausalLM"),
    Tiny("mistral", "MistralForCausalLM", {"sliding_window": None}),
    Tiny("ministral3", "Ministral3ForCausalLM", {"rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 256, "beta_fast": 32.0,
        "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
    }}),
    Tiny("qwen2", "Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    Tiny("qwen3", "Qwen3ForCausalLM", {"intermediate_size": 768}),
    Tiny("smollm3", "SmolLM3ForCausalLM", {"num_hidden_layers": 4, "intermediate_size": 256}, logits=0.7),
    Tiny("arcee", "ArceeForCausalLM"),
    Tiny("apertus", "ApertusForCausalLM", {"max_position_embeddings": 16384}),
    Tiny("seed_oss", "SeedOssForCausalLM"),
    Tiny("granite", "GraniteForCausalLM", {
        "embedding_multiplier": 12.0, "logits_scaling": 4.0, "residual_multiplier": 0.5, "attention_multiplier": 0.125,
    }, logits=4.0, embedding=1 / 12),
    Tiny("olmo2", "Olmo2ForCausalLM"),
    Tiny("olmo3", "Olmo3ForCausalLM", {"num_hidden_layers": 4, "intermediate_size": 256, "sliding_window": 32}, logits=0.7),
    # llama.cpp has sliding windows in models of 64 layers alone
    Tiny("exaone4", "Exaone4ForCausalLM", {"sliding_window": None, "layer_types": ["full_attention"] * 2}, logits=0.7),
    Tiny("glm4", "Glm4ForCausalLM", {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}}),
    Tiny("ernie4_5", "Ernie4_5ForCausalLM"),
    Tiny("hunyuan", "HunYuanDenseV1ForCausalLM"),
    Tiny("cohere", "CohereForCausalLM", logits=16.0, final=16.0),
    Tiny("cohere2", "Cohere2ForCausalLM", {
        "num_hidden_layers": 4, "intermediate_size": 256, "sliding_window": 32,
    }, logits=12.0, final=16.0, extra={"rotary_pct": 1.0}),
    Tiny("starcoder2", "Starcoder2ForCausalLM"),
    Tiny("stablelm", "StableLmForCausalLM", {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.25}, "use_qkv_bias": True}),
    Tiny("nemotron", "NemotronForCausalLM", {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}}, logits=0.35),
    Tiny("phi", "PhiForCausalLM", {
        "num_key_value_heads": 4, "intermediate_size": 1024, "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5},
    }),
    Tiny("phi3", "Phi3ForCausalLM"),
    Tiny("gemma", "GemmaForCausalLM", logits=0.7, final=16.0),
    Tiny("gemma2", "Gemma2ForCausalLM", {
        "sliding_window": 32, "query_pre_attn_scalar": 64, "intermediate_size": 640,
    }, logits=0.7, final=8.0),
    Tiny("gpt2", "GPT2LMHeadModel", {"n_positions": 1024}, dtype="float32", residual=1.0, extra={"n_ctx": 1024}),
    Tiny("gpt_neox", "GPTNeoXForCausalLM", {
        "rope_parameters": {**ROPE, "partial_rotary_factor": 0.25},
    }, dtype="float16", extra={"rotary_pct": 0.25}),
    Tiny("bloom", "BloomForCausalLM", dtype="float16", residual=4.0),
    Tiny("opt", "OPTForCausalLM", {"ffn_dim": 512, "word_embed_proj_dim": 256, "pad_token_id": 1}, dtype="float16"),
    Tiny("falcon", "FalconForCausalLM", {"new_decoder_architecture": True, "num_kv_heads": 2}),
]  # fmt: skip
