"""A folder as mlx-lm publishes them, for Apple silicon: `mlx_lm.load`, `mlx_lm.generate`, `mlx_lm.server` and LM Studio take it as it is.

Names and layout are mlx-lm's own, see layout.py. Linear layers, embeddings and experts are quantized in any of MLX's ways, each layer in
its own (schemes.py); a stack of experts is one layer and has one. Scales and biases have the float type of the model: where two types
meet, MLX computes in float32.

package.py  mlx-lm, asked            settings.py  config.json          probes.py  a model as numbers of rows
layout.py   where its rows go        arrays.py    torch <-> MLX        contents.py  any such folder, read
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits import formats
from fewbits.artifact import manifest
from fewbits.errors import InputError
from fewbits.store.scratch import scratch_folder
from fewbits.targets import Target, WrongFileError
from fewbits.targets.compressed_tensors import shards
from fewbits.targets.compressed_tensors.shards import Array, Piece
from fewbits.targets.mlx import schemes
from fewbits.targets.mlx.schemes import Scheme
from fewbits.targets.mlx.settings import quantization, settings_for
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
    from fewbits.targets.mlx.layout import Layout
    from fewbits.targets.mlx.probes import Rows

PLAN = "fewbits-plan.json"
_FLOATS = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float16"}  # the scales of a weight that is stored so
_MOST_IN_FLOAT = 0.5  # of the weights: with more, a file of 4-bit weights is as large as one of 10 bits
_CASTS = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}
_AFFINE = (
    "affine2_g128", "affine2_g64", "affine2_g32", "affine3_g128", "affine3_g64", "affine3_g32", "affine4_g128", "affine4_g64",
    "affine4_g32", "affine5_g128", "affine5_g64", "affine5_g32", "affine6_g128", "affine6_g64", "affine8_g64", "affine8_g32",
)  # fmt: skip


class Mlx(Target):
    name = "mlx"
    about = "a folder for mlx-lm and LM Studio on Apple silicon"
    file_name = "model.mlx"
    runtime = "mlx"
    candidates = (*_AFFINE, *(f"{name}_bf16" for name in _AFFINE), "mxfp4", "nvfp4", "fp16", "bf16")
    marker = PLAN
    takes_drafts = True

    def __init__(self) -> None:
        self._in_float: dict[tuple[str, tuple[int, int]], str | None] = {}  # what `supports` learned of each weight

    def accepts(self, weight: Weight, fmt: Format) -> str | None:
        if fmt.is_cast:
            return None
        if weight.kind == "convolution":
            return "MLX holds convolutions in float only"
        if why_not := self._in_float.get((weight.name, weight.shape)):
            return why_not
        scheme = schemes.of(fmt)
        if isinstance(scheme, str):
            return scheme
        if weight.shape[1] % max(scheme.group, 32):  # rows of small floats in groups of 16 are whole words too
            return f"{weight.shape[1]} columns do not divide into MLX's groups of {max(scheme.group, 32)}"
        stored, wanted = schemes.float_type(fmt), _FLOATS[weight.dtype]
        if stored not in (None, wanted):
            return f"the scales of {fmt.name} are {stored}, and a model in {wanted} would be computed in float32"
        return None

    def nbytes(self, weight: Weight, fmt: Format, activation: Activation | None = None) -> int:
        scheme = None if fmt.is_cast else schemes.of(fmt)
        return scheme.nbytes(weight.shape) if isinstance(scheme, Scheme) else fmt.nbytes(weight.shape)

    def activation_block(self, weight: Weight, fmt: Format) -> int | None:
        return None  # activations are floats

    def supports(self, config: Any, tokenizer: Any) -> str | None:
        from fewbits.targets.mlx.layout import layout_of

        file = Path(config.name_or_path or ".") / "config.json"  # transformers 5 renames some of what it says, and mlx-lm does not
        content = json.loads(file.read_text() if config.name_or_path and file.is_file() else config.to_json_string(use_diff=False))
        try:
            layout = layout_of(settings_for(content, config), config)
        except InputError as failure:
            return str(failure.args[0])
        in_float = layout.in_float()
        if (share := layout.share_in_float()) > _MOST_IN_FLOAT:
            (name, _), why = min(in_float.items(), key=str)
            return f"{100 * share:.0f} % of its weights would stay in float, `{name}` among them: {why}"
        for name in layout.probes.matrices:
            module, shape = name.removesuffix(".weight"), layout.probes.matrix_shape(name)
            for expert in range(layout.probes.shapes[name][0]) if len(layout.probes.shapes[name]) > 2 else [None]:
                weight = module if expert is None else f"{name}.{expert}"
                self._in_float[weight, shape] = in_float.get((name, expert)) or in_float.get((name, None))
        return None

    def accepts_plan(self, plan: Plan, weights: Iterable[Weight]) -> str | None:
        first: dict[str, Weight] = {}
        for weight in weights:
            other = first.setdefault(weight.together or weight.name, weight)
            one, two = plan[other.name].format, plan[weight.name].format
            if one != two:
                return f"the experts of a layer are one tensor, and `{other.name}` has {one}, `{weight.name}` {two}"
        return None

    def written(self, path: Path) -> dict[str, str]:
        """By mlx-lm's own loader: what it takes each layer for."""
        from fewbits.targets.mlx import package

        package.needed()
        types = {}
        for name, module in package.loaded(path, lazy=True)[0].named_modules():
            if "scales" in module:
                scheme = Scheme(module.bits, module.group_size, module.mode)
                types[name] = scheme.name(str(module.scales.dtype).rpartition(".")[2])
            elif "weight" in module:
                types[name] = _CASTS.get(str(module.weight.dtype).rpartition(".")[2], "")
        return types

    def written_as(self, weight: Weight, fmt: Format, activation: Activation | None = None) -> str:
        scheme = None if fmt.is_cast else schemes.of(fmt)
        return scheme.name(schemes.float_type(fmt)) if isinstance(scheme, Scheme) else fmt.name

    def how_to_run(self, shown: Path, context: int | None, embeds: bool) -> tuple[Command, ...]:
        folder, room = shlex.quote(str(shown)), f" --max-kv-size {context}" if context else ""
        return (
            Command("text with mlx-lm", f'mlx_lm.generate --model {folder}{room} --prompt "{PROMPT}"'),
            Command("an endpoint", f"mlx_lm.server --model {folder}"),
        )

    def check(self, plan: Plan, weights: Iterable[Weight], path: Path) -> None:
        """By the names of the file: those that mlx-lm has for the rows of each weight."""
        from fewbits.model.checkpoints import folder
        from fewbits.targets.mlx.layout import layout_of

        types, named = self.written(path), {(weight.parameter, weight.expert): weight for weight in weights}
        config = folder.Folder(path).config
        layout = layout_of(settings_for(json.loads((path / "config.json").read_text()), config), config)
        for tensor, parts in layout.rows.items():
            weight = named[parts[0].parameter, parts[0].expert]
            wanted = self.written_as(weight, formats.get(plan[weight.name].format))
            if (stored := types.get(tensor.removesuffix(".weight"))) != wanted:
                says = f"has `{tensor}` as {stored}" if stored else f"has no `{tensor}`"
                said = f"the {self.name} folder {says}, and the plan says {wanted}"
                raise WrongFileError(said, "this is a bug of fewbits: please report it")

    def overhead(self, draft: Draft) -> int:
        with scratch_folder() as scratch:
            files = _prepared(draft, Path(scratch))
            beside = sum(file.stat().st_size for file in Path(scratch).iterdir())
        return beside + sum(shard.nbytes for shard in files) + len(shards.index(files) or "") - draft.plan.nbytes

    def write(self, artifact: Artifact, path: Path, progress: Progress[Any]) -> None:
        _write(artifact, path, progress)

    def write_draft(self, draft: Draft, path: Path, progress: Progress[Any]) -> None:
        _write(draft, path, progress)


