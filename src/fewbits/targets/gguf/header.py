"""The metadata of a file: architecture, tokenizer, chat template and origin.

If the source was a GGUF, its keys are copied, and only those that quantization changes are written anew.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits.artifact import manifest
from fewbits.model.gguf import architectures, metadata, types
from fewbits.model.gguf.metadata import Raw
from fewbits.store.untrusted import read_json

if TYPE_CHECKING:
    from fewbits.artifact import Artifact
    from fewbits.artifact.draft import Draft
    from fewbits.targets.gguf.tensors import FileTensor

_POOLING = {"mean": 1, "cls": 2, "lasttoken": 3}  # llama.cpp's numbers for the words of sentence-transformers
_SPELLINGS = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls", "pooling_mode_lasttoken": "lasttoken"}
_POOLING_FILES = ("1_Pooling/config.json", "pooling.json")


def add_metadata(writer: Any, artifact: Artifact | Draft, tensors: list[FileTensor]) -> None:
    import gguf

    made, copied = artifact.provenance, _source_metadata(artifact)
    writer.add_type("model")
    writer.add_name(made.source.rpartition("/")[2].removesuffix(".gguf"))
    metadata.add(writer, copied)
    if not copied:
        _add_model(writer, artifact)
    writer.add_quantized_by("fewbits")
    writer.add_file_type(_file_type(tensors))
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for key, value in manifest.said(made, artifact.plan).items():
        writer.add_string(key, value)
    writer.add_string("fewbits.plan", artifact.plan.to_json())


def _add_model(writer: Any, artifact: Artifact | Draft) -> None:
    from fewbits.model.gguf import vocabularies

    keys = architectures.metadata(artifact.config)
    pooling = _pooling(artifact)
    if pooling is not None:
        keys[f"{architectures.of(artifact.config).gguf}.pooling_type"] = pooling
    for key, value in keys.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
        add(key, value)
    vocabularies.add_to(writer, vocabularies.of(artifact.tokenizer, artifact.config.vocab_size))


def _source_metadata(artifact: Artifact | Draft) -> dict[str, Raw]:
    """Of a source that was a GGUF; else empty."""
    return metadata.read(artifact.metadata_file) if artifact.metadata_file else {}


def _folder(artifact: Artifact | Draft) -> Path:
    from fewbits.artifact.draft import Draft

    return artifact.model.path if isinstance(artifact, Draft) else artifact.path


def _pooling(artifact: Artifact | Draft) -> int | None:
    """How an encoder pools its tokens into one vector, by the files of sentence-transformers; None: there are none."""
    if architectures.of(artifact.config).rotary:
        return None
    file = next((path for name in _POOLING_FILES if (path := _folder(artifact) / name).is_file()), None)
    said: Any = read_json(file, "") if file else {}
    modes = [said.get("pooling_mode"), *(mode for name, mode in _SPELLINGS.items() if said.get(name))] if isinstance(said, dict) else []
    return next((_POOLING[mode] for mode in modes if mode in _POOLING), None)


def _file_type(tensors: list[FileTensor]) -> int:
    """llama.cpp's label of a whole file: the type of most weights. It is only displayed."""
    import gguf

    held: Counter[str] = Counter()
    for tensor in tensors:
        held[tensor.type] += tensor.nbytes * types.BY_NAME[tensor.type].block
    most = held.most_common(1)[0][0]
    labels = gguf.LlamaFileType.__members__
    return int(next((labels[name] for name in (f"ALL_{most}", f"MOSTLY_{most}", f"MOSTLY_{most}_M") if name in labels), 1024))
