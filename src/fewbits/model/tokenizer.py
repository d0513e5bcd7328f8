"""The tokenizer of a model folder or a GGUF file, as a transformers tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fewbits.errors import InputError
from fewbits.model import limits
from fewbits.store import untrusted
from fewbits.store.untrusted import inside, read_json


def load_tokenizer(folder: Path) -> Any:
    if folder.suffix.lower() == ".gguf":
        from fewbits.model.gguf.checkpoint import GgufFile

        return GgufFile(folder).tokenizer
    from transformers import AutoTokenizer

    if (vocabulary := folder / "tokenizer.json").is_file():
        limits.check_vocabulary(
            read_json(inside(folder, vocabulary), "copy it from where the model came from", untrusted.TOKENIZER), vocabulary
        )
    try:
        return _without_cache(AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False))
    except BaseException as failure:  # a panic in Rust is no Exception
        if isinstance(failure, KeyboardInterrupt | SystemExit):
            raise
        hint = "copy tokenizer.json and tokenizer_config.json from where the model came from"
        raise InputError(f"`{folder}` has no tokenizer that can be read", hint) from failure


def _without_cache(tokenizer: Any) -> Any:
    """tokenizers 0.23 never frees the cache of a tokenizer that has encoded text, 2 MB each: a process that opens many would grow."""
    vocabulary: Any = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    if vocabulary is not None and hasattr(vocabulary, "_resize_cache"):
        vocabulary._resize_cache(0)
    return tokenizer
