"""A checkpoint as the planner sees it: a list of weights, each a (rows, cols) matrix, and the few tensors that are kept.

The module graph says what is a weight, and a small trial what lies stacked in one: no architecture has code of its own here, and
`_KINDS` is the only place that knows layer names.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits import checkpoints
from fewbits.checkpoints import Checkpoint, limits
from fewbits.checkpoints.converted import converted
from fewbits.checkpoints.folder import first_line, inside, read_json
from fewbits.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fewbits.rewrites.rescaling import Rewrite

_ABSURD = 1e30  # no weight is so large, and the square of one would be infinite in float32
_KINDS = (
    (r"(q|k|v|o|qkv|out)_proj|c_attn|attn\.c_proj|attention|attn", "attention"),
    (r"gate_proj|up_proj|down_proj|gate_up_proj|mlp|c_fc|fc\d|intermediate|dense", "mlp"),
    (r"lm_head|output|score|classifier", "output"),
)


@dataclass(frozen=True)
class Weight:
    """One matrix: y = x @ W.T with W (rows, cols), whatever the module calls or transposes it.

    A convolution's is (out, in / groups * kernel): x is what the kernel covers. An expert's is its slice of a stacked parameter.
    """

    name: str  # path of the module: `model.layers.0.mlp.up_proj`; of an expert: `model.layers.0.mlp.experts.down_proj.3`
    shape: tuple[int, int]
    kind: str  # attention, mlp, embedding, output, convolution, other
    dtype: str  # the cast format that keeps it as it is
    transposed: bool = False  # GPT-2's Conv1D stores (cols, rows), and so do some stacks of experts
    tied_to: str | None = None  # the second module that reads the same matrix (an output tied to the embedding)
    together: str | None = None  # those that say the same must share a format where a file holds them as one tensor
    expert: int | None = None  # its place in the stacked parameter

    @property
    def parameter(self) -> str:
        """The name of the parameter that it lies in."""
        return f"{self.name}.weight" if self.expert is None else self.name.rpartition(".")[0]

    def view(self, parameter: Tensor) -> Tensor:
        """Itself, (rows, cols), in its parameter or in whatever is laid out like it (a gradient). Not a copy if that is contiguous."""
        own = parameter if self.expert is None else parameter[self.expert]
        return own.T if self.transposed else own.flatten(1)


class Model:
    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self._skeleton = _skeleton(self.config, self.path, len(checkpoint.names()))
        self.checkpoint = converted(checkpoint, self._skeleton)
        self._stored_names = set(self.checkpoint.names())
        self.weights, self.rest = self._walk()

    @property
    def path(self) -> Path:
        return self.checkpoint.path

    @property
    def config(self) -> Any:
        return self.checkpoint.config

    def load(self, weight: Weight) -> Tensor:
        """(rows, cols) float32; non-finite values are refused by name."""
        stored = self._stored(weight.parameter)
        if weight.expert is None:
            matrix = weight.view(self.checkpoint.load(stored))
        else:
            own = self.checkpoint.load_slice(stored, weight.expert)
            matrix = own.T if weight.transposed else own
        return _finite(_aligned(matrix.float().contiguous()), weight.name)

    def tensor(self, name: str) -> Tensor:
        """One of `rest`, by the name of its parameter."""
        return _finite(self.checkpoint.load(self._stored(name)), name)

    def module(self) -> nn.Module:
        """The float32 transformers module: the reference that everything is judged against."""
        matrices = ((weight, self.load(weight)) for weight in self.weights)
        return filled_module(self.config, matrices, ((name, self.tensor(name)) for name in self.rest))

    def rewritten(self, rewrite: Rewrite) -> Model:
        """The same function in other numbers: channels are rescaled as they are loaded."""
        from fewbits.rewrites.rescaling import RewrittenModel

        return RewrittenModel(self, rewrite)

    @cached_property
    def tokenizer(self) -> Any:
        inside = getattr(self.checkpoint, "tokenizer", None)  # a GGUF carries its own
        return inside or load_tokenizer(self.path)

    @cached_property
    def fingerprint(self) -> str:
        """sha256 over the source files: every output names it."""
        digest = hashlib.sha256()
        for file in self.checkpoint.files():
            with file.open("rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
        return digest.hexdigest()

    def _walk(self) -> tuple[tuple[Weight, ...], tuple[str, ...]]:
        from torch import nn
        from transformers.pytorch_utils import Conv1D

        from fewbits import stacks

        weights: list[Weight] = []
        seen: dict[int, int] = {}  # id of the parameter -> index of the weight that holds it
        inside: set[str] = set()
        stored = self._all_checked()
        transposed_stacks = stacks.find(self._skeleton, self.config)  # multiplies: by now every size is one that the file has
        for name, module in self._skeleton.named_modules():
            for own, stack in module.named_parameters(name, recurse=False):
                if (transposed := transposed_stacks.get(own)) is not None:
                    inside.add(own)
                    weights += self._experts(own, self.checkpoint.dtype(stored[own]), tuple(stack.shape), transposed)
            convolution = isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) and "weight" in module._parameters
            if not convolution and not isinstance(module, nn.Linear | nn.Embedding | Conv1D):
                continue
            parameter = module.weight
            inside.add(f"{name}.weight")
            if id(parameter) in seen:
                first = weights[seen[id(parameter)]]
                weights[seen[id(parameter)]] = replace(first, tied_to=name)
                continue
            transposed = isinstance(module, Conv1D)
            rows, cols = parameter.flatten(1).shape
            if transposed:
                rows, cols = cols, rows
            kind = "convolution" if convolution else "embedding" if isinstance(module, nn.Embedding) else _kind(name)
            seen[id(parameter)] = len(weights)
            weights.append(Weight(name, (rows, cols), kind, self.checkpoint.dtype(stored[f"{name}.weight"]), transposed))
        return tuple(weights), tuple(name for name in stored if name not in inside)

    def _all_checked(self) -> dict[str, str]:
        """The checkpoint's name of every parameter and buffer that it must have, in the shape that it must have."""
        one_name_each = dict(self._skeleton.named_parameters())
        every = {name for name, _ in self._skeleton.named_parameters(remove_duplicate=False)}  # a tied bias has two, and is stored once
        buffers = {name: tensor for name, tensor in self._skeleton.state_dict().items() if name not in every}
        return {name: self._checked(name, tuple(tensor.shape)) for name, tensor in (one_name_each | buffers).items()}

    def _experts(self, stack: str, dtype: str, shape: tuple[int, ...], transposed: bool) -> list[Weight]:
        count, *sides = shape
        rows, cols = reversed(sides) if transposed else sides
        kind = _kind(stack)
        return [Weight(f"{stack}.{i}", (rows, cols), kind, dtype, transposed, together=stack, expert=i) for i in range(count)]

    def _checked(self, name: str, shape: tuple[int, ...]) -> str:
        stored = self._stored(name)
        if (found := self.checkpoint.shape(stored)) != shape:
            owner = name.removesuffix(".weight")
            raise InputError(f"`{owner}` is {found} in the weights and {shape} by config.json", "the two do not belong together")
        return stored

    def _stored(self, name: str) -> str:
        """The checkpoint's name of a parameter: some files leave the base model's prefix out, some put it in."""
        prefix = f"{getattr(self._skeleton, 'base_model_prefix', '')}."
        for candidate in (name, name.removeprefix(prefix), prefix + name):
            if candidate in self._stored_names:
                return candidate
        raise InputError(f"`{name}` is missing from `{self.path}`", "the weights do not belong to this config.json, or are incomplete")


