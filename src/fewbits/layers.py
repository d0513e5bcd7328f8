"""Packed weights inside a torch module: transformers' modules stay as they are, with a weight's parts as buffers instead of a parameter.

Where a module reads its `weight` it finds a `Matrix`: no tensor, but products and lookups with it are the kernels'. So a linear layer,
GPT-2's Conv1D, a scaled embedding or an expert needs no twin here, whatever its own forward does around the product.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from fewbits import activations, formats, kernels
from fewbits.errors import InputError
from fewbits.kernels import ops, w8a8

if TYPE_CHECKING:
    from fewbits.activations import Activation
    from fewbits.artifact import Artifact
    from fewbits.formats import Format, Parts
    from fewbits.model import Weight

_MATMULS = {torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__}


class Matrix:
    """A packed weight, in the place of a parameter. What torch is asked to do with it beside products and lookups gets decoded values,
    for as long as that takes: right, whatever it is."""

    _is_hf_initialized = True  # says to transformers that it is not left to be filled with random numbers

    def __init__(
        self,
        holder: nn.Module,
        shape: torch.Size,
        *,
        weight: Weight,
        fmt: Format,
        dtype: torch.dtype,
        activation: Activation | None = None,
        exact: bool = False,
    ) -> None:
        """`holder` gets the parts as buffers, on the meta device until they are loaded. `shape` is the parameter's own."""
        self._holder, self._weight, self._format = holder, weight, fmt
        self.shape, self.dtype, self.activation, self.exact = shape, dtype, activation, exact
        specs = fmt.parts(weight.shape)
        self._types: dict[str, torch.dtype] = {name: getattr(torch, spec.dtype) for name, spec in specs.items()}
        for name, dtype_of_part in self._types.items():
            holder.register_buffer(name, torch.empty(specs[name].shape, dtype=dtype_of_part, device="meta"))
        self._kernel = kernels.bind(fmt, weight.shape)

    @property
    def device(self) -> torch.device:
        return next(iter(self.parts.values())).device

    @property
    def parts(self) -> Parts:
        """As they were loaded: a module that is cast as a whole casts its buffers too, and half a scale is no scale."""
        found: Parts = {}
        for name, dtype in self._types.items():
            part = self._holder._buffers[name]
            assert part is not None
            if part.dtype != dtype:
                message = f"`{self._weight.name}.{name}` was cast from {_name(dtype)} to {_name(part.dtype)}"
                raise InputError(message, "a packed model has one type: give `dtype=` to `from_pretrained` instead")
            found[name] = part
        return found

    def restore_types(self) -> None:
        """transformers loads what some models keep in float32 as that, scales as well: they are halves, so nothing was lost."""
        for name, dtype in self._types.items():
            setattr(self._holder, name, self._holder.get_buffer(name).to(dtype))

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x (..., cols) -> (..., rows). The one place that multiplies."""
        rows, cols = self._weight.shape
        flat, parts, exact = x.reshape(-1, cols), self.parts, self.exact
        if not len(flat):
            return x.new_empty((*x.shape[:-1], rows))
        if self.activation is not None and self._is_integers() and self.activation == activations.Activation("int8"):
            out = w8a8.linear(flat, parts["codes"], parts["scales"], bias)
            return out.to(x.dtype).reshape(*x.shape[:-1], rows)
        if self.activation is not None:
            flat, exact = activations.quantized(flat, self.activation), True  # rounded as the plan says, and not once more
        if torch.compiler.is_compiling():  # an operator that the compiler knows, in the place of calls that it would look into
            out = ops.matmul(flat, list(parts.values()), self._format.name, rows, bias, exact)
        else:
            out = self._kernel.matmul(flat, parts, self._weight.shape, bias, exact)
        return out.to(x.dtype).reshape(*x.shape[:-1], rows)

    def rows(self, ids: Tensor) -> Tensor:  # ids (...) -> (..., cols)
        """Only these rows are decoded."""
        rows, cols = self._weight.shape
        flat = ids.reshape(-1)
        if not len(flat):
            return torch.empty((*ids.shape, cols), dtype=self.dtype)
        some = {name: part if len(part) != rows else part.view(torch.uint8)[flat].view(part.dtype) for name, part in self.parts.items()}
        if torch.compiler.is_compiling():
            out: Tensor = ops.decode(list(some.values()), self._format.name, len(flat), cols)
        else:
            out = self._kernel.decode(some, (len(flat), cols))
        return out.to(self.dtype).reshape(*ids.shape, cols)

    def decoded(self) -> Tensor:
        """As the parameter would be: its shape, its order, its type."""
        w = self._kernel.decode(self.parts, self._weight.shape).to(self.dtype)
        return w.T if self._weight.transposed else w.reshape(self.shape)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return len(self.shape)

    def numel(self) -> int:
        return self.shape.numel()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.decoded(), name)

    def __getitem__(self, index: Any) -> Any:
        return self.decoded()[index]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        found = _computed(func, args, kwargs or {})
        return _with_decoded(func, args, kwargs or {}) if found is None else found

    def _is_integers(self) -> bool:
        """One int8 code per weight and one scale per row: what w8a8 multiplies without a single float."""
        parts = self._format.parts(self._weight.shape)
        rows, cols = self._weight.shape
        return parts.keys() == {"codes", "scales"} and parts["codes"] == ("int8", (rows, cols)) and parts["scales"].shape == (rows, 1)


class Stack(nn.Module):
    """The matrices of a stacked parameter (the experts of a mixture), each with its own format: `stack[3]` is the fourth."""

    _is_hf_initialized = True

    def __init__(self, shape: torch.Size, dtype: torch.dtype) -> None:
        super().__init__()
        self.shape, self.dtype = shape, dtype
        self.matrices: dict[int, Matrix] = {}

    def __getitem__(self, index: int | Tensor) -> Matrix:
        return self.matrices[int(index)]

    def __len__(self) -> int:
        return len(self.matrices)

    def decoded(self) -> Tensor:
        return torch.stack([self.matrices[index].decoded() for index in range(len(self))])

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        return _with_decoded(func, args, kwargs or {})


def _computed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """By the kernels, if it is a product with the matrix on the right or a lookup in it; None: something else."""
    if func is F.linear and len(args) > 1 and isinstance(args[1], Matrix) and not args[1]._weight.transposed:
        return args[1].product(args[0], args[2] if len(args) > 2 else kwargs.get("bias"))
    if func in _MATMULS and len(args) == 2 and isinstance(args[1], Matrix) and args[1]._weight.transposed:
        return args[1].product(args[0])
    if func is torch.addmm and len(args) == 3 and not kwargs and isinstance(args[2], Matrix) and args[2]._weight.transposed:
        return args[2].product(args[1]) + args[0] if args[0].dim() != 1 else args[2].product(args[1], args[0])
    if func is F.embedding and len(args) > 1 and isinstance(args[1], Matrix) and kwargs.get("max_norm") is None:
        return args[1].rows(args[0])
    return None


def _with_decoded(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    plain = tree_map(lambda each: each.decoded() if isinstance(each, Matrix | Stack) else each, (args, kwargs))
    return func(*plain[0], **plain[1])


def install(model: Any, artifact: Artifact, dtype: torch.dtype, exact: bool) -> None:
    """Every weight of the artifact that this module has a place for becomes a matrix without numbers yet: loading fills its parts."""
    modules: Mapping[str, nn.Module] = dict(model.named_modules())
    place = _placing(model.base_model_prefix, modules)
    tied: set[str] = set()
    for weight in artifact.weights:
        entry = artifact.plan[weight.name]
        fmt, is_convolution = formats.get(entry.format), weight.kind == "convolution"
        rounded = None if is_convolution else entry.activation
        make = partial(Matrix, weight=weight, fmt=fmt, dtype=dtype, activation=rounded, exact=exact)
        if weight.expert is not None:
            owner, _, stack = weight.parameter.rpartition(".")
            if (found := place(owner)) is not None:
                _stacked(modules[found], stack, weight, dtype, make)
            continue
        if (found := place(weight.name)) is None:
            continue  # an output that this class does without
        holder = modules[found]
        matrix = make(holder, _dropped(holder, "weight"))
        _hold(holder, matrix, entry.format)
        if weight.tied_to and (other := place(weight.tied_to)) is not None:
            _dropped(modules[other], "weight")
            _hold(modules[other], matrix, f"{entry.format}, tied to {weight.name}")
            tied |= {f"{other}.weight", f"{found}.weight"}
        if is_convolution and entry.activation is not None:  # its inputs are no rows of a matrix
            from fewbits.runtimes.torch import _rounding_hook

            holder.register_forward_pre_hook(_rounding_hook(entry.activation))
    model.all_tied_weights_keys = _untied(model.all_tied_weights_keys, tied)  # they share a matrix: transformers has nothing left to tie
    model._tied_weights_keys = _untied(model._tied_weights_keys or {}, tied)


def matrices(model: nn.Module) -> list[Matrix]:
    """Every packed weight of a module, each once."""
    found: dict[int, Matrix] = {}
    for module in model.modules():
        held = module.matrices.values() if isinstance(module, Stack) else [module.__dict__.get("weight")]
        found |= {id(each): each for each in held if isinstance(each, Matrix)}
    return list(found.values())


def _stacked(owner: nn.Module, name: str, weight: Weight, dtype: torch.dtype, make: Callable[[nn.Module, torch.Size], Matrix]) -> None:
    if name in owner._parameters:
        owner.add_module(name, Stack(_dropped(owner, name), dtype))
    stack = owner.get_submodule(name)
    assert isinstance(stack, Stack) and weight.expert is not None
    holder = nn.Module()
    stack.add_module(str(weight.expert), holder)
    stack.matrices[weight.expert] = make(holder, stack.shape[1:])


def _hold(module: nn.Module, matrix: Matrix, described: str) -> None:
    module.weight = matrix  # type: ignore[assignment]  # an attribute as any other, now that no parameter has its name
    module.extra_repr = partial(_joined, module.extra_repr(), described)  # type: ignore[method-assign]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _joined(usual: str, more: str) -> str:
    return f"{usual}, {more}" if usual else more


def _dropped(module: nn.Module, name: str) -> torch.Size:
    parameter = module._parameters.pop(name)
    assert parameter is not None
    return parameter.shape


def _placing(prefix: str, modules: Mapping[str, nn.Module]) -> Callable[[str], str | None]:
    """A module by the name that it has in the artifact: a base model is without the prefix that the whole model puts before it."""

    def place(name: str) -> str | None:
        candidates = (name, name.removeprefix(f"{prefix}."), f"{prefix}.{name}")
        return next((each for each in candidates if each in modules), None)

    return place


def _untied(keys: Mapping[str, str], gone: set[str]) -> dict[str, str]:
    return {target: source for target, source in keys.items() if target not in gone and source not in gone}
