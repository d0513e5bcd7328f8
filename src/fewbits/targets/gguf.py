"""GGUF, the one file that llama.cpp loads: weights, architecture, tokenizer, chat template and where it all came from.

A format goes in as it is when it is one of GGUF's own types, and by an exact change of layout when its values are:
int4_g32 becomes Q4_0, int8_channel becomes Q8_0 with its scale repeated. Nothing is rounded here.
"""

from __future__ import annotations

import errno
import importlib.util
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits import architectures, formats
from fewbits.targets import Target

if TYPE_CHECKING:
    from torch import Tensor

    from fewbits.activations import Activation
    from fewbits.artifact import Artifact
    from fewbits.drafting import Draft
    from fewbits.formats import Format, Parts
    from fewbits.model import Weight
    from fewbits.progress import Progress

_CASTS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_ONE_SCALE = ("q4_0", "q5_0", "q8_0")  # GGUF types of the form scale * level, which other layouts of the same levels turn into
_ANY = (256, 256)  # a shape that every format fits


@dataclass(frozen=True)
class Layout:
    """How a format lies in a GGUF file."""

    type: str  # ggml's name: `Q4_K`
    block: int
    block_bytes: int
    convert: Callable[[Parts], Tensor]  # -> (rows, bytes of a row) uint8

    def nbytes(self, shape: tuple[int, int]) -> int:
        return shape[0] * shape[1] // self.block * self.block_bytes


@cache
def layout(fmt: Format) -> Layout | None:
    """By structure: a cast, a type of GGUF itself, or the values of one."""
    gguf = _constants()
    specs = fmt.parts(_ANY)
    if fmt.levels is None:
        dtype = specs["values"].dtype if specs.keys() == {"values"} else ""
        size = specs["values"].nbytes // (_ANY[0] * _ANY[1]) if dtype else 0
        return Layout(_CASTS[dtype], 1, size, lambda parts: _octets(parts["values"])) if dtype in _CASTS else None
    own = gguf.GGMLQuantizationType.__members__.get(fmt.name.upper())
    if own is not None and specs.keys() == {"blocks"}:
        block, block_bytes = gguf.GGML_QUANT_SIZES[own]
        same_size = fmt.block == block and fmt.nbytes(_ANY) == _ANY[0] * _ANY[1] // block * block_bytes
        return Layout(own.name, block, block_bytes, lambda parts: parts["blocks"]) if same_size else None
    return _same_values(fmt)


