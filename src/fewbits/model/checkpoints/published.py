"""A folder whose weights are published quantized, as the float model that they stand for: FP8, MXFP4, compressed-tensors.

Weights are decoded one at a time when they are loaded, to the values and the type that transformers' own dequantization gives.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits.errors import InputError
from fewbits.model.checkpoints import compressed, fp8, mxfp4
from fewbits.model.checkpoints.encoded import CASTS, DAMAGED, Encoded
from fewbits.store import untrusted
from fewbits.store.dtypes import ITEMS
from fewbits.store.untrusted import inside, read_json

if TYPE_CHECKING:
    from torch import Tensor

    from fewbits.model.checkpoints import Checkpoint
    from fewbits.model.checkpoints.folder import Folder

_READERS = {"fp8": fp8.find, "mxfp4": lambda files, *_: mxfp4.find(files), "compressed-tensors": compressed.find}
_KEY = "quantization_config"
_OURS = "fewbits"  # an artifact has a reader of its own
_FLOATS = ("F16", "BF16", "F32", "F64")


def opened(folder: Folder) -> Checkpoint:
    """The folder itself if its weights are floats; else one that decodes them."""
    said = _said(folder.path)
    method = said.get("quant_method") or ("mlx" if "group_size" in said and "bits" in said else None)
    if not said or method == _OURS:
        return folder
    if isinstance(method, str) and method in _READERS:
        weights, hidden = _READERS[method](folder, said, _dtype(folder.config))
        return Published(folder, weights, hidden, method)
    if all(folder.stored(name) in _FLOATS for name in folder.names()):  # quantized when it is loaded, if at all
        return folder
    named = f"by `{str(method)[:100]}`" if method else "by a method that its config.json does not name"
    hint = f"of quantized checkpoints those by {', '.join(_READERS)} are read; for others give the float model"
    raise InputError(f"the weights of `{folder.path}` are quantized already, {named}", hint)


class Published:
    def __init__(self, folder: Folder, weights: dict[str, Encoded], hidden: set[str], method: str) -> None:
        self.path = folder.path
        self._folder, self._weights, self._hidden, self._method = folder, weights, hidden, method

    @property
    def source_quantization(self) -> str | None:
        """How the weights are stored, for a person; None: all are floats."""
        kinds = Counter(encoded.about for encoded in self._weights.values())
        listed = "; ".join(about for about, _ in kinds.most_common())
        return f"compressed-tensors: {listed}" if listed and self._method == "compressed-tensors" else listed or None

    @property
    def merging(self) -> Published:
        """The same for tensors that are merged into one, as experts are: transformers decodes some of these in another way."""
        weights = {name: encoded.merged or encoded for name, encoded in self._weights.items()}
        return Published(self._folder, weights, self._hidden, self._method)

    @cached_property
    def config(self) -> Any:
        """Of the float model."""
        config = self._folder.config
        for part in (config, config.get_text_config()):
            if hasattr(part, _KEY):
                delattr(part, _KEY)
        return config

    def names(self) -> list[str]:
        parts = {part for encoded in self._weights.values() for part in encoded.parts}
        return [*(name for name in self._folder.names() if name not in parts and name not in self._hidden), *self._weights]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._weights[name].shape if name in self._weights else self._folder.shape(name)

    def dtype(self, name: str) -> str:
        return self._weights[name].dtype if name in self._weights else self._folder.dtype(name)

    def storage(self, name: str) -> tuple[str, int] | None:
        """How a quantized weight lies in the files, and its bytes there; None: it is a float."""
        if (encoded := self._weights.get(name)) is None:
            return None
        sizes = dict(ITEMS.values())
        return encoded.about, sum(math.prod(self._folder.shape(part)) * sizes[self._folder.stored(part)] for part in encoded.parts)

    def load(self, name: str) -> Tensor:
        return self._weights[name].load() if name in self._weights else self._folder.load(name)

    def load_slice(self, name: str, index: int) -> Tensor:
        return self._weights[name].load_slice(index) if name in self._weights else self._folder.load_slice(name, index)

    def save_assets(self, folder: Path) -> None:
        self._folder.save_assets(folder)
        file = folder / "config.json"
        config = json.loads(file.read_text(encoding="utf-8"))
        for part in (config, config.get("text_config")):
            if isinstance(part, dict):
                part.pop(_KEY, None)
        file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    def files(self) -> list[Path]:
        return self._folder.files()


def _said(path: Path) -> dict[str, Any]:
    """How config.json says that weights are quantized. Whether it is a config at all is asked where it is read."""
    file = path / "config.json"
    config = read_json(inside(path, file), DAMAGED, untrusted.CONFIG) if file.is_file() else None
    if not isinstance(config, dict):
        return {}
    inner = config.get("text_config")
    said = config.get(_KEY) or (inner.get(_KEY) if isinstance(inner, dict) else None) or {}
    if not isinstance(said, dict):
        raise InputError(f"`{file}` has a {_KEY} that says nothing", DAMAGED)
    return said


def _dtype(config: Any) -> str:
    """The cast format of the float model, which transformers decodes to; bfloat16 if the config names none."""
    named = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
    return next((cast for cast, name in CASTS.items() if str(named).removeprefix("torch.") == name), "bf16")
