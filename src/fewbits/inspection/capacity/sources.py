"""The model that `fewbits fit` is asked about: a folder, a GGUF, a hub id, or a number of parameters. Reads only configs and headers."""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fewbits.errors import InputError
from fewbits.inspection.capacity import configs, outline
from fewbits.inspection.capacity import typical as sizes
from fewbits.inspection.capacity.outline import Outline, OutlineWeight
from fewbits.model.checkpoints import hub, kinds
from fewbits.model.gguf import architectures
from fewbits.planning import footprint
from fewbits.planning.footprint import Shape
from fewbits.store.untrusted import read_json

_LARGEST_HEADER = 100_000_000  # bytes: safetensors' values limit
_MOST = 8192  # a config with more layers or heads is damaged


@dataclass(frozen=True)
class Source:
    name: str
    config: Any
    shape: Shape
    outline: Outline
    stored: int | None = None  # tensor bytes of a file that is quantized already
    assumed: str = ""  # a sentence about what was guessed

    @property
    def longest(self) -> int:
        """The context that the model was made for."""
        return int(getattr(self.config, "max_position_embeddings", None) or 131072)


def find(model: str | Path | None, params: str | None, offline: bool = False) -> Source:
    if (model is None) == (params is None):
        raise InputError("give a model, or `--params`", "for example `fewbits fit --params 7B --device rtx4090`")
    if params is not None:
        return typical(params)
    path = Path(str(model))
    if path.is_dir():
        return of_folder(path)
    if path.is_file() and path.suffix.lower() == ".gguf":
        return of_gguf(path)
    if path.is_file() and path.name.endswith(".json"):
        return _of_config(path.parent.name or path.name, read_json(path, ""))
    if not path.exists() and (on_hub := hub.parse(str(model))):
        if on_hub.file is not None:
            return of_gguf(hub.fetch(on_hub, offline))
        return _of_config(str(on_hub), read_json(hub.fetch_config(on_hub, offline), ""))
    if path.exists():
        raise InputError(f"`{path}` is neither a model folder nor a .gguf file", "give one of them, a hub id, or `--params 7B`")
    raise InputError(f"there is nothing at `{path}`", "give a model folder, a .gguf file, a hub id, or `--params 7B`")


def of_folder(path: Path) -> Source:
    if not (path / "config.json").is_file():
        kinds.refuse_what_is_no_model(path)
    content = read_json(path / "config.json", "is this the folder of a model? it should hold config.json; `--params 7B` needs none")
    if not isinstance(content, Mapping):
        raise InputError(f"`{path / 'config.json'}` is no config", "it should be the config.json of a transformers model")
    source = _of_config(path.name, content)
    headers = [header for file in sorted(path.glob("*.safetensors")) for header in _header(file)]
    packed = "quantization_config" in content
    stored = sum(nbytes for _, _, nbytes in headers) if packed and headers else None
    if source.outline.exact or packed or not headers:
        return Source(source.name, source.config, source.shape, source.outline, stored, source.assumed)
    return Source(source.name, source.config, source.shape, _of_tensors([(name, shape) for name, shape, _ in headers]))


def of_gguf(path: Path) -> Source:
    from fewbits.model.gguf.checkpoint import open_reader

    opened = open_reader(path)
    try:
        fields = {name: field.contents() for name, field in opened.fields.items()}
        config = configs.of(_gguf_settings(fields, {tensor.name for tensor in opened.tensors}))
    except (KeyError, TypeError, ValueError, struct.error) as failure:
        raise InputError(
            f"the metadata of `{path}` does not describe a model: {failure!r}", "the file is damaged; fetch it again"
        ) from failure
    stored = sum(int(tensor.n_bytes) for tensor in opened.tensors)
    weights = _checked(config)
    if not weights.exact:
        weights = _of_tensors([(tensor.name, tuple(int(size) for size in reversed(tensor.shape))) for tensor in opened.tensors])
    return Source(path.name, config, footprint.shape(config), weights, stored)


def typical(text: str) -> Source:
    """A model of about so many parameters, like the published one that is nearest in size."""
    settings, assumed = sizes.settings(text)
    source = _of_config(f"{text.strip()} parameters", settings)
    return Source(source.name, source.config, source.shape, source.outline, assumed=assumed)


