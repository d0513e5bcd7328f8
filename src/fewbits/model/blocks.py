"""The blocks of a model, with the weights of one of them in memory at a time. walk.py takes samples through them.

No architecture is named here. The blocks are the module list that holds most of the weights that text reaches. What a block is called
with besides the state (masks, rotary angles, the kind of attention) is recorded by stubs that the model calls in the blocks' places; what
the state is, state.py says. Embeddings and the output matrix, each as large as a block, are in memory only while samples enter or leave
the model. If the experts of a block together exceed a limit, they are loaded one at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from fewbits.errors import InputError
from fewbits.model import chain
from fewbits.model.experts import ExpertsAlone, ExpertsOnDemand, placeholder, with_eager_experts
from fewbits.model.module import empty_module
from fewbits.model.state import Layout
from fewbits.model.stubs import Call, Stopped, Stub, put
from fewbits.model.weights import TOWER
from fewbits.store.heap import return_free_memory

if TYPE_CHECKING:
    from fewbits.model.weights import Weight

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


class Blocks:
    def __init__(self, model: Source, memory: int | None = None) -> None:
        """`memory`: bytes that the experts of a block may take together before they are loaded one at a time; None: no limit."""
        self.model, self._memory = model, memory
        self.device = torch.device("cpu")
        self._nothing = _NOTHING
        # experts are multiplied one by one, so that the inputs of each can be seen
        self.module = empty_module(with_eager_experts(model.config)).eval().requires_grad_(False)
        self.path, blocks = _blocks_of(self.module, model.weights)
        self._blocks = list(blocks)
        self.stubs = [Stub(block) for block in self._blocks]  # in the places of the blocks
        self._shapes = {name: tensor.shape for name, tensor in self._parameters.items()}
        for name in self._names():  # uninitialized values take no memory on fresh pages, but these may be reused ones
            self._parameters[name].data = self._nothing.expand(self._shapes[name])
        return_free_memory()
        self._supplied: dict[str, Callable[[], Tensor]] = {}  # experts of the filled block that are loaded for each product
        put(self.module, self.path, nn.ModuleList(self.stubs))
        self._ends = [weight for weight in self.outer_weights if weight.expert is None and weight.kind != "convolution"]
        elsewhere = {weight.parameter for weight in self._ends} | {weight.parameter for weight in model.weights if weight.kind == TOWER}
        self._fill(name for name in self._names() if not name.startswith(f"{self.path}.") and name not in elsewhere)
        self._hold([])
        self._layout = chain.layout_of(self)

    def __len__(self) -> int:
        return len(self._blocks)

    def to(self, device: torch.device) -> Blocks:
        """The same blocks, filled and run on this device from now on. What a model is was found out on the processor before."""
        if device == self.device:
            return self
        self._hold([])
        self.device, self._nothing = device, torch.zeros((), device=device)
        names = {id(tensor): name for name, tensor in self._parameters.items()}
        self.replace_tensors(lambda t: t.to(device) if _has_values(t) else self._nothing.expand(self._shapes[names[id(t)]]))
        return self

    def replace_tensors(self, change: Callable[[Tensor], Tensor]) -> None:
        """Every parameter and buffer by another tensor; what is one tensor in two places stays one."""
        new: dict[int, Tensor] = {}
        for module in (module for part in [self.module, *self._blocks] for module in part.modules()):
            for tensors in (module._parameters, module._buffers):
                for name, tensor in tensors.items():
                    if tensor is not None and id(tensor) not in new:
                        changed = change(tensor)
                        new[id(tensor)] = nn.Parameter(changed, False) if isinstance(tensor, nn.Parameter) else changed
                    tensors[name] = None if tensor is None else new[id(tensor)]  # type: ignore[assignment]
        del self._parameters

    @property
    def is_chain(self) -> bool:
        return isinstance(self._layout, Layout)

    def expect_chain(self) -> Blocks:
        if not isinstance(self._layout, Layout):
            raise InputError(
                f"the blocks of {type(self.module).__name__} {self._layout}: they cannot be run one by one",
                "use `--method rtn`, which needs no calibration",
            )
        return self

    @property
    def layout(self) -> Layout:
        """What is in the state between two blocks."""
        self.expect_chain()
        assert isinstance(self._layout, Layout)
        return self._layout

    def block(self, index: int) -> nn.Module:
        """Without its weights, if it is not `filled`."""
        return self._blocks[index]

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
        """Those in no block that text reaches: embeddings and the output matrix."""
        return [weight for weight in self.model.weights if not weight.name.startswith(f"{self.path}.") and weight.kind != TOWER]

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
            matrix = matrix.to(self.device)
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
        """(the state that the first block reads, the other arguments of each block) for ids (batch, length)."""
        hidden, calls = self.call_stubs(ids)
        return self.layout.entered(hidden, calls), calls

    def call_stubs(self, ids: Tensor) -> tuple[Tensor, list[Call]]:
        """(hidden states as the first block reads them, the other arguments of each block)"""
        self._hold([weight for weight in self._ends if weight.kind != "output"])
        self.stubs[-1].stop = True
        try:
            self.module(input_ids=ids.to(self.device), use_cache=False)
        except Stopped:
            pass
        finally:
            self.stubs[-1].stop = False
        hidden = self.stubs[0].hidden
        assert hidden is not None
        return hidden, [stub.seen for stub in self.stubs]

    def leave(self, state: Tensor) -> Tensor:  # (batch, length, columns)
        """Logits (batch, length, vocabulary) from the state after the last block, or from some of its positions."""
        return self.logits_of(self.layout.hidden_of(state.to(self.device)), torch.zeros(state.shape[:2], dtype=torch.long))

    def logits_of(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """From what the last block returns. `ids` do not change the logits of a chain; chain.py varies them to check that."""
        self._hold([weight for weight in self._ends if weight.kind != "embedding" or weight.tied_to])
        self.stubs[-1].answer = hidden
        try:
            logits: Tensor = self.module(input_ids=ids.to(self.device), use_cache=False, return_dict=False)[0]
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
                self._parameters[name].data = torch.empty(0, device=self.device)
            return_free_memory()

    def _exceeds(self, experts: Sequence[Weight]) -> bool:
        return self._memory is not None and _FLOAT * sum(weight.shape[0] * weight.shape[1] for weight in experts) > self._memory

    @contextmanager
    def _supplying(self, experts: Sequence[Weight]) -> Iterator[None]:
        """The parameters get no values: an expert is loaded for each product with it, and freed after it."""
        for weight in experts:
            self._supplied[weight.name] = lambda weight=weight: self.model.load(weight)  # type: ignore[misc]
            if weight.expert == 0:
                self._parameters[weight.parameter].data = placeholder(self._shapes[weight.parameter]).to(self.device)
        transposed = {weight.name: weight.transposed for weight in experts}

        def supply(parameter: str, expert: int) -> Tensor:
            matrix = self._supplied[f"{parameter}.{expert}"]().to(self.device)
            return matrix.T.contiguous() if transposed[f"{parameter}.{expert}"] else matrix

        try:
            with ExpertsOnDemand({weight.parameter: self.parameter(weight) for weight in experts}, supply):
                yield
        finally:
            self._supplied.clear()

    @contextmanager
    def experts_alone(self, weights: Sequence[Weight]) -> Iterator[None]:
        """While inside, a filled block multiplies with no other experts of the modules that these belong to. Experts of other modules are
        there as always: what they give may be what these read."""
        wanted: dict[str, set[int]] = {}
        for weight in weights:
            if weight.expert is not None:
                wanted.setdefault(weight.parameter.rpartition(".")[0], set()).add(weight.expert)
        with ExitStack() as stack:
            for module, experts in wanted.items():
                inside = {
                    name: tensor for name, tensor in self._parameters.items() if name.rpartition(".")[0] == module and tensor.dim() == 3
                }
                stack.enter_context(ExpertsAlone(inside, experts))
            yield

    def run(self, index: int, state: Tensor, call: Call, cache: Any = None) -> Tensor:
        """The state after this block. `cache`: its `update` is given the keys and values as attention will read them."""
        return self.layout.run(index, self._blocks[index], state, call if cache is None else {**call, "past_key_values": cache})

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
            if weight in wanted and not _has_values(parameter):
                self.put(weight, self.model.load(weight))
            elif weight not in wanted and _has_values(parameter):
                parameter.data = self._nothing.expand(self._shapes[weight.parameter])

    def _fill(self, names: Iterable[str]) -> None:
        inside: dict[str, list[Weight]] = {}
        for weight in self.model.weights:
            inside.setdefault(weight.parameter, []).append(weight)
        for name in names:
            for weight in inside.get(name, ()):
                if weight.expert == 0:
                    self._parameters[name].data = torch.empty(self._shapes[name], device=self.device)
                self.put(weight, self.model.load(weight))
            if name not in inside:
                self._parameters[name].data = self.model.tensor(name).float().to(self.device)


def state_columns(model: Source) -> tuple[int, int] | None:
    """Numbers of a token between two blocks: those that every block writes anew, and all. None: its blocks cannot be run one by one."""
    try:
        layout = Blocks(model).layout
    except InputError:
        return None
    return layout.changing, layout.columns


_NOTHING = torch.zeros(())  # expanded to the shape of an embedding, tokens can be looked up in it, and it takes no memory


def _has_values(tensor: Tensor) -> bool:
    """Not emptied, and not `_NOTHING` expanded."""
    return tensor.numel() > 0 and (tensor.dim() == 0 or any(tensor.stride()))


def _blocks_of(module: nn.Module, weights: Sequence[Weight]) -> tuple[str, nn.ModuleList]:
    towers = {weight.parameter for weight in weights if weight.kind == TOWER}
    lists = {path: part for path, part in module.named_modules() if isinstance(part, nn.ModuleList) and len(part)}
    if not lists:
        raise InputError(
            f"{type(module).__name__} has no list of blocks to walk through", "only models of repeated blocks can be calibrated"
        )

    def reached(path: str) -> int:
        return sum(p.numel() for name, p in lists[path].named_parameters() if f"{path}.{name}" not in towers)

    return (largest := max(lists, key=reached)), lists[largest]
