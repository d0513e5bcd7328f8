"""Which parameters a text reaches: those of a vision or audio tower are never read when a model is given nothing but tokens.

Found by a trial, not by name: the model runs on a few tokens with values that take no memory, and every parameter that a function reads is
noted. Stubs are in the places of what module lists hold (blocks, which may choose among experts): a list that is called is reached whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from fewbits.formats.runtime.kv import text_config
from fewbits.model.stubs import FORMS, Stub, put
from fewbits.model.weights import TOWER, Weight

_TOKENS = 4


def with_towers(weights: Sequence[Weight], module: nn.Module, config: Any) -> tuple[Weight, ...]:
    """The same weights; those that no text reaches are of the kind `tower`. Only a config that holds another one for text has such."""
    if text_config(config) is config:
        return tuple(weights)
    names = unreached(module)
    return tuple(replace(weight, kind=TOWER) if weight.parameter in names else weight for weight in weights)


def unreached(module: nn.Module) -> set[str]:
    """Names of the parameters that no text reaches; none if the trial fails. `module` is on the meta device."""
    module.eval()
    call = {"input_ids": torch.zeros(1, _TOKENS, dtype=torch.long), "use_cache": False}
    for form in FORMS:
        with _stubs(module, form) as stubs:
            values = {name: torch.zeros((), dtype=_plain(t)).expand(t.shape) for name, t in _tensors(module).items()}
            try:
                with torch.no_grad(), ReadsOnly(values) as reads:
                    torch.func.functional_call(module, values, (), call)
            except Exception:  # a model may raise anything when a block returns the wrong type
                continue
        called = tuple(f"{path}." for path, some in stubs.items() if any(stub.hidden is not None for stub in some))
        return {name for name, _ in module.named_parameters() if name not in reads.read and not name.startswith(called)}
    return set()


class ReadsOnly(TorchFunctionMode):
    """Notes which of these tensors functions are given. Products with matrices are not computed: they are zero, and cost nothing."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._names = {id(tensor): name for name, tensor in tensors.items()}
        self.read: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        self.read.update(self._names[id(leaf)] for leaf in pytree.tree_leaves((args, kwargs)) if id(leaf) in self._names)
        if func is F.linear:
            x, w = args[0], args[1] if len(args) > 1 else kwargs["weight"]
            return x.new_zeros(*x.shape[:-1], len(w))
        return func(*args, **kwargs)


@contextmanager
def _stubs(module: nn.Module, form: int | None) -> Iterator[dict[str, list[Stub]]]:
    """While inside, stubs are in the places of what the outermost lists hold; by the path of the list."""
    lists: dict[str, nn.ModuleList] = {}
    for path, part in module.named_modules():
        if isinstance(part, nn.ModuleList) and len(part) and not path.startswith(tuple(f"{outer}." for outer in lists)):
            lists[path] = part
    stubs = {path: [Stub(block, form) for block in blocks] for path, blocks in lists.items()}
    try:
        for path, some in stubs.items():
            put(module, path, nn.ModuleList(some))
        yield stubs
    finally:
        for path, blocks in lists.items():
            put(module, path, blocks)


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return dict(module.named_parameters()) | dict(module.named_buffers())


def _plain(tensor: Tensor) -> torch.dtype:
    return torch.float32 if tensor.is_floating_point() else tensor.dtype