def open(where: str | Path, offline: bool = False) -> Model:
    return Model(checkpoints.open(where, offline))


def empty_module(config: Any) -> nn.Module:
    """The float32 module with its weights not yet set (skipping the random initialisation, which costs more than loading)."""
    import torch
    from transformers.initialization import no_init_weights

    with no_init_weights(), torch.no_grad():
        module = _model_class(config)(config)
    module.tie_weights()
    floats: nn.Module = module.float()
    return floats


def filled_module(config: Any, matrices: Iterable[tuple[Weight, Tensor]], rest: Iterable[tuple[str, Tensor]]) -> nn.Module:
    """The float32 module with these weights and these other tensors in it, taken one at a time."""
    import torch

    module = empty_module(config)
    own = dict(module.named_parameters()) | dict(module.named_buffers())
    with torch.no_grad():
        for weight, matrix in matrices:
            weight.view(own[weight.parameter]).copy_(matrix)
        for name, tensor in rest:
            if tensor.shape != own[name].shape:  # one value would be copied to every place
                shapes = f"{tuple(tensor.shape)} in the weights and {tuple(own[name].shape)} by config.json"
                raise InputError(f"`{name}` is {shapes}", "the two do not belong together")
            own[name].copy_(tensor)
    return module.eval()


def check_fit(config: Any, weights: Iterable[Weight], rest: Iterable[str], path: Path) -> None:
    """That a module of this config has these weights and no others, before memory is taken for what the config says."""
    weights, rest = list(weights), list(rest)
    skeleton = _skeleton(config, path, len(weights) + len(rest))
    parameters = dict(skeleton.named_parameters())
    known, hint = set(rest), "the two do not belong together"
    for weight in weights:
        known.add(weight.parameter)
        try:
            shape: tuple[int, ...] | None = tuple(weight.view(parameters[weight.parameter]).shape)
        except (LookupError, TypeError, RuntimeError):  # no such parameter, no such expert in it, or not enough dimensions
            shape = None
        if shape != weight.shape:
            raise InputError(f"`{weight.name}` is {weight.shape} in `{path}` and {shape or 'not there'} by its config.json", hint)
    if unknown := next((name for name in parameters if name not in known), None):
        raise InputError(f"`{path}` does not hold `{unknown}`, which its config.json asks for", hint)


