"""Small tokenizers, made of the embedded model's and of its texts without any learning, which would not give the same vocabulary twice."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import tokenizers
import transformers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors
from zoo.tiny import SIZES

from fewbits import embedded

WORDS = 1000


def save_tokenizer(folder: Path, kind: str) -> None:
    if kind in ENCODERS:
        ENCODERS[kind]().save_pretrained(folder)
        return
    shutil.copyfile(embedded.MODEL / "tokenizer_config.json", folder / "tokenizer_config.json")
    written = _embedded()
    # Gemma's converter takes added tokens for tokens beyond the vocabulary: there are as many as make it right
    like, first = written["added_tokens"][-1], len(written["model"]["vocab"])
    count = SIZES["vocab_size"] - first - len(written["added_tokens"])
    written["added_tokens"] += [{**like, "id": first + i, "content": f"<|extra_{i}|>"} for i in range(count)]
    (folder / "tokenizer.json").write_text(json.dumps(written))


def _embedded() -> dict[str, Any]:
    return json.loads((embedded.MODEL / "tokenizer.json").read_text())


def word_pieces(*special: str) -> Any:
    """The commonest words of a text and single letters."""
    words = Counter(re.findall(r"[a-z]+", embedded.verification_text().lower()))
    letters = sorted({chr(code) for code in range(33, 127)})
    common = sorted((word for word in words if len(word) > 1), key=lambda word: (-words[word], word))
    tokens = [*special, *letters, *(f"##{letter}" for letter in letters), *common][:WORDS]
    backend = tokenizers.Tokenizer(models.WordPiece({token: i for i, token in enumerate(tokens)}, unk_token=special[1]))
    backend.normalizer, backend.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return _with_roles(backend, *(special[i] for i in (2, 0, 3, 1, 4)))


def byte_level(*special: str) -> Any:
    """The embedded model's pairs under other special tokens, which come first."""
    learned = _embedded()
    own = {token["content"] for token in learned["added_tokens"]}
    tokens = [*special, *(token for token in sorted(learned["model"]["vocab"], key=learned["model"]["vocab"].get) if token not in own)]
    merges = [tuple(pair) if isinstance(pair, list) else tuple(pair.split(" ")) for pair in learned["model"]["merges"]]
    backend = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return _with_roles(backend, *special)


def _with_roles(backend: tokenizers.Tokenizer, first: str, pad: str, last: str, unknown: str, mask: str) -> Any:
    ends = [(token, backend.token_to_id(token)) for token in (first, last)]
    backend.post_processor = processors.TemplateProcessing(
        single=f"{first} $A {last}", pair=f"{first} $A {last} $B {last}", special_tokens=ends
    )
    roles = {"cls_token": first, "sep_token": last, "pad_token": pad, "unk_token": unknown, "mask_token": mask}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **roles)


ENCODERS: dict[str, Any] = {
    "bert": lambda: word_pieces("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"),
    "roberta": lambda: byte_level("<s>", "<pad>", "</s>", "<unk>", "<mask>"),
    "modernbert": lambda: byte_level("[CLS]", "[PAD]", "[SEP]", "[UNK]", "[MASK]"),
}
