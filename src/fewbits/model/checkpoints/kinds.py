"""Folders that are taken for a model and are something else: said for what they are, with what to do."""

from __future__ import annotations

from pathlib import Path

from fewbits.errors import InputError
from fewbits.store.untrusted import inside, read_json

_ADAPTER = "adapter_config.json"
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
PICKLE_HINT = (
    "pickled checkpoints can run code when opened: convert it where you trust it (in Python, transformers' "
    "`AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(OTHER)` writes safetensors)"
)


def refuse_what_is_no_model(path: Path) -> None:
    if (path / _ADAPTER).is_file() and not (path / "config.json").is_file():
        said = read_json(inside(path, path / _ADAPTER), "the file is damaged; fetch it again")
        base = said.get("base_model_name_or_path") if isinstance(said, dict) else None
        of = f" of `{str(base)[:200]}`" if base else ""
        hint = "merge it into its model first: peft's `merge_and_unload()`, then `save_pretrained`; quantize that folder"
        raise InputError(f"`{path}` is an adapter (LoRA){of}, not a model", hint)
    if (path / "model_index.json").is_file():
        raise InputError(f"`{path}` is a pipeline of diffusers, not a language model", "give the folder of one of its text models")
    if (path / "fewbits.json").is_file():
        hint = "`fewbits export` writes it for another runtime; to quantize anew give the float model"
        raise InputError(f"`{path}` is an artifact of fewbits, quantized already", hint)
    if any(path.glob("*.safetensors")):
        return
    if files := sorted(path.glob("*.gguf")):
        raise InputError(f"`{path}` holds GGUF files and no checkpoint", f"give one of them: `{files[0]}`")
    if pickled := sorted(file.name for pattern in _PICKLED for file in path.glob(pattern)):
        raise InputError(f"`{path}` holds only pickled weights ({pickled[0]})", PICKLE_HINT)
