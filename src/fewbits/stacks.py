"""Matrices that lie stacked in one three-dimensional parameter (the experts of a mixture), found by watching what is multiplied with them.

No architecture is named here. A product with a slice of a stack is known by the memory that the slice lies in; whether a stack holds
(rows, cols) or (cols, rows) shows in how a small input is multiplied with it; which tokens an expert was given, in how they were gathered.
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

_MATMULS = {torch.matmul, torch.mm, torch.bmm, Tensor.matmul, Tensor.mm, Tensor.bmm, Tensor.__matmul__}
_PROBED_TOKENS = 4


@dataclass(frozen=True, eq=False)
class Product:
    """Inputs of one expert, multiplied with its matrix."""

    stack: str  # name of the parameter
    expert: int
    x: Tensor  # (tokens, cols)
    transposed: bool  # the stack holds (cols, rows)
    tokens: Tensor | None  # which of the tokens that went into the watched call these are; None: unknown
    _out: Tensor
    _of_out: Callable[[Tensor], Tensor]

    @property
    def weight(self) -> str:
        """As `fewbits.model` names it."""
        return f"{self.stack}.{self.expert}"

    def on_gradient(self, see: Callable[[Tensor], None]) -> None:  # see (tokens, rows)
        self._out.register_hook(lambda gradient: see(self._of_out(gradient)))


class Products(TorchFunctionMode):
    """While entered, shows every product with a slice of `stacks` to `see`. `change` may give other inputs to multiply instead."""

    def __init__(
        self,
        stacks: Mapping[str, Tensor],
        see: Callable[[Product], None] = lambda _: None,
        change: Callable[[str, int, Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        self._stacks = {stack.untyped_storage().data_ptr(): (name, stack) for name, stack in stacks.items()}
        self._see, self._change = see, change
        self.next_call(0)

    def next_call(self, tokens: int) -> None:
        """So many go into the module now. With none, nobody asks which of them an expert is given."""
        self._count = tokens
        self._gathered: tuple[Tensor, Tensor] | None = None  # the last tensor of chosen tokens, and which they are
        self._given: dict[int, Tensor] = {}  # expert -> its tokens: a second matrix of it reads what the first one made of them

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func is F.linear or func in _MATMULS:
            found = self._slices(args[1]) if len(args) > 1 and isinstance(args[1], Tensor) else []
            if found:
                return self._product(func, found, args, kwargs)
        out = func(*args, **kwargs)
        if func is Tensor.__getitem__ and _chooses_rows(args[1]) and args[0].dim() == 2 and len(args[0]) == self._count:
            self._gathered = (out, args[1])
        return out

    def _slices(self, w: Tensor) -> list[tuple[str, int, Tensor]]:
        """Of which stack this is one whole matrix, or all of them."""
        name, stack = self._stacks.get(w.untyped_storage().data_ptr(), ("", w))
        if not name or w.dim() not in (2, 3):
            return []
        size = stack[0].numel()
        expert, inside = divmod(int(w.storage_offset()) - int(stack.storage_offset()), stack.stride(0) or size)
        if inside or w[0].numel() * (w.shape[0] if w.dim() == 2 else 1) != size:
            return []  # a part of a matrix
        return [(name, expert, w)] if w.dim() == 2 else [(name, expert + step, w[step]) for step in range(len(w))]

    def _product(self, func: Any, found: list[tuple[str, int, Tensor]], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        x: Tensor = args[0]
        batched = args[1].dim() == 3
        if batched and x.dim() != 3:
            x = x.expand(len(found), *x.shape[-2:])
        inputs = list(x) if batched else [x]
        if self._change is not None:
            inputs = [self._change(name, expert, one) for (name, expert, _), one in zip(found, inputs, strict=True)]
            x = torch.stack(inputs) if batched else inputs[0]
        out: Tensor = func(x, *args[1:], **kwargs)
        for step, ((name, expert, w), one) in enumerate(zip(found, inputs, strict=True)):
            rows_first = w.is_contiguous() == (func is F.linear)
            flat = one.detach().reshape(-1, one.shape[-1])
            self._see(Product(name, expert, flat, not rows_first, self._tokens(flat, expert), out, _picking(step if batched else None)))
        return out

    def _tokens(self, x: Tensor, expert: int) -> Tensor | None:
        """By the memory of the gathered tokens; else as this expert's first matrix was given; else in order, if they are all of them."""
        if self._gathered and x.untyped_storage().data_ptr() == self._gathered[0].untyped_storage().data_ptr():
            start = int(x.storage_offset()) // self._gathered[0].stride(0)
            self._given[expert] = self._gathered[1][start : start + len(x)]
        known = self._given.get(expert)
        if known is not None and len(known) == len(x):
            return known
        return torch.arange(self._count) if len(x) == self._count else None


