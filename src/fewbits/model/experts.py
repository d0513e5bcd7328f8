"""The experts of a mixture: matrices in one three-dimensional parameter, found by watching the products with them.

No architecture is named here. A product with one expert is recognised by the memory that its matrix lies in. Whether the parameter holds
(rows, cols) or (cols, rows) shows in how a small input is multiplied with it, and which tokens an expert is given in how they are gathered.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fewbits.formats.runtime.kv import text_config

_MATMULS = {torch.matmul, torch.mm, torch.bmm, Tensor.matmul, Tensor.mm, Tensor.bmm, Tensor.__matmul__}
_PROBED_TOKENS = 4


@dataclass(frozen=True, eq=False)
class Product:
    """Inputs of one expert, multiplied with its matrix."""

    parameter: str  # its name
    expert: int
    x: Tensor  # (tokens, cols)
    transposed: bool  # the parameter holds (cols, rows)
    tokens: Tensor | None  # indices of these tokens among those given to `next_call`; None: unknown
    _out: Tensor
    _of_out: Callable[[Tensor], Tensor]

    @property
    def weight(self) -> str:
        """The expert's name among the weights of the model."""
        return f"{self.parameter}.{self.expert}"

    def on_gradient(self, see: Callable[[Tensor], None]) -> None:  # see (tokens, rows)
        self._out.register_hook(lambda gradient: see(self._of_out(gradient)))


class Products(TorchFunctionMode):
    """While entered, shows every product with an expert of these parameters to `see`. `change` may return other inputs to multiply."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        see: Callable[[Product], None] = lambda _: None,
        change: Callable[[str, int, Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        self._parameters = {parameter.untyped_storage().data_ptr(): (name, parameter) for name, parameter in parameters.items()}
        self._see, self._change = see, change
        self.next_call(0)

    def next_call(self, tokens: int) -> None:
        """The module is about to be called with so many tokens; 0 if nobody asks which of them an expert is given."""
        self._count = tokens
        self._gathered: tuple[Tensor, Tensor] | None = None  # the last tensor of gathered tokens, and their indices
        self._given: dict[int, Tensor] = {}  # expert -> its tokens: its second matrix reads what its first one made of them

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func is F.linear or func in _MATMULS:
            matrices = self.matrices_in(args[1]) if len(args) > 1 and isinstance(args[1], Tensor) else []
            if matrices:
                return self._product(func, matrices, args, kwargs)
        out = func(*args, **kwargs)
        if func is Tensor.__getitem__ and _chooses_rows(args[1]) and args[0].dim() == 2 and len(args[0]) == self._count:
            self._gathered = (out, args[1])
        return out

    def matrices_in(self, w: Tensor) -> list[tuple[str, int, Tensor]]:
        """(parameter, expert, its matrix) for every whole expert in this tensor: one, several in a row, or none."""
        name, parameter = self._parameters.get(w.untyped_storage().data_ptr(), ("", w))
        if not name or w.dim() not in (2, 3):
            return []
        size = parameter[0].numel()
        expert, inside = divmod(int(w.storage_offset()) - int(parameter.storage_offset()), parameter.stride(0) or size)
        if inside or w[0].numel() * (w.shape[0] if w.dim() == 2 else 1) != size:
            return []  # a part of a matrix
        return [(name, expert, w)] if w.dim() == 2 else [(name, expert + step, w[step]) for step in range(len(w))]

    def _product(self, func: Any, matrices: list[tuple[str, int, Tensor]], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        x: Tensor = args[0]
        batched = args[1].dim() == 3
        if batched and x.dim() != 3:
            x = x.expand(len(matrices), *x.shape[-2:])
        inputs = list(x) if batched else [x]
        if self._change is not None:
            inputs = [self._change(name, expert, one) for (name, expert, _), one in zip(matrices, inputs, strict=True)]
            x = torch.stack(inputs) if batched else inputs[0]
        out: Tensor = func(x, *args[1:], **kwargs)
        for step, ((name, expert, w), one) in enumerate(zip(matrices, inputs, strict=True)):
            rows_first = w.is_contiguous() == (func is F.linear)
            flat = one.detach().reshape(-1, one.shape[-1])
            self._see(Product(name, expert, flat, not rows_first, self._tokens(flat, expert), out, _picking(step if batched else None)))
        return out

    def _tokens(self, x: Tensor, expert: int) -> Tensor | None:
        """Known by the memory of the gathered tokens; else those of this expert's first matrix; else all in order, if their number fits."""
        if self._gathered and x.untyped_storage().data_ptr() == self._gathered[0].untyped_storage().data_ptr():
            start = int(x.storage_offset()) // self._gathered[0].stride(0)
            self._given[expert] = self._gathered[1][start : start + len(x)]
        known = self._given.get(expert)
        if known is not None and len(known) == len(x):
            return known
        return torch.arange(self._count, device=x.device) if len(x) == self._count else None


