"""A file among the shards that makes transformers refuse the folder unless fewbits is imported.

transformers skips a `quant_method` that it does not know with a warning, finds no weights under the names that it looks for, and goes on
with random ones. A size that differs is what it refuses: so there is an empty tensor under the name of a parameter, and one whose name
tells in the report of that refusal what to do. Where fewbits is imported, both are passed over (inference/transformers_loader.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fewbits.model.weights import Weight

FILE = "import-fewbits-first.safetensors"
NOTICE = "to_load_this_folder.pip_install_fewbits.then_import_fewbits"


def write(folder: Path, weights: Iterable[Weight]) -> dict[str, str]:
    """`weights`: of the transformers module. Which file holds each tensor goes out."""
    import torch
    from safetensors.torch import save_file

    whole = next((weight.parameter for weight in weights if weight.expert is None), None)
    names = [NOTICE] if whole is None else [NOTICE, whole]
    save_file({name: torch.zeros(0) for name in names}, folder / FILE, metadata={"format": "pt"})
    (folder / FILE).chmod(0o644)
    return dict.fromkeys(names, FILE)
