"""Packed weights inside torch modules: transformers' modules stay as they are, with a weight's parts as buffers instead of a parameter.

Where a module reads its `weight` it finds a `PackedWeight`. It is no tensor; torch hands products and lookups with it to our kernels. So a
linear layer, GPT-2's Conv1D, a scaled embedding or an expert needs no class of our own, whatever its forward does around the product.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from fewbits import formats, kernels
from fewbits.errors import InputError
from fewbits.formats.runtime import activations
from fewbits.inference.decode_matrices import rows_of
from fewbits.kernels import torch_ops, w8a8

if TYPE_CHECKING:
    from fewbits.artifact import Artifact
    from fewbits.formats import Format, Parts
    from fewbits.formats.runtime.activations import Activation
    from fewbits.model.weights import Weight

_MATMULS = {torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__}


class PackedWeight:
    """A packed weight in the place of a parameter. Any torch function other than a product or a lookup gets the decoded weight: slow, but
    always right."""

    _is_hf_initialized = True  # so that transformers does not fill it with random numbers

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
        """`holder` gets the parts as buffers, on the meta device until they are loaded. `shape` is that of the parameter."""
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
        """The buffers. Refuses those whose type was changed: casting a whole module casts scales and codes too, which destroys them."""
        parts: Parts = {}
        for name, dtype in self._types.items():
            part = self._holder._buffers[name]
            assert part is not None
            if part.dtype != dtype:
                message = f"`{self._weight.name}.{name}` was cast from {_name(dtype)} to {_name(part.dtype)}"
                raise InputError(message, "a packed model has one type: give `dtype=` to `from_pretrained` instead")
            parts[name] = part
        return parts

    def restore_types(self) -> None:
        """Undoes what transformers does to modules that some models keep in float32: it loads their scales as float32 too, which loses
        nothing."""
        for name, dtype in self._types.items():
            setattr(self._holder, name, self._holder.get_buffer(name).to(dtype))

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x (..., cols) -> (..., rows). Every product ends up here."""
        rows, cols = self._weight.shape
        flat, parts, exact = x.reshape(-1, cols), self.parts, self.exact
        if not len(flat):
            return x.new_empty((*x.shape[:-1], rows))
        if self.activation is not None and self._is_integers() and self.activation == activations.Activation("int8"):
            out = w8a8.linear(flat, parts["codes"], parts["scales"], bias)
            return out.to(x.dtype).reshape(*x.shape[:-1], rows)
        if self.activation is not None:
            flat, exact = activations.quantized(flat, self.activation), True  # rounded as the plan says, and not to int8 once more
        if torch.compiler.is_compiling():  # one operator that the compiler knows, instead of calls that it would trace into
            out = torch_ops.matmul(flat, list(parts.values()), self._format.name, rows, bias, exact)
        else:
            out = self._kernel.matmul(flat, parts, self._weight.shape, bias, exact)
        return out.to(x.dtype).reshape(*x.shape[:-1], rows)

    def rows(self, ids: Tensor) -> Tensor:  # ids (...) -> (..., cols)
        """A lookup, which decodes these rows only."""
        rows, cols = self._weight.shape
        flat = ids.reshape(-1)
        if not len(flat):
            return torch.empty((*ids.shape, cols), dtype=self.dtype)
        some = rows_of(self.parts, rows, flat)
        if torch.compiler.is_compiling():
            out: Tensor = torch_ops.decode(list(some.values()), self._format.name, len(flat), cols)
        else:
            out = self._kernel.decode(some, (len(flat), cols))
        return out.to(self.dtype).reshape(*ids.shape, cols)

    def decoded(self) -> Tensor:
        """The parameter as it would be in a float module: with its shape, order and type."""
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
        out = _by_kernels(func, args, kwargs or {})
        return _with_decoded(func, args, kwargs or {}) if out is None else out

    def _is_integers(self) -> bool:
        """One int8 code per weight and one scale per row, which w8a8 multiplies in integers alone."""
        parts = self._format.parts(self._weight.shape)
        rows, cols = self._weight.shape
        return parts.keys() == {"codes", "scales"} and parts["codes"] == ("int8", (rows, cols)) and parts["scales"].shape == (rows, 1)


class PackedExperts(nn.Module):
    """The experts of a mixture, in the place of their three-dimensional parameter; each has its own format. `[3]` is the fourth."""

    _is_hf_initialized = True

    def __init__(self, shape: torch.Size, dtype: torch.dtype) -> None:
        super().__init__()
        self.shape, self.dtype = shape, dtype
        self.weights: dict[int, PackedWeight] = {}

    def __getitem__(self, index: int | Tensor) -> PackedWeight:
        return self.weights[int(index)]

    def __len__(self) -> int:
        return len(self.weights)

    def decoded(self) -> Tensor:
        return torch.stack([self.weights[index].decoded() for index in range(len(self))])

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        return _with_decoded(func, args, kwargs or {})