class ExpertsOnDemand(TorchFunctionMode):
    """While entered, a product with an expert of these parameters uses the matrix that `supply` returns, laid out as the parameter's.

    The matrix is freed after the product, and asked for again in the backward pass."""

    def __init__(self, parameters: Mapping[str, Tensor], supply: Callable[[str, int], Tensor]) -> None:
        super().__init__()
        self._products, self._supply = Products(parameters), supply

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.linear and func not in _MATMULS:
            return func(*args, **kwargs)
        matrices = self._products.matrices_in(args[1]) if len(args) > 1 and isinstance(args[1], Tensor) else []
        if not matrices:
            return func(*args, **kwargs)
        batched, x = args[1].dim() == 3, args[0]
        inputs = list(x if x.dim() == 3 else x.expand(len(matrices), *x.shape)) if batched else [x]
        func = _alone if func in (torch.bmm, Tensor.bmm) else func
        outputs: list[Tensor] = []
        for one, (parameter, expert, w) in zip(inputs, matrices, strict=True):

            def supplied(parameter: str = parameter, expert: int = expert, straight: bool = w.is_contiguous()) -> Tensor:
                matrix = self._supply(parameter, expert)
                return matrix if straight else matrix.T

            outputs.append(_Multiplied.apply(one, func, supplied, args[2:], kwargs))  # type: ignore[no-untyped-call]
        return torch.stack(outputs) if batched else outputs[0]


def _alone(x: Tensor, w: Tensor) -> Tensor:
    """One matrix of a batch."""
    return torch.bmm(x.unsqueeze(0), w.unsqueeze(0))[0]


