"""The tensors of a folder of mlx-lm's, whoever wrote it, read without MLX: config.json says how each layer is quantized.

Tensors that config.json does not explain are an error.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits.errors import InputError
from fewbits.formats.microscaling import E2M1, E8M0, UE4M3
from fewbits.formats.mxfp8 import E4M3
from fewbits.store.dtypes import DTYPES
from fewbits.store.tensor_file import SafetensorError
from fewbits.store.untrusted import first_line, read_json
from fewbits.targets.compressed_tensors.contents import files_of
from fewbits.targets.compressed_tensors.shards import Array
from fewbits.targets.mlx import schemes
from fewbits.targets.stored_tensor import StoredTensor

if TYPE_CHECKING:
    from torch import Tensor

    from fewbits.store.tensor_file import TensorFile
    from fewbits.targets.mlx.schemes import Scheme

_HINT = "fetch the folder again, or write it anew with `fewbits export --to mlx`"
_CASTS = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}
_LEVELS = {"mxfp4": E2M1, "nvfp4": E2M1, "mxfp8": E4M3}


def is_mlx(path: Path) -> bool:
    """Whether this is a folder for mlx-lm: its config.json says so if it is quantized, its weights if they are floats."""
    if not (path / "config.json").is_file():
        return False
    config = read_json(path / "config.json", _HINT)
    said = config.get("quantization") if isinstance(config, dict) else None
    if isinstance(said, dict) and {"group_size", "bits"} <= said.keys():
        return True
    first = next(iter(sorted(path.glob("model*.safetensors"))), None)
    try:
        return first is not None and files_metadata(first).get("format") == "mlx"
    except InputError:
        return False


def files_metadata(file: Path) -> dict[str, str]:
    from fewbits.model.checkpoints.folder import open_shard

    return open_shard(file).metadata()


def types(path: Path) -> dict[str, str]:
    """The format of every weight, by the name of its layer."""
    return {stored.name.removesuffix(".weight"): stored.type for stored in contents(path) if len(stored.shape) > 1}


def contents(path: Path) -> list[StoredTensor]:
    """Reads the headers; values are read when asked for."""
    try:
        return _contents(path)
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError, SafetensorError) as failure:
        raise InputError(f"`{path}` contradicts itself: {first_line(failure)}", _HINT) from failure


def _contents(path: Path) -> list[StoredTensor]:
    files, said = files_of(path), read_json(path / "config.json", _HINT).get("quantization") or {}
    layers = {name.removesuffix(".scales") for name in files if name.endswith(".scales")}
    tensors, inside = [], set[str]()
    for layer in sorted(layers):
        names = {part: f"{layer}.{part}" for part in ("weight", "scales", "biases") if f"{layer}.{part}" in files}
        inside.update(names.values())
        tensors.append(_quantized(files, layer, names, said))
    for name in files.keys() - inside:
        array = _array(files, name)
        load = partial(files[name].tensor, name)
        tensors.append(StoredTensor(name, _CASTS.get(array.dtype, array.dtype), array.shape, array.nbytes, load))
    return sorted(tensors, key=lambda stored: stored.name)


def _array(files: dict[str, TensorFile], name: str) -> Array:
    if (stored := files[name].dtype(name)) not in DTYPES:
        raise InputError(f"`{name}` is stored as {stored}", _HINT)
    return Array(DTYPES[stored], files[name].shape(name))


def _quantized(files: dict[str, TensorFile], layer: str, names: dict[str, str], said: dict[str, Any]) -> StoredTensor:
    arrays = {part: _array(files, name) for part, name in names.items()}
    entry = said.get(layer)
    own: dict[str, Any] = entry if isinstance(entry, dict) else said
    bits, group, mode = own.get("bits"), own.get("group_size"), own.get("mode", "affine")
    scheme = schemes.valid(bits, group, mode)
    if scheme is None:
        raise InputError(f"config.json says that `{layer}` has {bits} bits in groups of {group} ({mode}): MLX has no such layers", _HINT)
    if "weight" not in arrays:
        raise InputError(f"`{layer}` has scales and no weight", _HINT)
    *stack, words = arrays["weight"].shape
    shape = (*stack, words * 32 // scheme.bits)
    dtype = arrays["scales"].dtype
    for part, wanted in scheme.arrays(shape, dtype if dtype in _CASTS else "float16").items():
        if (stored := arrays.get(part)) != wanted:
            is_there = f"{stored.dtype} {stored.shape}" if stored else "missing"
            raise InputError(f"`{layer}.{part}` is {is_there}, {wanted.dtype} {wanted.shape} by config.json", _HINT)

    def load() -> Tensor:
        return _decoded(scheme, shape, {part: files[name].tensor(name) for part, name in names.items()})

    nbytes = sum(array.nbytes for array in arrays.values())
    return StoredTensor(layer, scheme.name(dtype if scheme.mode == "affine" else None), shape, nbytes, load)


def _decoded(scheme: Scheme, shape: tuple[int, ...], tensors: dict[str, Tensor]) -> Tensor:
    import torch

    from fewbits.formats.storage import bitstream
    from fewbits.formats.storage.codes import level_values

    octets = tensors["weight"].contiguous().view(torch.uint8).reshape(-1, shape[-1] * scheme.bits // 8)
    codes = bitstream.unpack(octets, scheme.bits, shape[-1])
    scales = tensors["scales"].reshape(len(codes), -1)
    if scheme.mode == "affine":
        biases = tensors["biases"].reshape(len(codes), -1).float().repeat_interleave(scheme.group, 1)
        return (codes.float() * scales.float().repeat_interleave(scheme.group, 1) + biases).reshape(shape)
    table = UE4M3 if scheme.mode == "nvfp4" else E8M0
    spread = level_values(table)[scales.int() & (127 if scheme.mode == "nvfp4" else 255)].repeat_interleave(scheme.group, 1)
    return (level_values(_LEVELS[scheme.mode])[codes.int()] * spread).reshape(shape)
