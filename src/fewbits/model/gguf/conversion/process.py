"""llama.cpp's converter in a process and on a path of its own: `python -P process.py ROOT PRE WORDS...`. It imports nothing of fewbits.

Three things that a checkpoint brings along are told to the converter where it would guess:

- It knows a tokenizer by a hash of what it encodes, and so refuses one whose vocabulary is new although its rules are known. `PRE` is
  llama.cpp's name for the rules that fewbits recognised in the tokenizer itself, used only where the converter has no answer.
- It reads config.json through transformers, whose newer versions rename and drop keys that the converter asks for, and add others that it
  takes for a sign: what the file itself says counts, and transformers' reading only for a key that is asked for and not there.
- Layers that predict further tokens are left to a file of their own (the converter's `--mtp`): transformers does not run them.
"""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any


def main(root: Path, pre: str, words: list[str]) -> None:
    script = root / "convert_hf_to_gguf.py"
    sys.path[:0] = [str(root / "gguf-py"), str(root)]
    if (root / "conversion").is_dir():
        _tell(pre)
    sys.argv = [str(script), *words]
    runpy.run_path(str(script), run_name="__main__")


def _tell(pre: str) -> None:
    import conversion  # type: ignore[import-not-found]
    from conversion.base import ModelBase, TextModel  # type: ignore[import-not-found]

    recognised, read, model_class = TextModel.get_vocab_base_pre, ModelBase.load_hparams, conversion.get_model_class

    def rules(self: Any, tokenizer: Any) -> Any:
        try:
            return recognised(self, tokenizer)
        except NotImplementedError:
            if not pre:
                raise
            return pre

    def settings(folder: Path, is_mistral_format: bool) -> Any:
        known = read(folder, is_mistral_format)
        if is_mistral_format:
            return known
        said = _Settings(json.loads((folder / "config.json").read_text(encoding="utf-8")))
        said.known = known
        if "text_config" in known:  # which the converter finds under several names
            said.setdefault("text_config", known["text_config"])
        return said

    def without_further_tokens(name: str, **how: Any) -> Any:
        found = model_class(name, **how)
        if getattr(found, "supports_mtp_export", False):
            found.no_mtp = True
        return found

    TextModel.get_vocab_base_pre = rules
    ModelBase.load_hparams = staticmethod(settings)
    conversion.get_model_class = without_further_tokens


class _Settings(dict[str, Any]):
    """What config.json says; `settings[key]` of a key that it leaves out is answered as transformers reads it."""

    known: dict[str, Any]

    def __missing__(self, key: str) -> Any:
        return self.known[key]


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
