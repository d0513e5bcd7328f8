"""The blocks of a model, with the weights of one of them in memory at a time. walk.py takes samples through them.

No architecture is named here. The blocks are the module list that holds most of the weights. What a block is called with besides the
hidden states (masks, rotary angles, the kind of attention) is recorded by stubs that the model calls in the blocks' places. Embeddings
and the output matrix, each as large as a block, are in memory only while samples enter or leave the model. If the experts of a block
together exceed a limit, they are loaded one at a time.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from fewbits.errors import InputError
from fewbits.model import chain
from fewbits.model.experts import ExpertsOnDemand, placeholder, with_eager_experts
from fewbits.model.module import empty_module
from fewbits.store.heap import return_free_memory

if TYPE_CHECKING:
    from fewbits.model.weights import Weight

Call = dict[str, Any]  # the arguments of one block, hidden states left out
_FLOAT = 4  # bytes


class Source(Protocol):
    """Where the weights come from: a checkpoint, or an artifact that is decoded as it is read."""

    @property
    def config(self) -> Any: ...

    @property
    def weights(self) -> Sequence[Weight]: ...

    @property
    def rest(self) -> Sequence[str]: ...

    @property
    def fingerprint(self) -> str: ...

    def load(self, weight: Weight) -> Tensor:  # (rows, cols) float32
        ...

    def tensor(self, name: str) -> Tensor: ...


class _Stub(nn.Module):
    """Takes the place of a block in the model, and records what it is called with."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self._block = [block]  # in a list, so that it does not count as a submodule
        self.seen: Call = {}
        self.hidden: Tensor | None = None
        self.answer: Tensor | None = None
        self.stop = False
        self.in_tuple = False

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_block"][0], name)  # models read attributes of a block, such as its kind of attention

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(self._block[0].forward).bind(*args, **kwargs)
        named = dict(bound.arguments)
        extra = named.pop("kwargs", {})
        self.hidden = named.pop(next(iter(named)))
        self.seen = {**named, **extra}
        if self.stop:
            raise _Stopped
        answer = self.hidden if self.answer is None else self.answer
        assert answer is not None
        return (answer,) if self.in_tuple else answer


class _Stopped(Exception):  # noqa: N818 - not an error: all blocks were called, and the rest of the model need not run
    pass


