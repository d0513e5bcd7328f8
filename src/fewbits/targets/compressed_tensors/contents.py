"""The tensors of such a folder, whoever wrote it, read without compressed-tensors and transformers.

Tensors that config.json does not explain are an error.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits.errors import InputError
from fewbits.formats.microscaling import E2M1, E8M0
from fewbits.model.checkpoints.folder import open_shard
from fewbits.model.checkpoints.layer_patterns import LayerPatterns
from fewbits.store.dtypes import DTYPES
from fewbits.store.tensor_file import SafetensorError, TensorFile
from fewbits.store.untrusted import first_line, read_json
from fewbits.targets.compressed_tensors.layout import pattern_of
from fewbits.targets.compressed_tensors.schemes import Scheme
from fewbits.targets.compressed_tensors.shards import Array
from fewbits.targets.stored_tensor import StoredTensor

if TYPE_CHECKING:
    from torch import Tensor

    from fewbits.formats import Shape

_HINT = "fetch the folder again, or write it anew with `fewbits export --to safetensors`"
_CASTS = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}
_PARTS = re.compile(r"(.+)\.(weight_(?:packed|scale|zero_point|shape|global_scale)|input_(?:scale|global_scale|zero_point))$")


def is_compressed(path: Path) -> bool:
    """Whether this is a folder whose config.json names compressed-tensors."""
    if not (path / "config.json").is_file():
        return False
    config = read_json(path / "config.json", _HINT)
    said = config.get("quantization_config") if isinstance(config, dict) else None
    return isinstance(said, dict) and said.get("quant_method") == "compressed-tensors"


def types(path: Path) -> dict[str, str]:
    """The format of every weight, by the name of its layer, or of its parameter if that is no layer's `weight`.

    Shapes and types of the tensors must be those of the group that config.json puts the layer in.
    """
    return {stored.name.removesuffix(".weight"): stored.type for stored in contents(path) if len(stored.shape) > 1}


def contents(path: Path) -> list[StoredTensor]:
    """Reads the headers, and the shapes of packed weights; values are read when asked for."""
    try:
        return _contents(path)
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError, SafetensorError) as failure:
        raise InputError(f"`{path}` contradicts itself: {first_line(failure)}", _HINT) from failure


def _contents(path: Path) -> list[StoredTensor]:
    files = files_of(path)
    layers: dict[str, dict[str, str]] = {}  # of a quantized layer: its parts, and the names of their tensors
    for name in files:
        if match := _PARTS.match(name):
            layers.setdefault(match[1], {})[match[2]] = name
    for layer, parts in layers.items():
        if "weight_packed" not in parts and f"{layer}.weight" in files:
            parts["weight"] = f"{layer}.weight"
    groups, patterns = groups_of(path) if layers else [], Patterns()
    inside = {name for parts in layers.values() for name in parts.values()}
    tensors = [_quantized(files, layer, parts, groups, patterns) for layer, parts in layers.items()]
    for name in files.keys() - inside:
        array = _array(files, name)
        tensors.append(
            StoredTensor(name, _CASTS.get(array.dtype, array.dtype), array.shape, array.nbytes, partial(files[name].tensor, name))
        )
    return sorted(tensors, key=lambda stored: stored.name)


def files_of(path: Path) -> dict[str, TensorFile]:
    """The file of every tensor, opened."""
    files: dict[str, TensorFile] = {}
    for file in sorted(path.glob("*.safetensors")):
        opened = open_shard(file)
        files |= dict.fromkeys(opened.keys(), opened)
    return files


def _array(files: dict[str, TensorFile], name: str) -> Array:
    if (stored := files[name].dtype(name)) not in DTYPES:
        raise InputError(f"`{name}` is stored as {stored}", _HINT)
    return Array(DTYPES[stored], files[name].shape(name))


def groups_of(path: Path) -> list[tuple[list[str], Scheme]]:
    """The layers that each group names, and the layout of their weights."""
    try:
        said: Any = read_json(path / "config.json", _HINT)["quantization_config"]
        groups = []
        for group in said["config_groups"].values():
            weights = group["weights"]
            strategy = weights["strategy"]
            size = weights["group_size"] if strategy in ("group", "tensor_group") else None
            layout = group.get("format") or said["format"]
            groups.append((group["targets"], Scheme(layout, weights["type"], weights["num_bits"], strategy, size, weights["symmetric"])))
        return groups
    except (KeyError, TypeError, AttributeError) as failure:
        raise InputError(f"`{path / 'config.json'}` does not say how its weights are quantized: {failure!r}", _HINT) from failure


def _quantized(
    files: dict[str, TensorFile], layer: str, parts: dict[str, str], groups: list[tuple[list[str], Scheme]], patterns: Patterns
) -> StoredTensor:
    scheme = patterns.found(groups, layer)
    if scheme is None:
        raise InputError(f"`{layer}` is quantized, but no group of config.json names it", _HINT)
    arrays = {part: _array(files, name) for part, name in parts.items()}
    if "weight_shape" in parts:
        rows, cols = files[parts["weight_shape"]].tensor(parts["weight_shape"]).tolist()
    elif matrix := arrays.get("weight", arrays.get("weight_packed")):
        rows, cols = matrix.shape[0], matrix.shape[1] * (1 if "weight" in arrays else 2)
    else:
        raise InputError(f"`{layer}` has scales and no weight", _HINT)
    for part, wanted in scheme.arrays((rows, cols)).items():
        stored = arrays.get(part)
        other_float = part == "weight_scale" and stored and {stored.dtype, wanted.dtype} <= _CASTS.keys()  # other writers store other types
        if stored is None or stored.shape != wanted.shape or (stored.dtype != wanted.dtype and not other_float):
            said = f"{stored.dtype} {stored.shape}" if stored else "missing"
            raise InputError(f"`{layer}.{part}` is {said}, {wanted.dtype} {wanted.shape} by config.json", _HINT)

    def load() -> Tensor:
        return _decoded(scheme, (rows, cols), {part: files[name].tensor(name) for part, name in parts.items()})

    return StoredTensor(layer, scheme.type, (rows, cols), sum(array.nbytes for array in arrays.values()), load)


class Patterns(LayerPatterns):
    """The groups of a config.json, asked for the scheme of a layer."""

    def __init__(self) -> None:
        super().__init__(_HINT)
        self._named: dict[str, Scheme] = {}

    def found(self, groups: list[tuple[list[str], Scheme]], layer: str) -> Scheme | None:
        """The scheme of the group that names this layer: a name goes before a pattern. An expert's own pattern is not tried but compared,
        as a large mixture has a million pairs of both."""
        if not self._named:
            self._named = {target: scheme for targets, scheme in reversed(groups) for target in targets}
        if named := self._named.get(layer) or self._named.get(pattern_of(layer)):
            return named
        return next((scheme for targets, scheme in groups if any(self.match(target, layer) for target in targets)), None)


def _decoded(scheme: Scheme, shape: Shape, tensors: dict[str, Tensor]) -> Tensor:
    import torch

    from fewbits.formats.storage import bitstream
    from fewbits.formats.storage.codes import level_values

    rows, cols = shape
    scale = tensors["weight_scale"]
    if scheme.layout == "pack-quantized":
        zero: Tensor | int = 1 << (scheme.bits - 1)
        if not scheme.symmetric:
            down = tensors["weight_zero_point"].T.contiguous().view(torch.uint8)
            zero = bitstream.unpack(down, scheme.bits, rows).T.repeat_interleave(cols // scale.shape[1], 1).short()
        values = (bitstream.unpack(tensors["weight_packed"].view(torch.uint8), scheme.bits, cols).short() - zero).float()
    elif "weight" in tensors:
        values = tensors["weight"].float()
    else:
        packed = tensors["weight_packed"]
        values = level_values(E2M1)[torch.stack([packed & 15, packed >> 4], -1).flatten(1).int()]
        scale = level_values(E8M0)[scale.int()] if scheme.strategy == "group" else scale.float() / tensors["weight_global_scale"]
    spread = scale.float() if scale.numel() == 1 else scale.float().repeat_interleave(cols // scale.shape[1], 1)
    return values * spread
