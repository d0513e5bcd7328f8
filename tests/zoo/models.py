"""Tiny random models of many architectures, made from transformers' configs alone and saved as Hugging Face folders."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers
from zoo import dense, encoders, hybrid, multimodal, sparse
from zoo.initial import initialise
from zoo.published import publish, rename
from zoo.tiny import Tiny
from zoo.vocabularies import save_tokenizer

MODELS: dict[str, Tiny] = {tiny.name: tiny for part in (dense, sparse, hybrid, multimodal, encoders) for tiny in part.MODELS}
NAMES = tuple(MODELS)


def build(name: str, folder: Path) -> Path:
    """Writes config.json, model.safetensors and a tokenizer; the same bytes every time."""
    tiny = MODELS[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = getattr(transformers, tiny.cls)(tiny.config())
        initialise(made, tiny)
    made.to(getattr(torch, tiny.dtype)).save_pretrained(folder)
    save_tokenizer(folder, name)
    if tiny.extra:
        file = folder / "config.json"
        keys = {**json.loads(file.read_text()), **tiny.extra}
        file.write_text(json.dumps({key: value for key, value in keys.items() if value is not ...}, indent=2))
    if tiny.renames:
        rename(folder, tiny.renames)
    if tiny.published:
        publish(folder, tiny.published)
    return folder