class Supplied(TorchFunctionMode):
    """While entered, products with a slice of these stacks are taken with the matrix that `supply` gives, as the stack would hold it.

    The matrix is let go of after the product, and asked for again on the way back."""

    def __init__(self, stacks: Mapping[str, Tensor], supply: Callable[[str, int], Tensor]) -> None:
        super().__init__()
        self._watch, self._supply = Products(stacks), supply

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.linear and func not in _MATMULS:
            return func(*args, **kwargs)
        found = self._watch._slices(args[1]) if len(args) > 1 and isinstance(args[1], Tensor) else []
        if not found:
            return func(*args, **kwargs)
        batched, x = args[1].dim() == 3, args[0]
        inputs = list(x if x.dim() == 3 else x.expand(len(found), *x.shape)) if batched else [x]
        made: list[Tensor] = []
        for one, (stack, expert, w) in zip(inputs, found, strict=True):
            as_it_lies = w.is_contiguous()

            def supplied(stack: str = stack, expert: int = expert, as_it_lies: bool = as_it_lies) -> Tensor:
                matrix = self._supply(stack, expert)
                return matrix if as_it_lies else matrix.T

            made.append(_Multiplied.apply(one, func, supplied, args[2:], kwargs))  # type: ignore[no-untyped-call]
        return torch.stack(made) if batched else made[0]


class _Multiplied(torch.autograd.Function):
    """A product with a matrix that is not held until the way back: autograd would hold those of all experts."""

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


def hollow(shape: Sequence[int]) -> Tensor:
    """A stack whose matrices have their places and nothing else: they lie over each other, one number apart. What reads their values
    finds NaN."""
    count, rows, cols = shape
    return torch.full((rows * cols + count,), torch.nan).as_strided((count, rows, cols), (1, cols, 1))


def find(model: nn.Module, config: Any) -> dict[str, bool]:
    """Every stacked parameter of a module on the meta device, and whether its matrices are stored as (cols, rows).

    One that nothing was seen to be multiplied with is left out: it is not known to be a stack of matrices.
    """
    width = getattr(config.get_text_config(), "hidden_size", None)
    found: dict[str, bool] = {}
    alike: dict[tuple[object, ...], dict[str, bool]] = {}  # the layers of a model are: one of them is tried
    for path, module in model.named_modules():
        stacks = {name: p for name, p in module.named_parameters(recurse=False) if p.dim() == 3}
        if not stacks or width is None or isinstance(module, nn.modules.conv._ConvNd):
            continue
        key = (type(module), *((name, p.shape) for name, p in stacks.items()))
        if key not in alike:
            alike[key] = _probe(model, path, list(stacks), width)
        found |= {f"{path}.{name}": transposed for name, transposed in alike[key].items()}
    return found


def looping(config: Any) -> Any:
    """The same config for a module that multiplies expert by expert, which can be watched: transformers may use one fused call."""
    own = copy.deepcopy(config)
    own._experts_implementation = "eager"
    return own


def _probe(model: nn.Module, path: str, stacks: list[str], width: int) -> dict[str, bool]:
    """Of the calls that work, what the one shows that shows most."""
    best: dict[str, bool] = {}
    for above, inputs in _calls(path, width):
        module = model.get_submodule(above)
        lead = path.removeprefix(above).removeprefix(".")
        tensors = {name: _zeros(p) for name, p in [*module.named_parameters(), *module.named_buffers()]}
        own = {name: tensors[f"{lead}.{name}" if lead else name] for name in stacks}
        products: list[Product] = []
        try:
            with torch.no_grad(), Products(own, products.append):
                torch.func.functional_call(module, tensors, inputs)
        except Exception:  # it is called otherwise: whatever it raises says no more than that
            continue
        seen = {product.stack: product.transposed for product in products}
        best = max(best, seen, key=len)
        if len(best) == len(stacks):
            break
    return best


def _calls(path: str, width: int) -> Iterator[tuple[str, tuple[Tensor, ...]]]:
    """What may run the experts: whatever holds them and their router, or they themselves, with choices and weights given or not."""
    hidden = torch.zeros(1, _PROBED_TOKENS, width)
    chosen = torch.zeros(_PROBED_TOKENS, 1, dtype=torch.long)
    parent = path.rpartition(".")[0]
    yield parent, (hidden,)
    yield path, (hidden[0], chosen, torch.ones(_PROBED_TOKENS, 1))
    yield path, (hidden,)
    yield parent.rpartition(".")[0], (hidden,)


def _zeros(like: Tensor) -> Tensor:
    """Of this shape, without its memory: pages that are only read take none, and the matrices of a stack share theirs."""
    shape = (1, *like.shape[1:]) if like.dim() == 3 else tuple(like.shape)
    dtype = np.float32 if like.is_floating_point() else np.int64
    return torch.from_numpy(np.zeros(shape, dtype)).expand(like.shape)


def _picking(step: int | None) -> Callable[[Tensor], Tensor]:
    return lambda out: (out if step is None else out[step]).reshape(-1, out.shape[-1])


def _chooses_rows(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dim() == 1 and index.dtype == torch.int64