class Blocks:
    def __init__(self, model: Source, memory: int | None = None) -> None:
        """`memory`: bytes that the experts of a block may take together before they are loaded one at a time; None: no limit."""
        self.model, self._memory = model, memory
        # experts are multiplied one by one, so that the inputs of each can be seen
        self.module = empty_module(with_eager_experts(model.config)).eval().requires_grad_(False)
        self.path, blocks = _blocks_of(self.module)
        self._blocks = list(blocks)
        self.stubs = [_Stub(block) for block in self._blocks]  # in the places of the blocks
        self._shapes = {name: tensor.shape for name, tensor in self._parameters.items()}
        for name in self._names():  # uninitialized values take no memory on fresh pages, but these may be reused ones
            self._parameters[name].data = _NOTHING.expand(self._shapes[name])
        return_free_memory()
        self._supplied: dict[str, Callable[[], Tensor]] = {}  # experts of the filled block that are loaded for each product
        parent, _, attribute = self.path.rpartition(".")
        setattr(self.module.get_submodule(parent), attribute, nn.ModuleList(self.stubs))
        self._ends = [weight for weight in self.outer_weights if weight.expert is None and weight.kind != "convolution"]
        at_the_ends = {weight.parameter for weight in self._ends}
        self._fill(name for name in self._names() if not name.startswith(f"{self.path}.") and name not in at_the_ends)
        self._hold([])
        self.is_chain = chain.is_chain(self)

    def __len__(self) -> int:
        return len(self._blocks)

    def expect_chain(self) -> Blocks:
        if not self.is_chain:
            raise InputError(
                f"the blocks of {type(self.module).__name__} share more than hidden states: they cannot be run one by one",
                "use `--method rtn`, which needs no calibration",
            )
        return self

    def prefix(self, index: int) -> str:
        """The path of a block: `model.layers.3`."""
        return f"{self.path}.{index}"

    def weights(self, index: int) -> list[Weight]:
        return [weight for weight in self.model.weights if weight.name.startswith(f"{self.prefix(index)}.")]

    def own_their_weights(self) -> bool:
        """Whether no block shares parameters with another."""
        names = set(self._names())
        return all(f"{self.prefix(i)}.{name}" in names for i, block in enumerate(self._blocks) for name, _ in block.named_parameters())

    @property
    def outer_weights(self) -> list[Weight]:
        """Those in no block: embeddings and the output matrix."""
        return [weight for weight in self.model.weights if not weight.name.startswith(f"{self.path}.")]

    def submodule(self, path: str) -> nn.Module:
        """By its path in the model, inside a block or outside."""
        if not path.startswith(f"{self.path}."):
            return self.module.get_submodule(path)
        index, _, inside = path.removeprefix(f"{self.path}.").partition(".")
        return self._blocks[int(index)].get_submodule(inside)

    def parameter(self, weight: Weight) -> Tensor:
        """The one that holds this weight."""
        return self._parameters[weight.parameter]

    def put(self, weight: Weight, matrix: Tensor) -> None:  # (rows, cols)
        """Replaces the weight by this matrix, in a block that is filled or outside of blocks."""
        parameter = self.parameter(weight)
        if weight.name in self._supplied:
            self._supplied[weight.name] = lambda: matrix
        elif weight.expert is not None:
            weight.view(parameter.data).copy_(matrix)
        else:  # not written in place: the memory may be that of the checkpoint's file
            parameter.data = matrix.T.contiguous() if weight.transposed else matrix.reshape(self._shapes[weight.parameter])

    @contextmanager
    def swapped(self, weights: Sequence[Weight], changed: Mapping[str, Callable[[], Tensor]]) -> Iterator[None]:
        """While inside, those of these weights that are in `changed` are replaced, in a block that is filled or outside of blocks."""
        before: list[Callable[[], None]] = []
        try:
            for weight in (weight for weight in weights if weight.name in changed):
                before.append(self._restoring(weight))
                if weight.name in self._supplied:
                    self._supplied[weight.name] = changed[weight.name]
                else:
                    self.put(weight, changed[weight.name]())
            yield
        finally:
            for restore in before:
                restore()

    def _restoring(self, weight: Weight) -> Callable[[], None]:
        if (supplied := self._supplied.get(weight.name)) is not None:
            return lambda: self._supplied.update({weight.name: supplied})
        parameter = self.parameter(weight)
        data = parameter.data if weight.expert is None else weight.view(parameter.data).clone()
        return (lambda: setattr(parameter, "data", data)) if weight.expert is None else (lambda: self.put(weight, data))

    def enter(self, ids: Tensor) -> tuple[Tensor, list[Call]]:
        """(hidden states that the first block reads, the other arguments of each block) for ids (batch, length)."""
        self._hold([weight for weight in self._ends if weight.kind != "output"])
        self.stubs[-1].stop = True
        try:
            self.module(input_ids=ids, use_cache=False)
        except _Stopped:
            pass
        finally:
            self.stubs[-1].stop = False
        hidden = self.stubs[0].hidden
        assert hidden is not None
        return hidden, [stub.seen for stub in self.stubs]

    def leave(self, hidden: Tensor, ids: Tensor | None = None) -> Tensor:
        """Logits (batch, length, vocabulary) from the last block's output, or from some of its positions.

        `ids` do not change the logits of a chain; chain.py varies them to check that."""
        self._hold([weight for weight in self._ends if weight.kind != "embedding" or weight.tied_to])
        self.stubs[-1].answer = hidden
        ids = torch.zeros(hidden.shape[:2], dtype=torch.long) if ids is None else ids
        try:
            logits: Tensor = self.module(input_ids=ids, use_cache=False, return_dict=False)[0]
        finally:
            self.stubs[-1].answer = None
        return logits

    @contextmanager
    def filled(self, index: int) -> Iterator[nn.Module]:
        """The block with its weights, which are freed afterwards."""
        self._hold([])
        names = [name for name in self._names() if name.startswith(f"{self.prefix(index)}.")]
        experts = [weight for weight in self.weights(index) if weight.expert is not None]
        try:
            with self._supplying(experts) if self._exceeds(experts) else nullcontext():
                supplied = {weight.parameter for weight in experts if weight.name in self._supplied}
                self._fill(name for name in names if name not in supplied)
                yield self._blocks[index]
        finally:
            for name in names:
                self._parameters[name].data = torch.empty(0)
            return_free_memory()

    def _exceeds(self, experts: Sequence[Weight]) -> bool:
        return self._memory is not None and _FLOAT * sum(weight.shape[0] * weight.shape[1] for weight in experts) > self._memory

    @contextmanager
    def _supplying(self, experts: Sequence[Weight]) -> Iterator[None]:
        """The parameters get no values: an expert is loaded for each product with it, and freed after it."""
        for weight in experts:
            self._supplied[weight.name] = lambda weight=weight: self.model.load(weight)  # type: ignore[misc]
            if weight.expert == 0:
                self._parameters[weight.parameter].data = placeholder(self._shapes[weight.parameter])
        transposed = {weight.name: weight.transposed for weight in experts}

        def supply(parameter: str, expert: int) -> Tensor:
            matrix = self._supplied[f"{parameter}.{expert}"]()
            return matrix.T.contiguous() if transposed[f"{parameter}.{expert}"] else matrix

        try:
            with ExpertsOnDemand({weight.parameter: self.parameter(weight) for weight in experts}, supply):
                yield
        finally:
            self._supplied.clear()

    def run(self, block: nn.Module, hidden: Tensor, call: Call, cache: Any = None) -> Tensor:
        """One block. `cache`: its `update` is given the keys and values as attention will read them."""
        out = block(hidden, **(call if cache is None else {**call, "past_key_values": cache}))
        result: Tensor = out[0] if isinstance(out, tuple) else out
        return result

    @cached_property
    def _parameters(self) -> dict[str, Tensor]:
        inside: dict[str, Tensor] = {}
        for index, block in enumerate(self._blocks):
            prefix = self.prefix(index)
            inside |= {f"{prefix}.{name}": p for name, p in [*block.named_parameters(), *block.named_buffers()]}
        return inside | dict(self.module.named_parameters()) | dict(self.module.named_buffers())

    def _names(self) -> list[str]:
        return [*dict.fromkeys(weight.parameter for weight in self.model.weights), *self.model.rest]

    @contextmanager
    def random_ends(self) -> Iterator[None]:
        """Random embeddings and output matrix that take no memory: each row is the one before it, shifted by one."""
        ends, self._ends = self._ends, []
        for weight in ends:
            rows, cols = self._shapes[weight.parameter]
            numbers = torch.randn(rows + cols, generator=torch.Generator().manual_seed(0))
            self._parameters[weight.parameter].data = numbers.as_strided((rows, cols), (1, 1))
        try:
            yield
        finally:
            self._ends = ends
            self._hold([])

    def _hold(self, wanted: Sequence[Weight]) -> None:
        """Loads these of the embeddings and output matrix, and frees the others."""
        for weight in self._ends:
            parameter = self._parameters[weight.parameter]
            is_loaded = parameter.untyped_storage().data_ptr() != _NOTHING.untyped_storage().data_ptr()
            if weight in wanted and not is_loaded:
                self.put(weight, self.model.load(weight))
            elif weight not in wanted and is_loaded:
                parameter.data = _NOTHING.expand(self._shapes[weight.parameter])

    def _fill(self, names: Iterable[str]) -> None:
        inside: dict[str, list[Weight]] = {}
        for weight in self.model.weights:
            inside.setdefault(weight.parameter, []).append(weight)
        for name in names:
            for weight in inside.get(name, ()):
                if weight.expert == 0:
                    self._parameters[name].data = torch.empty(self._shapes[name])
                self.put(weight, self.model.load(weight))
            if name not in inside:
                self._parameters[name].data = self.model.tensor(name).float()


_NOTHING = torch.zeros(())  # expanded to the shape of an embedding, tokens can be looked up in it, and it takes no memory


def _blocks_of(module: nn.Module) -> tuple[str, nn.ModuleList]:
    lists = [(name, part) for name, part in module.named_modules() if isinstance(part, nn.ModuleList) and len(part)]
    if not lists:
        raise InputError(
            f"{type(module).__name__} has no list of blocks to walk through", "only models of repeated blocks can be calibrated"
        )
    return max(lists, key=lambda entry: sum(p.numel() for p in entry[1].parameters()))