@cache
def _constants() -> Any:
    """gguf's tables of types without the rest of the package, whose import takes a third of the half second that `formats` has."""
    package = importlib.util.find_spec("gguf")
    assert package and package.submodule_search_locations
    spec = importlib.util.spec_from_file_location("gguf_constants", Path(package.submodule_search_locations[0]) / "constants.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _same_values(fmt: Format) -> Layout | None:
    """A format of codes and float16 scales whose levels a GGUF type shares: its scales, repeated, are that type's."""
    specs = fmt.parts(_ANY)
    if specs.keys() != {"codes", "scales"} or specs["scales"].dtype != "float16":
        return None
    for name in _ONE_SCALE:
        twin = formats.get(name)
        if twin.levels == fmt.levels and twin.run and (fmt.run is None or fmt.run % twin.run == 0):
            own = layout(twin)
            assert own
            return Layout(own.type, own.block, own.block_bytes, lambda parts, twin=twin: _repacked(fmt, twin, parts))  # type: ignore[misc]
    return None


def _repacked(fmt: Format, twin: Format, parts: Parts) -> Tensor:
    codes, grid = fmt.unpack(parts)
    assert twin.run
    scale, offset = fmt.affine(grid, slice(0, codes.shape[1], twin.run))
    assert offset is None, "codes and scales alone leave no room for an offset"
    return twin.pack(codes, {"d": scale.expand(len(codes), codes.shape[1] // twin.run).half()})["blocks"]


class Gguf(Target):
    name = "gguf"
    about = "one file for llama.cpp and all that is built on it"
    file_name = "model.gguf"
    runtime = "llama.cpp"
    candidates = (
        "q2_k",
        "q3_k",
        "mxfp4",
        "iq4_xs",
        "nvfp4",
        "q4_k",
        "q4_0",
        "iq4_nl",
        "q4_1",
        "q5_0",
        "q5_k",
        "q5_1",
        "q6_k",
        "q8_0",
        "fp16",
        "bf16",
    )

    def accepts(self, weight: Weight, fmt: Format) -> str | None:
        if weight.expert is not None:
            return "GGUF keeps the experts of a mixture in one tensor, which is not written yet"
        if weight.kind == "convolution":
            return "convolutions are not written as GGUF yet"
        own = layout(fmt)
        if own is None:
            return f"GGUF has no type with the values of {fmt.name}"
        if weight.shape[1] % own.block:
            return f"{weight.shape[1]} columns do not divide into {own.type}'s blocks of {own.block}, in which GGUF keeps {fmt.name}"
        return None

    def nbytes(self, weight: Weight, fmt: Format) -> int:
        own = layout(fmt)
        return own.nbytes(weight.shape) if own else fmt.nbytes(weight.shape)

    def accepts_activation(self, weight: Weight, fmt: Format, activation: Activation) -> str | None:
        return "llama.cpp rounds activations to 8 bits by itself, in blocks of its own"

    def accepts_kv(self, kv: str) -> str | None:
        return "llama.cpp's KV cache type is chosen when it runs (`--cache-type-k`, `--cache-type-v`)"

    def activation_block(self, weight: Weight, fmt: Format) -> int | None:
        own = layout(fmt)
        if own is None or own.block == 1:
            return None
        return 256 if own.block == 256 else 32  # ggml pairs a super-block with Q8_K and every other block, nvfp4's 64 too, with Q8_0

    def supports(self, config: Any, tokenizer: Any) -> str | None:
        from fewbits import vocabularies

        if reason := architectures.unsupported(config):
            return reason
        vocabularies.of(tokenizer, config.vocab_size)  # refuses what llama.cpp would silently split otherwise
        return None

    def overhead(self, draft: Draft) -> int:
        import tempfile

        import gguf

        tensors = list(_tensors(draft))
        with tempfile.TemporaryDirectory(prefix="fewbits-") as scratch:
            path = Path(scratch) / "header.gguf"
            writer = gguf.GGUFWriter(path, architectures.of(draft.config).gguf)
            _write_header(writer, draft, tensors)
            writer.close()
            header = path.stat().st_size
        padded = sum(gguf.GGUFWriter.ggml_pad(tensor.nbytes, gguf.GGUF_DEFAULT_ALIGNMENT) for tensor in tensors)
        return int(gguf.GGUFWriter.ggml_pad(header, gguf.GGUF_DEFAULT_ALIGNMENT) + padded - draft.plan.nbytes)

    def write(self, artifact: Artifact, path: Path, progress: Progress[Any]) -> None:
        import gguf

        tensors = list(_tensors(artifact))
        writer = gguf.GGUFWriter(path, architectures.of(artifact.config).gguf)
        try:
            _write_header(writer, artifact, tensors)
            for tensor in progress(tensors, len(tensors), "writing gguf"):
                writer.write_tensor_data(tensor.load().numpy())
            writer.flush()
        except OSError as failure:
            if failure.errno is None:  # numpy reports a short write without the system's reason
                raise OSError(errno.ENOSPC, "No space left on device") from failure
            raise
        finally:
            _close(writer)


@dataclass(frozen=True)
class _Tensor:
    name: str
    type: str
    shape: tuple[int, ...]
    nbytes: int
    load: Callable[[], Tensor]  # uint8, when its turn comes


def _write_header(writer: Any, artifact: Artifact | Draft, tensors: list[_Tensor]) -> None:
    import gguf

    _add_metadata(writer, artifact, tensors)
    for tensor in tensors:
        writer.add_tensor_info(tensor.name, tensor.shape, None, tensor.nbytes, gguf.GGMLQuantizationType[tensor.type])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()


def _tensors(artifact: Artifact | Draft) -> Iterator[_Tensor]:
    import torch

    from fewbits.drafting import Draft

    config = artifact.config
    rename = architectures.tensor_names(config)

    def ordered(rows: Tensor, name: str) -> Tensor:
        order = architectures.row_order(config, name)
        return rows if order is None else rows[torch.tensor(order)]

    def packed(weight: Weight, own: Layout) -> Tensor:
        assert not isinstance(artifact, Draft), "a draft has no packed weights"
        return ordered(own.convert(artifact.parts(weight)), weight.name).contiguous()

    def kept(name: str) -> Tensor:
        return _octets(ordered(artifact.tensor(name), name).float())

    for weight in artifact.weights:
        own = layout(formats.get(artifact.plan[weight.name].format))
        assert own, "the plan was made for another target"
        name = rename(f"{weight.name}.weight")
        yield _Tensor(name, own.type, weight.shape, own.nbytes(weight.shape), lambda weight=weight, own=own: packed(weight, own))  # type: ignore[misc]
    for name in artifact.rest:
        shape = tuple(artifact.tensor(name).shape)
        yield _Tensor(rename(name), "F32", shape, 4 * artifact.tensor(name).numel(), lambda name=name: kept(name))  # type: ignore[misc]
    factors = architectures.rope_factors(config)
    if factors is not None:
        yield _Tensor(architectures.ROPE_FACTORS, "F32", tuple(factors.shape), 4 * factors.numel(), lambda: _octets(factors))


def _add_metadata(writer: Any, artifact: Artifact | Draft, tensors: list[_Tensor]) -> None:
    import gguf

    from fewbits import vocabularies

    made = artifact.provenance
    writer.add_type("model")
    writer.add_name(made.source.removesuffix(".gguf"))
    writer.add_quantized_by("fewbits")
    writer.add_file_type(_file_type(tensors))
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for key, value in architectures.metadata(artifact.config).items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
        add(key, value)
    vocabularies.add_to(writer, vocabularies.of(artifact.tokenizer, artifact.config.vocab_size))
    writer.add_string("fewbits.version", made.fewbits)
    writer.add_string("fewbits.source", made.source)
    writer.add_string("fewbits.source_sha256", made.sha256)
    writer.add_string("fewbits.plan", artifact.plan.to_json())


def _file_type(tensors: list[_Tensor]) -> int:
    """llama.cpp's label of a whole file: the type of most weights. It is shown to people and decides nothing."""
    import gguf

    held: Counter[str] = Counter()
    for tensor in tensors:
        held[tensor.type] += tensor.nbytes * gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[tensor.type]][0]
    most = held.most_common(1)[0][0]
    labels = gguf.LlamaFileType.__members__
    return int(next((labels[name] for name in (f"ALL_{most}", f"MOSTLY_{most}", f"MOSTLY_{most}_M") if name in labels), 1024))


def _octets(values: Tensor) -> Tensor:
    import torch

    return values.contiguous().view(torch.uint8)


def _close(writer: Any) -> None:
    """Buffered bytes that no longer fit must not hide the error that is on its way."""
    try:
        writer.close()
    except OSError:
        writer.fout = None


TARGET = Gguf()