def _write(source: Artifact | Draft, path: Path, progress: Progress[Any]) -> None:
    path.mkdir()
    files = _prepared(source, path)
    shards.write(files, path, progress)
    if listed := shards.index(files):
        (path / shards.INDEX).write_text(listed)


def _prepared(source: Artifact | Draft, folder: Path) -> list[shards.Shard]:
    """Everything but weights in the folder: tokenizer, generation config, config.json, the plan. And the files with the weights."""
    from fewbits.artifact.draft import Draft
    from fewbits.targets.mlx.layout import layout_of

    (source.model.checkpoint if isinstance(source, Draft) else source).save_assets(folder)
    settings = settings_for(json.loads((folder / "config.json").read_text()), source.config)
    layout = layout_of(settings, source.config)
    weights = {(weight.parameter, weight.expert): weight for weight in source.weights}
    layers = {}
    for tensor, parts in layout.rows.items():
        if scheme := _scheme(source.plan, tensor, parts, weights, layout):
            layers[tensor.removesuffix(".weight")] = scheme
    if said := quantization(layers):
        settings = settings | {"quantization": said, "quantization_config": said}  # the second is what the Hub shows
    (folder / "config.json").write_text(json.dumps(settings, indent=1, sort_keys=True) + "\n")
    (folder / PLAN).write_text(source.plan.to_json())
    pieces = [*_rows(source, layout, weights), *_values(source, layout, weights)]
    return shards.split(pieces, manifest.said(source.provenance, source.plan) | {"format": "mlx"}, shards.SHARD_BYTES)