def _of_config(name: str, content: Mapping[str, Any]) -> Source:
    config = configs.of(content)
    weights = _checked(config)
    assumed = "" if weights.exact else f"`{config.model_type}` is not known here: counted as a Llama of the same sizes"
    return Source(name, config, footprint.shape(config), weights, assumed=assumed)


def _checked(config: Any) -> Outline:
    """The outline of a config. A damaged one raises an InputError, not an error of arithmetic."""
    if config.model_type == "bert":
        raise InputError("an encoder keeps no context and generates nothing", "its memory is its file's size and a few MB")
    try:
        if not 0 < int(config.num_hidden_layers) <= _MOST or not 0 < int(config.num_attention_heads) <= _MOST:
            raise ValueError(f"{config.num_hidden_layers} layers of {config.num_attention_heads} heads")
        return outline.outline(config)
    except (AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError) as failure:
        raise InputError(f"the config does not describe a language model: {failure}", "is it damaged, or of another kind?") from failure


def _of_tensors(tensors: list[tuple[str, tuple[int, ...]]]) -> Outline:
    """For an unknown architecture: a tensor of two dimensions is a weight, of three a mixture of experts, all others stay in float32."""
    from fewbits.model.weights import Weight

    matrices, kept = [], 0
    output = any(name in ("lm_head.weight", "output.weight") for name, _ in tensors)
    for name, shape in tensors:
        if len(shape) < 2:
            kept += math.prod(shape)
            continue
        rows, cols = shape[-2:]
        table = re.search(r"embed_tokens|token_embd|wte", name) is not None
        weight = Weight(name.removesuffix(".weight"), (rows, cols), "embedding" if table else "other", "fp16")
        matrices.append(OutlineWeight(weight, math.prod(shape[:-2]), 0.0 if table and output else 1.0))
    return Outline(tuple(matrices), kept, named_by_transformers=not any(name.startswith("blk.") for name, _ in tensors))


def _gguf_settings(fields: Mapping[str, Any], tensors: set[str]) -> dict[str, Any]:
    """A config from a header. Keys are the same in all architectures, so that unknown ones can be read too."""
    name = str(fields["general.architecture"])
    values = {key.removeprefix(f"{name}."): value for key, value in fields.items()}
    mixture = bool(values.get("expert_count"))
    row = next((row for row in architectures.KNOWN if row.gguf == name and ("expert_count" in row.keys) == mixture), None)
    keys = row.keys if row else _ANY_KEYS
    settings: dict[str, Any] = {attribute: values[key] for key, attribute in keys.items() if key in values}
    settings = {key: value for key, value in settings.items() if not isinstance(value, list)}  # one for each layer, which is not supported
    settings |= {"model_type": row.model_type if row else name, "tie_word_embeddings": "output.weight" not in tensors}
    settings.setdefault("vocab_size", len(fields.get("tokenizer.ggml.tokens", ())))
    settings["num_key_value_heads"] = values.get("attention.head_count_kv") or settings.get("num_attention_heads")
    if row and row.model_type == "mixtral":
        settings["num_local_experts"] = values["expert_count"]
    if row is None or not row.windows:
        settings["sliding_window"] = None
    biased = "blk.0.attn_q.bias" in tensors
    settings |= {"attention_bias": biased, "qkv_bias": biased, "mlp_bias": "blk.0.ffn_up.bias" in tensors}
    if "rope_freqs.weight" in tensors:
        settings["rope_parameters"] = {"rope_type": "llama3"}
    if "rope_factors_long.weight" in tensors:
        half = [0.0] * (int(values["rope.dimension_count"]) // 2)
        settings["rope_parameters"] = {"rope_type": "longrope", "long_factor": half, "short_factor": half}
    return settings


_ANY_KEYS = next(row for row in architectures.KNOWN if row.model_type == "qwen3_moe").keys


def _header(path: Path) -> list[tuple[str, tuple[int, ...], int]]:
    """(name, shape, bytes) of every tensor of a safetensors file: 8 bytes of length, then JSON."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > _LARGEST_HEADER:
                raise ValueError(f"a header of {length:,} bytes")
            content = json.loads(file.read(length))
        rows = ((name, tuple(map(int, row["shape"])), row["data_offsets"]) for name, row in content.items() if name != "__metadata__")
        return [(name, shape, int(end) - int(start)) for name, shape, (start, end) in rows]
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as failure:
        raise InputError(f"`{path}` cannot be read: {failure}", "the file is truncated or damaged; fetch it again") from failure