class _Multiplied(torch.autograd.Function):
    """A product whose matrix is not held until the backward pass: autograd would hold those of all experts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, func: Any, supplied: Callable[[], Tensor], *more: Any) -> Tensor:
        ctx.func, ctx.supplied = func, supplied
        args, kwargs = more
        out: Tensor = func(x, supplied(), *args, **kwargs)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        w = ctx.supplied()
        return gradient.matmul(w if ctx.func is F.linear else w.mT), None, None, None, None


class ExpertsAlone(TorchFunctionMode):
    """While entered, products with experts of these parameters other than those wanted give zeros, without their matrices being read: for
    callers who look at what the wanted ones are given, and not at what the module gives."""

    def __init__(self, parameters: Mapping[str, Tensor], wanted: set[int]) -> None:
        super().__init__()
        self._products, self._wanted = Products(parameters), wanted

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if (func is F.linear or func in _MATMULS) and len(args) > 1 and isinstance(args[1], Tensor):
            x, w, matrices = args[0], args[1], self._products.matrices_in(args[1])
            alike = w.dim() == 2 or x.dim() == 3
            if matrices and alike and not any(expert in self._wanted for _, expert, _ in matrices):
                return x.new_zeros(*x.shape[:-1], w.shape[-2] if func is F.linear else w.shape[-1])
        return func(*args, **(kwargs or {}))


def placeholder(shape: Sequence[int]) -> Tensor:
    """Stands for a parameter of experts without its memory: the matrices overlap, each beginning one number after the last, so that
    `Products` still tells them apart. All values are NaN."""
    count, rows, cols = shape
    return torch.full((rows * cols + count,), torch.nan).as_strided((count, rows, cols), (1, cols, 1))


def find(model: nn.Module, config: Any) -> dict[str, bool]:
    """Every parameter of a module on the meta device that holds experts, and whether it holds them as (cols, rows).

    A three-dimensional parameter that no product was seen with is left out: nothing says that it holds matrices.
    """
    width = getattr(text_config(config), "hidden_size", None)
    transposed_of: dict[str, bool] = {}
    alike: dict[tuple[object, ...], dict[str, bool]] = {}  # the layers of a model mostly are: one of each kind is tried
    for path, module in model.named_modules():
        parameters = {name: p for name, p in module.named_parameters(recurse=False) if p.dim() == 3}
        if not parameters or width is None or isinstance(module, nn.modules.conv._ConvNd):
            continue
        key = (type(module), *((name, p.shape) for name, p in parameters.items()))
        if key not in alike:
            alike[key] = _probe(model, path, list(parameters), width)
        transposed_of |= {f"{path}.{name}": transposed for name, transposed in alike[key].items()}
    return transposed_of


def with_eager_experts(config: Any) -> Any:
    """A copy of the config whose module multiplies expert by expert, which can be watched: transformers may use one fused call."""
    config = copy.deepcopy(config)
    config._experts_implementation = "eager"
    return config


def _probe(model: nn.Module, path: str, parameters: list[str], width: int) -> dict[str, bool]:
    """Whether each of these parameters holds (cols, rows), from the call that showed products with most of them."""
    best: dict[str, bool] = {}
    for above, inputs in _calls(path, width):
        module = model.get_submodule(above)
        lead = path.removeprefix(above).removeprefix(".")
        tensors = {name: _zeros(p) for name, p in [*module.named_parameters(), *module.named_buffers()]}
        watched = {name: tensors[f"{lead}.{name}" if lead else name] for name in parameters}
        products: list[Product] = []
        try:
            with torch.no_grad(), Products(watched, products.append):
                torch.func.functional_call(module, tensors, inputs)
        except Exception:  # this module takes other arguments, whatever it raises
            continue
        seen = {product.parameter: product.transposed for product in products}
        best = max(best, seen, key=len)
        if len(best) == len(parameters):
            break
    return best


def _calls(path: str, width: int) -> Iterator[tuple[str, tuple[Tensor, ...]]]:
    """(module, inputs) to try: the module that holds experts and router, the experts with and without choices given, and one further up."""
    hidden = torch.zeros(1, _PROBED_TOKENS, width)
    chosen = torch.zeros(_PROBED_TOKENS, 1, dtype=torch.long)
    parent = path.rpartition(".")[0]
    yield parent, (hidden,)
    yield path, (hidden[0], chosen, torch.ones(_PROBED_TOKENS, 1))
    yield path, (hidden,)
    yield parent.rpartition(".")[0], (hidden,)


def _zeros(like: Tensor) -> Tensor:
    """Zeros of this shape that take little memory: pages that are only read take none, and all experts share one matrix."""
    shape = (1, *like.shape[1:]) if like.dim() == 3 else tuple(like.shape)
    dtype = np.float32 if like.is_floating_point() else np.int64
    return torch.from_numpy(np.zeros(shape, dtype)).expand(like.shape)


def _picking(step: int | None) -> Callable[[Tensor], Tensor]:
    return lambda out: (out if step is None else out[step]).reshape(-1, out.shape[-1])


def _chooses_rows(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dim() == 1 and index.dtype == torch.int64
