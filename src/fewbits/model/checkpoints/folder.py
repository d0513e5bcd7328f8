"""A Hugging Face folder: config.json, tokenizer files, weights in one or many safetensors files, memory-mapped."""

from __future__ import annotations

import shutil
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits.errors import InputError
from fewbits.model import limits
from fewbits.store import untrusted
from fewbits.store.tensor_file import SafetensorError, TensorFile
from fewbits.store.untrusted import first_line, inside, plain, read_json

if TYPE_CHECKING:
    from torch import Tensor

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"  # transformers loads this one first; others beside it are another form of the model, or an adapter
_CAST = {"F16": "fp16", "BF16": "bf16", "F32": "fp32", "F64": "fp32"}
_ASSETS = ("*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt")
_DAMAGED = "the file is truncated or damaged; fetch it again"
_POOLING = "1_Pooling/config.json"  # sentence-transformers


class Folder:
    source_quantization: str | None = None  # these weights are floats

    def __init__(self, path: Path) -> None:
        self.path = path
        self._shard_of = _shards(path)
        self._open: dict[str, TensorFile] = {}

    @cached_property
    def config(self) -> Any:
        from transformers import AutoConfig

        self.config_file()  # what is wrong with it is said; its memory is free again before transformers parses the file
        file = self.path / "config.json"
        try:
            return AutoConfig.from_pretrained(self.path, local_files_only=True, trust_remote_code=False)
        except Exception as failure:
            hint = "is config.json damaged, or the architecture newer than the installed transformers?"
            raise InputError(f"`{file}` cannot be read: {first_line(failure)}", hint) from failure

    def names(self) -> list[str]:
        return list(self._shard_of)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file(name).shape(name)

    def stored(self, name: str) -> str:
        """The type as it is spelled in the file: `BF16`, `F8_E4M3`."""
        return self._file(name).dtype(name)

    def dtype(self, name: str) -> str:
        stored = self.stored(name)
        if stored not in _CAST:
            hint = "fewbits quantizes float checkpoints; this one seems to be quantized already"
            raise InputError(f"`{name}` is stored as {stored}", hint)
        return _CAST[stored]

    def config_file(self) -> dict[str, Any]:
        """The content of config.json, as it is: transformers is not asked."""
        file = inside(self.path, self.path / "config.json")
        content = read_json(file, "is this the folder of a model? it should hold config.json and *.safetensors", untrusted.CONFIG)
        if not isinstance(content, dict) or "model_type" not in content:
            raise InputError(f"`{file}` names no model_type", "it should be the config.json of a transformers model")
        limits.check(content, len(self._shard_of), file)
        return content

    def array(self, name: str) -> Any:
        """As a numpy array in float32; loads no torch."""
        return self._file(name).array(name)

    def load(self, name: str) -> Tensor:
        return self._file(name).tensor(name)

    def load_slice(self, name: str, index: int) -> Tensor:
        return self._file(name).tensor(name)[index]

    def save_assets(self, folder: Path) -> None:
        for pattern in _ASSETS:
            for file in sorted(self.path.glob(pattern)):
                if file.name != _INDEX and file.is_file():
                    shutil.copyfile(inside(self.path, file), folder / file.name)
        if (pooling := self.path / _POOLING).is_file():  # how the outputs of an encoder become one vector
            shutil.copyfile(inside(self.path, pooling), folder / "pooling.json")

    def files(self) -> list[Path]:
        shards = sorted(set(self._shard_of.values()))
        index = [_INDEX] if (self.path / _INDEX).exists() else []  # it decides which shard a tensor is read from
        return [self.path / name for name in ["config.json", *index, *shards]]

    def _file(self, name: str) -> TensorFile:
        shard = self._shard_of[name]
        if shard not in self._open:
            self._open[shard] = open_shard(self.path / shard)
        return self._open[shard]


def _shards(path: Path) -> dict[str, str]:
    """Which file holds each tensor."""
    index = path / _INDEX
    if index.exists():
        content = read_json(index, "")
        weight_map = content.get("weight_map") if isinstance(content, dict) else None
        if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
            raise InputError(f"`{index}` has no weight_map", "the index is damaged; fetch it again")
        for shard in sorted(set(weight_map.values())):
            if not plain(shard):  # an index must not lead out of its folder
                raise InputError(f"`{index}` names a shard outside its folder: {shard[:300]!a}", "do not trust this checkpoint")
            if not (path / shard).is_file():
                raise InputError(f"shard `{shard}` is missing from `{path}`", "the download is incomplete; fetch it again")
        if (path / _SINGLE).exists() and _SINGLE not in weight_map.values():  # transformers would load that
            raise InputError(f"`{path}` holds {_SINGLE} and an index of other shards", "remove the one that does not belong to the model")
        held = _held(path, sorted(set(weight_map.values())))
        for name, shard in weight_map.items():
            if held.get(name) != shard:
                raise InputError(
                    f"`{name}` should be in `{shard}`, but is not", "index and shards do not belong together; fetch both again"
                )
        return dict(sorted(weight_map.items()))
    single = [path / _SINGLE] if (path / _SINGLE).exists() else sorted(path.glob("*.safetensors"))
    if not single:
        raise InputError(f"`{path}` holds no *.safetensors", "give the folder that holds config.json and the weights")
    return _held(path, [file.name for file in single])


def _held(path: Path, shards: list[str]) -> dict[str, str]:
    """Which shard holds each tensor. A name in two shards is an error: two readers might take different ones."""
    shard_of: dict[str, str] = {}
    for shard in shards:
        for name in sorted(open_shard(path / shard).keys()):
            if (other := shard_of.setdefault(name, shard)) != shard:
                raise InputError(f"`{name}` is in `{other}` and in `{shard}`", "remove the file that does not belong to the model")
    return shard_of


def open_shard(path: Path) -> TensorFile:
    inside(path.parent, path)
    if not path.is_file():  # reading a pipe would block
        raise InputError(f"`{path}` is not a file", "fetch it again")
    try:
        return TensorFile(path)
    except (SafetensorError, OSError) as failure:
        raise InputError(f"`{path}` cannot be read: {failure}", _DAMAGED) from failure