Weights = Mapping[tuple[str, int | None], "Weight"]


def _scheme(plan: Plan, tensor: str, parts: tuple[Rows, ...], weights: Weights, layout: Layout) -> Scheme | None:
    """None: the tensor is in float."""
    names = {weights[part.parameter, part.expert].name for part in parts}
    used = {plan[name].format for name in names}
    if len(used) > 1:
        raise InputError(f"mlx-lm has `{tensor}` as one tensor, and the plan gives its parts {' and '.join(sorted(used))}", "give them one")
    fmt = formats.get(used.pop())
    if fmt.is_cast:
        return None
    scheme = schemes.of(fmt)
    if isinstance(scheme, str) or layout.layer(tensor) is None:
        why = scheme if isinstance(scheme, str) else f"mlx-lm holds `{tensor}` in float only"
        raise InputError(f"the plan gives `{min(names)}` {fmt.name}: {why}", "quantize with `--to mlx`")
    return scheme


def _rows(source: Artifact | Draft, layout: Layout, weights: Weights) -> Iterator[Piece]:
    for tensor, parts in layout.rows.items():
        members = [weights[part.parameter, part.expert] for part in parts]
        fmt = formats.get(source.plan[members[0].name].format)
        shape, scheme = layout.shapes[tensor], _scheme(source.plan, tensor, parts, weights, layout)
        if scheme is None:
            arrays = {tensor: Array(fmt.parts((1, 256))["values"].dtype, shape)}
        else:
            layer = tensor.removesuffix("weight")
            arrays = {f"{layer}{part}": each for part, each in scheme.arrays(shape, schemes.float_type(fmt) or "").items()}

        def load(
            parts: tuple[Rows, ...] = parts, members: list[Weight] = members, fmt: Format = fmt, arrays: Mapping[str, Array] = arrays
        ) -> dict[str, Tensor]:
            import torch

            pieces: list[dict[str, Tensor]] = []
            for part, weight in zip(parts, members, strict=True):
                stored = source.parts(weight)
                pieces.append(
                    {"weight": stored["values"].index_select(0, part.rows)} if fmt.is_cast else schemes.tensors(fmt, stored, part.rows)
                )
            joined = [torch.cat([piece[name] for piece in pieces]) for name in pieces[0]]
            return {name: each.reshape(array.shape) for (name, array), each in zip(arrays.items(), joined, strict=True)}

        yield Piece(arrays, load)


def _values(source: Artifact | Draft, layout: Layout, weights: Weights) -> Iterator[Piece]:
    given = {name: source.tensor(name) for name in source.rest}
    for name in layout.probes.shapes:
        if name not in given and (name in layout.by_value or name not in layout.probes.matrices):
            given[name] = _joined(source, [weight for key, weight in weights.items() if key[0] == name], layout.probes.shapes[name])
    for name, tensor in layout.values(given).items():
        yield Piece({name: Array(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))}, lambda n=name, t=tensor: {n: t})  # type: ignore[misc]


def _joined(source: Artifact | Draft, members: list[Weight], shape: tuple[int, ...]) -> Tensor:
    """A parameter as transformers has it."""
    import torch

    matrices = [source.parts(weight)["values"] for weight in members]
    turned = [matrix.T if weight.transposed else matrix for weight, matrix in zip(members, matrices, strict=True)]
    return (turned[0] if members[0].expert is None else torch.stack(turned)).reshape(shape)


TARGET = Mlx()