def _by_kernels(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The result of a product with a packed weight on the right, or of a lookup in one; None for any other function."""
    if func is F.linear and len(args) > 1 and isinstance(args[1], PackedWeight) and not args[1]._weight.transposed:
        return args[1].product(args[0], args[2] if len(args) > 2 else kwargs.get("bias"))
    if func in _MATMULS and len(args) == 2 and isinstance(args[1], PackedWeight) and args[1]._weight.transposed:
        return args[1].product(args[0])
    if func is torch.addmm and len(args) == 3 and not kwargs and isinstance(args[2], PackedWeight) and args[2]._weight.transposed:
        return args[2].product(args[1]) + args[0] if args[0].dim() != 1 else args[2].product(args[1], args[0])
    if func is F.embedding and len(args) > 1 and isinstance(args[1], PackedWeight) and kwargs.get("max_norm") is None:
        return args[1].rows(args[0])
    return None


def _with_decoded(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    plain, named = tree_map(lambda each: each.decoded() if isinstance(each, PackedWeight | PackedExperts) else each, (args, kwargs))
    return func(*plain, **named)


def install(model: Any, artifact: Artifact, dtype: torch.dtype, exact: bool) -> None:
    """Puts packed weights in the place of the parameters that the artifact has weights for. Loading fills them later."""
    modules: Mapping[str, nn.Module] = dict(model.named_modules())
    module_of = _module_names(model.base_model_prefix, modules)
    tied: set[str] = set()
    for weight in artifact.weights:
        entry = artifact.plan[weight.name]
        fmt, is_convolution = formats.get(entry.format), weight.kind == "convolution"
        rounded = None if is_convolution else entry.activation
        make = partial(PackedWeight, weight=weight, fmt=fmt, dtype=dtype, activation=rounded, exact=exact)
        if weight.expert is not None:
            owner, _, parameter = weight.parameter.rpartition(".")
            if (name := module_of(owner)) is not None:
                _add_expert(modules[name], parameter, weight, dtype, make)
            continue
        if (name := module_of(weight.name)) is None:
            continue  # such as the output, which a class without a head does not have
        holder = modules[name]
        packed = make(holder, _remove_parameter(holder, "weight"))
        _hold(holder, packed, entry.format)
        if weight.tied_to and (other := module_of(weight.tied_to)) is not None:
            _remove_parameter(modules[other], "weight")
            _hold(modules[other], packed, f"{entry.format}, tied to {weight.name}")
            tied |= {f"{other}.weight", f"{name}.weight"}
        if is_convolution and entry.activation is not None:  # its inputs are not the rows of a matrix: a hook rounds them
            from fewbits.inference.rounded_inputs import rounding_hook

            holder.register_forward_pre_hook(rounding_hook(entry.activation))
    model.all_tied_weights_keys = _untied(model.all_tied_weights_keys, tied)  # they share one: nothing is left to tie
    model._tied_weights_keys = _untied(model._tied_weights_keys or {}, tied)


def packed_weights(model: nn.Module) -> list[PackedWeight]:
    """Every packed weight of a module, each once."""
    weights: dict[int, PackedWeight] = {}
    for module in model.modules():
        held = module.weights.values() if isinstance(module, PackedExperts) else [module.__dict__.get("weight")]
        weights |= {id(each): each for each in held if isinstance(each, PackedWeight)}
    return list(weights.values())


def _add_expert(owner: nn.Module, name: str, weight: Weight, dtype: torch.dtype, make: Callable[..., PackedWeight]) -> None:
    if name in owner._parameters:
        owner.add_module(name, PackedExperts(_remove_parameter(owner, name), dtype))
    experts = owner.get_submodule(name)
    assert isinstance(experts, PackedExperts) and weight.expert is not None
    holder = nn.Module()
    experts.add_module(str(weight.expert), holder)
    experts.weights[weight.expert] = make(holder, experts.shape[1:])


def _hold(module: nn.Module, packed: PackedWeight, described: str) -> None:
    module.weight = packed  # type: ignore[assignment]  # a plain attribute, now that no parameter has its name
    shown = ", ".join(filter(None, (module.extra_repr(), described)))
    module.extra_repr = partial(str, shown)  # type: ignore[method-assign]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _remove_parameter(module: nn.Module, name: str) -> torch.Size:
    parameter = module._parameters.pop(name)
    assert parameter is not None
    return parameter.shape


def _module_names(prefix: str, modules: Mapping[str, nn.Module]) -> Callable[[str], str | None]:
    """Finds a module by its name in the artifact: names in a base model lack the prefix that the whole model puts before them."""

    def module_of(name: str) -> str | None:
        candidates = (name, name.removeprefix(f"{prefix}."), f"{prefix}.{name}")
        return next((each for each in candidates if each in modules), None)

    return module_of


def _untied(keys: Mapping[str, str], gone: set[str]) -> dict[str, str]:
    return {target: source for target, source in keys.items() if target not in gone and source not in gone}
