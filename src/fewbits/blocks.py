"""A model run one block at a time: the weights of one block in memory, the hidden states between blocks in the caller's hands.

No architecture is named here. The blocks are the module list that holds most of the weights; what a block is called with besides
the hidden states (masks, rotary angles, a type of attention) is seen by letting the model call stubs in their place.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fewbits import stacks
from fewbits.errors import InputError
from fewbits.model import empty_module

if TYPE_CHECKING:
    from fewbits.model import Model, Weight

Call = dict[str, Any]  # the arguments of one block, hidden states left out


class _Stub(nn.Module):
    """Stands where a block was, and keeps what it was called with."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self._block = [block]  # in a list, so that it is not a submodule
        self.seen: Call = {}
        self.hidden: Tensor | None = None
        self.answer: Tensor | None = None
        self.stop = False

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_block"][0], name)  # models ask a block for its type of attention

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        bound = inspect.signature(self._block[0].forward).bind(*args, **kwargs)
        named = dict(bound.arguments)
        extra = named.pop("kwargs", {})
        self.hidden = named.pop(next(iter(named)))
        self.seen = {**named, **extra}
        if self.stop:
            raise _Stopped
        answer = self.hidden if self.answer is None else self.answer
        assert answer is not None
        return answer


class _Stopped(Exception):  # noqa: N818 - not an error: the part of the model that was asked for has run
    pass


class Blocks:
    def __init__(self, model: Model) -> None:
        self.model = model
        # pages that are never written take no memory; experts one by one, so that what each is given can be seen
        self.module = empty_module(stacks.looping(model.config)).eval().requires_grad_(False)
        self.path, blocks = _blocks_of(self.module)
        self._blocks = list(blocks)
        self._stubs = [_Stub(block) for block in self._blocks]
        self._shapes = {name: tensor.shape for name, tensor in self._parameters.items()}
        parent, _, attribute = self.path.rpartition(".")
        setattr(self.module.get_submodule(parent), attribute, nn.ModuleList(self._stubs))
        self._fill(name for name in self._names() if not name.startswith(f"{self.path}."))

    def __len__(self) -> int:
        return len(self._blocks)

    def prefix(self, index: int) -> str:
        """The path of a block: `model.layers.3`."""
        return f"{self.path}.{index}"

    def weights(self, index: int) -> list[Weight]:
        return [weight for weight in self.model.weights if weight.name.startswith(f"{self.prefix(index)}.")]

    @property
    def outer_weights(self) -> list[Weight]:
        """Embeddings and the output matrix: what is in no block."""
        return [weight for weight in self.model.weights if not weight.name.startswith(f"{self.path}.")]

    def submodule(self, path: str) -> nn.Module:
        """By its path in the whole model, in a block or not."""
        if not path.startswith(f"{self.path}."):
            return self.module.get_submodule(path)
        index, _, inside = path.removeprefix(f"{self.path}.").partition(".")
        return self._blocks[int(index)].get_submodule(inside)

    def parameter(self, weight: Weight) -> Tensor:
        """The one that this weight lies in."""
        return self._parameters[weight.parameter]

    def put(self, weight: Weight, matrix: Tensor) -> None:  # (rows, cols)
        """This matrix where the weight is, in a block that is filled."""
        parameter = self.parameter(weight)
        if weight.expert is not None:
            weight.view(parameter.data).copy_(matrix)
        else:  # replaced, not written over: it may be the checkpoint's own memory
            parameter.data = matrix.T.contiguous() if weight.transposed else matrix.reshape(self._shapes[weight.parameter])

    def enter(self, ids: Tensor) -> tuple[Tensor, list[Call]]:
        """(hidden states that the first block reads, what each block is called with) for ids (batch, length)."""
        self._stubs[-1].stop = True
        try:
            self.module(input_ids=ids, use_cache=False)
        except _Stopped:
            pass
        finally:
            self._stubs[-1].stop = False
        hidden = self._stubs[0].hidden
        assert hidden is not None
        return hidden, [stub.seen for stub in self._stubs]

    def leave(self, hidden: Tensor) -> Tensor:
        """Logits (batch, length, vocabulary) of what the last block gave."""
        self._stubs[-1].answer = hidden
        try:
            logits: Tensor = self.module(input_ids=torch.zeros(hidden.shape[:2], dtype=torch.long), use_cache=False, return_dict=False)[0]
        finally:
            self._stubs[-1].answer = None
        return logits

    @contextmanager
    def filled(self, index: int, model: Model | None = None) -> Iterator[nn.Module]:
        """The block with its weights, which are let go of afterwards. `model`: take them from there (a quantized one)."""
        names = [name for name in self._names() if name.startswith(f"{self.prefix(index)}.")]
        self._fill(names, model)
        try:
            yield self._blocks[index]
        finally:
            for name in names:
                self._parameters[name].data = torch.empty(0)

    def run(self, block: nn.Module, hidden: Tensor, call: Call, cache: Any = None) -> Tensor:
        """One block. `cache` sees the keys and values, as attention will read them, through its `update`."""
        out = block(hidden, **(call if cache is None else {**call, "past_key_values": cache}))
        result: Tensor = out[0] if isinstance(out, tuple) else out
        return result

    @cached_property
    def _parameters(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for index, block in enumerate(self._blocks):
            prefix = self.prefix(index)
            found |= {f"{prefix}.{name}": p for name, p in [*block.named_parameters(), *block.named_buffers()]}
        return found | dict(self.module.named_parameters()) | dict(self.module.named_buffers())

    def _names(self) -> list[str]:
        return [*dict.fromkeys(weight.parameter for weight in self.model.weights), *self.model.rest]

    def _fill(self, names: Iterable[str], model: Model | None = None) -> None:
        source = model or self.model
        inside: dict[str, list[Weight]] = {}
        for weight in source.weights:
            inside.setdefault(weight.parameter, []).append(weight)
        for name in names:
            for weight in inside.get(name, ()):
                if weight.expert == 0:
                    self._parameters[name].data = torch.empty(self._shapes[name])
                self.put(weight, source.load(weight))
            if name not in inside:
                self._parameters[name].data = source.tensor(name).float()


def _blocks_of(module: nn.Module) -> tuple[str, nn.ModuleList]:
    lists = [(name, part) for name, part in module.named_modules() if isinstance(part, nn.ModuleList) and len(part)]
    if not lists:
        raise InputError(
            f"{type(module).__name__} has no list of blocks to walk through", "only models of repeated blocks can be calibrated"
        )
    return max(lists, key=lambda found: sum(p.numel() for p in found[1].parameters()))
