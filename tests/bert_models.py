"""A tiny random BERT with a WordPiece tokenizer."""

from __future__ import annotations

import pydoc_data.topics
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from tokenizers import models, normalizers, pre_tokenizers, processors, trainers

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


TEXTS = [text for text in pydoc_data.topics.topics.values() if text.isascii()][:20]


def word_pieces(**casing: bool) -> Any:
    backend = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(**casing)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.train_from_iterator(TEXTS, trainers.WordPieceTrainer(vocab_size=380, special_tokens=SPECIAL, show_progress=False))
    backend.decoder = tokenizers.decoders.WordPiece()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    roles = {f"{name.strip('[]').lower()}_token": name for name in SPECIAL}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **roles)


def save_bert(folder: Path, positions: int = 128, **settings: Any) -> Path:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 400}
    torch.manual_seed(0)
    made = transformers.BertModel(transformers.BertConfig(**sizes, max_position_embeddings=positions, initializer_range=0.2, **settings))
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if parameter.ndim == 1:
                parameter.copy_(torch.randn_like(parameter) * 0.3 + name.endswith("LayerNorm.weight"))
    made.save_pretrained(folder)
    word_pieces().save_pretrained(folder)
    return folder