def _skeleton(config: Any, path: Path, tensors: int) -> nn.Module:
    """The module without its values, for a file that has so many tensors."""
    import torch

    from fewbits import stacks

    config = stacks.looping(config)
    kind = _model_class(config)
    try:
        with torch.device("meta"), limits.building(tensors):
            skeleton: nn.Module = kind(config)
    except Exception as failure:  # sizes that do not go together: each architecture trips over them in its own way
        reason = f"{type(failure).__name__}: {first_line(failure)}"
        raise InputError(f"`{path}` describes no {kind.__name__} that can be built: {reason}", "its config is damaged") from failure
    return skeleton


def load_tokenizer(folder: Path) -> Any:
    if folder.suffix.lower() == ".gguf":
        from fewbits.checkpoints.gguf_file import GgufFile

        return GgufFile(folder).tokenizer
    from transformers import AutoTokenizer

    if (vocabulary := folder / "tokenizer.json").is_file():
        limits.check_vocabulary(
            read_json(inside(folder, vocabulary), "copy it from where the model came from", limits.TOKENIZER), vocabulary
        )
    try:
        return _without_cache(AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False))
    except BaseException as failure:
        if isinstance(failure, KeyboardInterrupt | SystemExit):
            raise
        hint = "copy tokenizer.json and tokenizer_config.json from where the model came from"  # a panic in Rust is no Exception
        raise InputError(f"`{folder}` has no tokenizer that can be read", hint) from failure


def _without_cache(tokenizer: Any) -> Any:
    """tokenizers 0.23 never gives the cache of a tokenizer that has encoded back, 2 MB each: a process that opens many would grow."""
    vocabulary: Any = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    if vocabulary is not None and hasattr(vocabulary, "_resize_cache"):
        vocabulary._resize_cache(0)
    return tokenizer


def _aligned(matrix: Tensor) -> Tensor:
    """The same, where a cache line begins: a product of one row adds up in another order where it does not, and a file begins anywhere."""
    return matrix.clone() if matrix.data_ptr() % 64 else matrix


def _finite(tensor: Tensor, name: str) -> Tensor:
    """The same, or an error that names the place of a value that is none, or so large that no product of it is one."""
    if not tensor.numel() or not tensor.is_floating_point():
        return tensor
    low, high = tensor.aminmax()  # a NaN comes through; one pass, where asking every element takes three
    if float(low) >= -_ABSURD and float(high) <= _ABSURD:
        return tensor
    place = tuple((~(tensor.float().abs() <= _ABSURD)).nonzero()[0].tolist())
    where = f"row {place[0]}, column {place[1]}" if len(place) == 2 else f"position {place[0]}" if len(place) == 1 else f"{place}"
    raise InputError(f"`{name}` holds {tensor[place].item():g} at {where}", "the checkpoint is damaged")


def _model_class(config: Any) -> Any:
    import transformers
    from torch import nn

    names = config.architectures or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise InputError("the architectures of config.json are no list of names", "its config is damaged")
    for name in names:
        try:
            found = getattr(transformers, name, None)
        except Exception as failure:  # transformers imports on demand, and not all that it names is installed
            raise InputError(f"transformers cannot load `{name}`: {first_line(failure)}", "is it the name of a model's class?") from failure
        if found is not None:
            if not (isinstance(found, type) and issubclass(found, nn.Module)):
                raise InputError(f"`{name}` is no model of transformers", "the architectures of config.json are damaged")
            return found
    try:
        return transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    except KeyError:
        named = ", ".join(names) or config.model_type
        raise InputError(
            f"the installed transformers knows no architecture `{named}`", "update transformers; remote code is never run"
        ) from None


def _kind(name: str) -> str:
    tail = ".".join(name.split(".")[-2:])
    return next((kind for pattern, kind in _KINDS if re.search(pattern, tail)), "other")
