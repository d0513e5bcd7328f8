"""Whether a model is a chain: a block reads the state that the block before it leaves and nothing else that depends on the tokens, and the
logits depend on nothing but the last block's output. Only then is running block after block the same as running the model.

What the state holds is found by trials. Stubs are in the blocks' places: an argument that stays the same whatever they return and whatever
the tokens are is no part of it; one that changes with the tokens alone is, as an input that was given to that block. Where blocks share a
dict, they are run themselves, without values, to see what they write into it.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fewbits.model.reached import ReadsOnly
from fewbits.model.state import Axes, Layout, Path, Piece, first, leaves
from fewbits.model.stubs import FORMS, Call

if TYPE_CHECKING:
    from fewbits.model.blocks import Blocks

_TOKENS = 4
_OTHER = (2, 5)  # another batch: axes that grow with it are those of samples and of tokens


class NoChainError(Exception):
    """Why a model is none."""


def layout_of(blocks: Blocks) -> Layout | str:
    """The state between its blocks, or why it is no chain. As a side effect, tells the stubs in which form to return hidden states."""
    if not blocks.own_their_weights():
        return "share their weights"
    reason = "are not called one after the other"
    for form in FORMS:
        for stub in blocks.stubs:
            stub.form = form
        try:
            return _layout(blocks)
        except NoChainError as failure:
            reason = str(failure)
        except Exception:  # a model may raise anything when a block returns the wrong type
            continue
    return reason


@torch.no_grad()
def _layout(blocks: Blocks) -> Layout:
    ids = torch.arange(_TOKENS).unsqueeze(0)
    others = torch.arange(_OTHER[0] * _OTHER[1]).view(_OTHER)
    with blocks.random_ends():
        hidden, calls = blocks.call_stubs(ids)
        larger, larger_calls = blocks.call_stubs(others)
        axes = _axes(hidden, larger, "hidden states")
        a, b = (torch.randn(len(blocks), *hidden.shape, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
        calls = _calls(blocks, ids, a)
        varying = _differences(calls, _calls(blocks, ids + _TOKENS, b))
        if any(varying) and any(_differences(calls, _calls(blocks, ids, b))):
            raise NoChainError("read the output of other blocks than the one before them")
        zeros = torch.zeros_like(ids)
        out = blocks.logits_of(a[0], zeros)
        if len(out) != 1 or not torch.equal(out, blocks.logits_of(a[0], ids)) or torch.equal(out, blocks.logits_of(b[0], zeros)):
            raise NoChainError("are not all that the logits depend on")
        handed = _handed(blocks, calls, hidden, larger_calls, larger)
    start = axes.columns + sum(piece.axes.columns for piece in handed.values())
    return Layout(axes, handed, _given(varying, calls, larger_calls, start))


def _calls(blocks: Blocks, ids: Tensor, answers: Tensor) -> list[Call]:
    """The arguments of blocks that return these answers. Each must read the answer of the block before it."""
    for stub, answer in zip(blocks.stubs, answers, strict=True):
        stub.answer = answer
    try:
        calls = blocks.call_stubs(ids)[1]
        read = [stub.hidden for stub in blocks.stubs[1:]]
        if not all(hidden is not None and torch.equal(hidden, answer) for hidden, answer in zip(read, answers[:-1], strict=True)):
            raise NoChainError("do not read what the block before them returns")
        return calls
    finally:
        for stub in blocks.stubs:
            stub.answer = None


def _differences(calls: Sequence[Call], others: Sequence[Call]) -> list[list[Path]]:
    """Of each block: the arguments in which the two differ."""
    found = []
    for call, other in zip(calls, others, strict=True):
        one, two = leaves(call), leaves(other)
        if one.keys() != two.keys():
            raise NoChainError("are not always given the same arguments")
        found.append([path for path, leaf in one.items() if not _same(leaf, two[path])])
    return found


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and torch.equal(a, b)
    return bool(a == b) if isinstance(a, bool | int | float | str | None) else type(a) is type(b)


def _axes(small: Tensor, large: Tensor, what: str) -> Axes:
    """From the same tensor for ids (1, _TOKENS) and for ids _OTHER."""
    grown = {(1, _OTHER[0]): 0, (_TOKENS, _OTHER[1]): 1}
    places = [(grown.get(sizes), axis) for axis, sizes in enumerate(zip(small.shape, large.shape, strict=True)) if sizes[0] != sizes[1]]
    if sorted(str(place) for place, _ in places) != ["0", "1"]:
        raise NoChainError(f"are given {what} of shape {tuple(large.shape)} for {_OTHER[0]} x {_OTHER[1]} tokens")
    axis = dict(places)
    others = tuple(size for i, size in enumerate(small.shape) if i not in axis.values())
    return Axes(axis[0], axis[1], others, small.dtype)


def _given(varying: Sequence[Sequence[Path]], calls: Sequence[Call], larger: Sequence[Call], start: int) -> list[dict[Path, Piece]]:
    """A tensor that several blocks are given has its columns once."""
    given: list[dict[Path, Piece]] = []
    known: dict[int, Piece] = {}
    for paths, call, large in zip(varying, calls, larger, strict=True):
        small_leaves, large_leaves = leaves(call), leaves(large)
        pieces = {}
        for path in paths:
            tensor = small_leaves[path]
            if not isinstance(tensor, Tensor):
                raise NoChainError(f"are given a `{path[0]}` that depends on the tokens and is no tensor")
            if id(tensor) not in known:
                known[id(tensor)] = Piece(_axes(tensor, large_leaves[path], f"`{path[0]}`"), start)
                start += known[id(tensor)].axes.columns
            pieces[path] = known[id(tensor)]
        given.append(pieces)
    return given


def _handed(blocks: Blocks, calls: Sequence[Call], hidden: Tensor, larger_calls: Sequence[Call], larger: Tensor) -> dict[Path, Piece]:
    """What the blocks write into dicts that they share."""
    shared = [
        name for name, value in calls[0].items() if isinstance(value, MutableMapping) and all(c.get(name) is value for c in calls[1:])
    ]
    if len(calls) < 2 or not shared:
        return {}
    small, large = _written(blocks, calls, hidden, shared), _written(blocks, larger_calls, larger, shared)
    handed: dict[Path, Piece] = {}
    start = _axes(hidden, larger, "hidden states").columns
    for path, (tensor, after) in small.items():
        handed[path] = Piece(_axes(tensor, large[path][0], f"`{path[0]}`"), start, after)
        start = handed[path].where.stop
    return handed


def _written(blocks: Blocks, calls: Sequence[Call], hidden: Tensor, shared: Sequence[str]) -> dict[Path, tuple[Tensor, int]]:
    """(tensor, the block that wrote it first) by path."""
    known = leaves({name: calls[0][name] for name in shared})
    written: dict[Path, tuple[Tensor, int]] = {}
    for index, call in enumerate(calls):
        with ReadsOnly({}):
            hidden = first(blocks.block(index)(hidden, **call))
        for path, leaf in leaves({name: call[name] for name in shared}).items():
            if path not in known and isinstance(leaf, Tensor):
                written.setdefault(path, (leaf, index))
    if any(len(path) not in (2, 3) for path in written):
        raise NoChainError("hand on nested dicts")
    return written
