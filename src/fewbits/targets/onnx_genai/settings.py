"""genai_config.json and the tokenizer's files: what onnxruntime-genai needs beside the graph."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits.store.untrusted import read_json

if TYPE_CHECKING:
    from fewbits.targets.onnx_genai.families import Decoder

FILE = "genai_config.json"
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")
_SEARCH = {"do_sample": False, "temperature": 1.0, "top_k": 50, "top_p": 1.0, "repetition_penalty": 1.0}

# The cache is one buffer, allocated when a generation starts: a Llama 3.2 of 1B would take 8.6 GB for its 131,072 positions. A user who
# wants more sets `max_length`, up to the model's context.
_MAX_LENGTH = 4096


def write(folder: Path, assets: Path, decoder: Decoder, config: Any, tokenizer: Any) -> None:
    """`assets`: the folder that holds the source's tokenizer and generation_config.json."""
    if (assets / _TOKENIZER[0]).is_file():
        for name in _TOKENIZER:
            if (assets / name).is_file():
                shutil.copyfile(assets / name, folder / name)
    else:
        tokenizer.save_pretrained(folder)  # converts an older form of tokenizer to the one that genai reads
    generation = assets / "generation_config.json"
    said = read_json(generation, "the file is damaged; fetch it again") if generation.is_file() else {}
    (folder / FILE).write_text(json.dumps(content(decoder, config, tokenizer, said), indent=2) + "\n")


def content(decoder: Decoder, config: Any, tokenizer: Any, said: dict[str, Any]) -> dict[str, Any]:
    """`said`: generation_config.json, whose end tokens are more complete than those of config.json for chat models."""

    def token(role: str) -> Any:
        name = f"{role}_token_id"
        places = (said.get(name), getattr(config, name, None), getattr(tokenizer, name, None))
        return next((value for value in places if value is not None), None)

    ends = token("eos")
    first_end = ends[0] if isinstance(ends, list) else ends
    padding = token("pad")
    return {
        "model": {
            "type": decoder.family.model_type,
            "vocab_size": decoder.vocabulary,
            "context_length": decoder.context,
            "bos_token_id": _or_zero(token("bos")),
            "eos_token_id": _or_zero(ends),
            "pad_token_id": _or_zero(first_end if padding is None else padding),
            "decoder": {
                "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
                "filename": "model.onnx",
                "head_size": decoder.head_size,
                "hidden_size": decoder.hidden,
                "num_attention_heads": decoder.heads,
                "num_key_value_heads": decoder.kv_heads,
                "num_hidden_layers": decoder.layers,
                "inputs": {
                    "input_ids": "input_ids",
                    "attention_mask": "attention_mask",
                    "past_key_names": "past_key_values.%d.key",
                    "past_value_names": "past_key_values.%d.value",
                },
                "outputs": {"logits": "logits", "present_key_names": "present.%d.key", "present_value_names": "present.%d.value"},
            },
        },
        "search": {
            **{name: default if said.get(name) is None else said[name] for name, default in _SEARCH.items()},
            "max_length": min(decoder.context, _MAX_LENGTH),
            "past_present_share_buffer": True,  # else the whole cache is copied for every token
        },
    }


def _or_zero(token: Any) -> Any:
    return 0 if token is None else token
