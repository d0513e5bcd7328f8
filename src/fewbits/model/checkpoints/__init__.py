"""A path or hub id comes in, a `Checkpoint` goes out: a Hugging Face folder or a GGUF file as named tensors, loaded one at a time.

Tensors have the names and the layout of the transformers module, whatever the file calls them and however it orders their rows.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from fewbits.errors import InputError
from fewbits.model.checkpoints import hub, kinds

if TYPE_CHECKING:
    from torch import Tensor


class Checkpoint(Protocol):
    path: Path

    @property
    def config(self) -> Any:
        """The transformers config."""

    def names(self) -> list[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> str:
        """The cast format (`fp16`, `bf16`, `fp32`) that stores this tensor without loss."""

    def load(self, name: str) -> Tensor:
        """In the stored dtype; a quantized tensor is decoded to float32. It may be the mapped file: do not write to it."""

    def load_slice(self, name: str, index: int) -> Tensor:
        """One entry of the first dimension, without reading the others where the file allows it."""

    def save_assets(self, folder: Path) -> None:
        """Everything but weights: config, generation config, tokenizer, chat template."""

    def files(self) -> list[Path]:
        """The files that the hash of the source covers."""


def open(where: str | Path, offline: bool = False) -> Checkpoint:
    """A folder, a .gguf file, or a model of the hub by its id or address (local cache first, then a download unless `offline`)."""
    path = Path(where)
    if path.is_dir():
        return _folder(path)
    if path.is_file():
        if path.suffix.lower() == ".gguf":
            from fewbits.model.gguf.checkpoint import GgufFile

            return GgufFile(path)
        raise InputError(f"`{path}` is neither a model folder nor a .gguf file", _pickle_hint(path))
    if on_hub := hub.parse(str(where)):
        return open(hub.fetch(on_hub, offline))
    near = difflib.get_close_matches(path.name, [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else [], n=1)
    hint = f"did you mean `{path.parent / near[0]}`?" if near else "give a model folder, a .gguf file, or a hub id such as `owner/name`"
    raise InputError(f"there is nothing at `{where}`", hint)


def _folder(path: Path) -> Checkpoint:
    from fewbits.model.checkpoints import published
    from fewbits.model.checkpoints.folder import Folder

    kinds.refuse_what_is_no_model(path)
    return published.opened(Folder(path))


def _pickle_hint(path: Path) -> str:
    if path.suffix in {".bin", ".pt", ".pth", ".ckpt"}:
        return kinds.PICKLE_HINT
    return "give the folder that holds config.json and *.safetensors"
