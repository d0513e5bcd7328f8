"""What a file says beside its tensors: architecture, tokenizer, chat template, and where it all came from.

A model that was a GGUF before keeps every key that it had, in its own words; only what is no longer true of it is said anew.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits import architectures, manifest
from fewbits.checkpoints import gguf_metadata
from fewbits.checkpoints.folder import read_json
from fewbits.checkpoints.gguf_metadata import Raw

if TYPE_CHECKING:
    from fewbits.artifact import Artifact
    from fewbits.drafting import Draft
    from fewbits.targets.gguf.tensors import FileTensor

_POOLING = {"mean": 1, "cls": 2, "lasttoken": 3}  # llama.cpp's numbers of what sentence-transformers says, in either of its spellings
_SPELLINGS = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls", "pooling_mode_lasttoken": "lasttoken"}
_POOLING_FILES = ("1_Pooling/config.json", "pooling.json")


def add_metadata(writer: Any, artifact: Artifact | Draft, tensors: list[FileTensor]) -> None:
    import gguf

    made, kept = artifact.provenance, _kept(artifact)
    writer.add_type("model")
    writer.add_name(made.source.removesuffix(".gguf"))
    gguf_metadata.add(writer, kept)
    if not kept:
        _add_model(writer, artifact)
    writer.add_quantized_by("fewbits")
    writer.add_file_type(_file_type(tensors))
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for key, value in manifest.said(made, artifact.plan).items():
        writer.add_string(key, value)
    writer.add_string("fewbits.plan", artifact.plan.to_json())


def _add_model(writer: Any, artifact: Artifact | Draft) -> None:
    from fewbits import vocabularies

    found = architectures.metadata(artifact.config)
    pooling = _pooling(artifact)
    if pooling is not None:
        found[f"{architectures.of(artifact.config).gguf}.pooling_type"] = pooling
    for key, value in found.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
        add(key, value)
    vocabularies.add_to(writer, vocabularies.of(artifact.tokenizer, artifact.config.vocab_size))


def _kept(artifact: Artifact | Draft) -> dict[str, Raw]:
    """The metadata that the model had as a GGUF; none if it was none."""
    where = _folder(artifact)
    file = where / gguf_metadata.FILE if where.is_dir() else where
    return gguf_metadata.read(file) if file.is_file() and file.suffix.lower() == ".gguf" else {}


def _folder(artifact: Artifact | Draft) -> Path:
    from fewbits.drafting import Draft

    return artifact.model.path if isinstance(artifact, Draft) else artifact.path


def _pooling(artifact: Artifact | Draft) -> int | None:
    """How an encoder makes one vector of a text, as sentence-transformers says it; None: it says nothing, and the reader must."""
    if architectures.of(artifact.config).rotary:
        return None
    file = next((path for name in _POOLING_FILES if (path := _folder(artifact) / name).is_file()), None)
    said: Any = read_json(file, "") if file else {}
    modes = [said.get("pooling_mode"), *(mode for name, mode in _SPELLINGS.items() if said.get(name))] if isinstance(said, dict) else []
    return next((_POOLING[mode] for mode in modes if mode in _POOLING), None)


def _file_type(tensors: list[FileTensor]) -> int:
    """llama.cpp's label of a whole file: the type of most weights. It is shown to people and decides nothing."""
    import gguf

    held: Counter[str] = Counter()
    for tensor in tensors:
        held[tensor.type] += tensor.nbytes * gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[tensor.type]][0]
    most = held.most_common(1)[0][0]
    labels = gguf.LlamaFileType.__members__
    return int(next((labels[name] for name in (f"ALL_{most}", f"MOSTLY_{most}", f"MOSTLY_{most}_M") if name in labels), 1024))
