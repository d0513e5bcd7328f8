"""ONNX for ONNX Runtime: quantized weights are stored and multiplied packed, others are stored in their float type.
One file; above protobuf's 2 GiB the weights are in NAME.onnx.data beside it.

    linear      quantized: com.microsoft.MatMulNBits           float: Cast, Transpose, MatMul (folded when a session loads)
                with static int8 activations: QuantizeLinear, DequantizeLinear, MatMul (qdq.py)
    embedding   quantized: com.microsoft.GatherBlockQuantized  float: Gather, Cast
    input_ids   int64 [batch, sequence]: the only input; shorter sequences of a batch are padded on the right
    logits      float32 [batch, sequence, vocabulary]

An embedding and the output tied to it read the same initializers.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits import formats
from fewbits.errors import InputError, MissingError
from fewbits.store import files
from fewbits.targets import Target
from fewbits.targets.onnx import qdq, storage, versions
from fewbits.targets.running import Command

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fewbits.artifact import Artifact
    from fewbits.artifact.draft import Draft
    from fewbits.formats import Format
    from fewbits.formats.runtime.activations import Activation
    from fewbits.model.weights import Weight
    from fewbits.progress import Progress

# How MatMulNBits computes: 0 in float32, exact to 1e-6; 4 rounds its inputs to 8 bits per block of columns, as llama.cpp does.
# A deployed file holds 4: at 0 ONNX Runtime 1.31 decodes an 8-bit matrix anew in every call (11 ms instead of 0.2 for 2048 x 2048
# and one token; float32 takes 0.6), and 4 bits take 2.3 times as long. The price, as KL (`fewbits demo --json`, crosscheck.kl of
# kl_mean): int4_g32 1.1e-4 of 1.1e-2, lost in the noise of the weights; int8_channel, whose blocks are 256 columns, 3.7e-4 of
# 4.4e-4: where 8-bit weights must be exact to the last digit, level 0 or a format with blocks of 32 is the better choice.
ACCURACY_LEVEL = 4

_LARGEST = 2**31 - 2**24  # protobuf ends at 2 GiB; the graph itself takes a few MB


class Onnx(Target):
    name = "onnx"
    about = "one .onnx file for ONNX Runtime: 2-, 4- and 8-bit weights run packed"
    file_name = "model.onnx"
    runtime = "onnxruntime"
    candidates = ("int2_g32_asym", "int4_g128", "int4_g64", "int4_g32", "int4_g32_asym", "int8_g32", "int8_channel", "fp16")

    def __init__(self, accuracy_level: int = ACCURACY_LEVEL, largest: int = _LARGEST) -> None:
        """`largest`: bytes of a file that holds its weights; those of a larger model are in a data file."""
        self.accuracy_level, self.largest = accuracy_level, largest

    def accepts(self, weight: Weight, fmt: Format) -> str | None:
        if weight.expert is not None:
            return "the experts of a mixture are not written as ONNX yet"
        if fmt.is_cast:
            return None
        if weight.kind == "convolution":
            return "ONNX Runtime has no convolution that reads packed weights"
        blocks = storage.blocks(fmt, weight.shape[1])
        return blocks if isinstance(blocks, str) else versions.lacking(blocks.bits, weight.kind == "embedding")

    def nbytes(self, weight: Weight, fmt: Format, activation: Activation | None = None) -> int:
        if activation:
            return sum(spec.nbytes for spec in qdq.specs(weight.shape, activation).values())
        if fmt.is_cast:
            return fmt.nbytes(weight.shape)
        blocks = storage.blocks(fmt, weight.shape[1])
        assert isinstance(blocks, storage.Blocks), blocks
        return blocks.nbytes(weight.shape)

    def accepts_activation(self, weight: Weight, fmt: Format, activation: Activation) -> str | None:
        if not activation.static:
            return "MatMulNBits rounds its inputs to 8 bits by itself (accuracy level 4), with a scale per block of columns, not per token"
        if weight.kind == "embedding":
            return "a table that is looked up is stored for MatMulNBits, which takes float inputs and no scale for them"
        return qdq.refuses_activation(activation) or qdq.refuses(fmt)

    def accepts_kv(self, kv: str) -> str | None:
        return "the graph is written without a KV cache"

    def activation_block(self, weight: Weight, fmt: Format) -> int | None:
        blocks = storage.blocks(fmt, weight.shape[1]) if not fmt.is_cast and self.accuracy_level == 4 else None
        return blocks.size if isinstance(blocks, storage.Blocks) else None

    def supports(self, config: Any, tokenizer: Any) -> str | None:
        if absent := [name for name in ("onnx", "onnxscript") if not find_spec(name)]:
            raise MissingError(f"writing ONNX needs the package `{absent[0]}`", "pip install 'fewbits[onnx]'")
        if getattr(config, "is_encoder_decoder", False):
            return f"{config.model_type} has an encoder and a decoder; only decoder language models are written as ONNX yet"
        text = config.get_text_config()
        if any(getattr(text, key, None) for key in ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")):
            return f"{config.model_type} stacks the weights of experts; those are not written as ONNX yet"
        if text is not config:
            return f"{config.model_type} reads more than text; only language models of text alone are written as ONNX yet"
        if not any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in config.architectures or ["ForCausalLM"]):
            return f"{config.architectures[0]} is no causal language model; only those are written as ONNX yet"
        if _stateful(config):
            return f"{config.model_type} hands a state on from token to token, and a trace of that holds for one length of text only"
        return None

    def overhead(self, draft: Draft) -> int:
        from fewbits.model.onnx import external_data, inline_data

        stores = self._stores(draft)
        specs, proto = storage.specs(stores), self._proto(draft, stores)
        size = inline_data.nbytes(proto, specs)
        if size > self.largest:  # the final name of the data file may add a few bytes for every weight
            placed = external_data.layout(specs, f"{self.file_name}.data")
            proto.graph.initializer.extend(array.initializer() for array in placed.values())
            size = proto.ByteSize() + external_data.nbytes(placed)
        return size - draft.plan.nbytes

    def _stores(self, artifact: Artifact | Draft) -> dict[str, storage.Store]:
        stores = {}
        for weight in artifact.weights:
            entry = artifact.plan[weight.name]
            fmt, activation = formats.get(entry.format), entry.activation
            if activation and (why_not := self.accepts_activation(weight, fmt, activation)):
                # calibration leaves a weight that no text reached with a dynamic activation
                raise InputError(f"`{weight.name}` cannot be written with {activation.name} activations: {why_not}", "edit the plan")
            stores[weight.name] = storage.store(fmt, weight.shape, self.accuracy_level, activation)
        return stores

    def _proto(self, artifact: Artifact | Draft, stores: Mapping[str, storage.Store]) -> Any:
        from fewbits.targets.onnx import graph

        model = graph.trace(artifact, stores)
        graph.describe(model, artifact, self.accuracy_level)
        return graph.proto_of(model, storage.specs(stores))

    def write(self, artifact: Artifact, path: Path, progress: Progress[Weight]) -> None:
        from fewbits.model.onnx import external_data, inline_data

        stores = self._stores(artifact)
        specs, proto = storage.specs(stores), self._proto(artifact, stores)
        arrays = storage.arrays(artifact, stores, progress)
        if inline_data.nbytes(proto, specs) <= self.largest:
            with path.open("wb") as stream:
                inline_data.write(stream, proto, specs, arrays)
            return
        placed = external_data.layout(specs, f"{files.final_name(path)}.data")
        proto.graph.initializer.extend(array.initializer() for array in placed.values())
        with files.beside(path).open("wb") as stream:
            external_data.write(stream, placed, arrays)
        path.write_bytes(proto.SerializeToString(deterministic=True))

    def written(self, path: Path) -> dict[str, str]:
        from fewbits.targets.onnx import contents

        return contents.types(path)

    def written_as(self, weight: Weight, fmt: Format, activation: Activation | None = None) -> str:
        from fewbits.targets.onnx import contents

        return contents.written_as(fmt, weight.shape[1], activation)

    @property
    def library(self) -> str:
        return "onnxruntime"

    def how_to_run(self, shown: Path, context: int | None, embeds: bool) -> tuple[Command, ...]:
        lines = (
            "import numpy, onnxruntime",
            f"session = onnxruntime.InferenceSession({str(shown)!r})",
            "tokens = numpy.array([[1, 2, 3]], numpy.int64)  # by the tokenizer of the model; the graph keeps no cache",
            'outputs = session.run(None, {"input_ids": tokens})',
        )
        return (Command("its outputs, in Python", "\n".join(lines), "python"),)


def _stateful(config: Any) -> bool:
    """As transformers says of the model's class: state-space models, linear attention, and hybrids of these."""
    import transformers

    known = (getattr(transformers, name, None) for name in config.architectures or [])
    return any(getattr(cls, "_is_stateful", False) for cls in known)


TARGET = Onnx()
