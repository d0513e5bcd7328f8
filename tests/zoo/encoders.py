"""Encoders: embeddings of texts, no logits."""

from __future__ import annotations

from zoo.tiny import Tiny

MODELS = [
    Tiny("bert", "BertModel", {"vocab_size": 1008, "pad_token_id": 0}, kind="encoder", dtype="float32"),
    Tiny("roberta", "RobertaModel", {"pad_token_id": 1}, kind="encoder", dtype="float32"),
    Tiny("modernbert", "ModernBertModel", {
        "cls_token_id": 0, "pad_token_id": 1, "sep_token_id": 2, "num_hidden_layers": 4,
        "intermediate_size": 256, "local_attention": 32,
    }, kind="encoder", residual=0.3, extra={"layer_norm_eps": 1e-5, "global_attn_every_n_layers": 3}),
]  # fmt: skip
