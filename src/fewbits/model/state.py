"""The state between two blocks: one row per token, with everything of it that later blocks read.

Of most models these are the hidden states, and a row is what a block is given. Others hand on more, found by chain.py:

    | hidden states | handed on: keys and values that a later block reads again | given: inputs of single blocks, made of the tokens |

A block is then a function from rows to rows: what it does not change passes through it, in the backward pass the gradient too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from fewbits.model.stubs import Call

Path = tuple[str | int, ...]  # where a tensor is in the arguments of a block: ("shared_kv_states", "full_attention", 0)


@dataclass(frozen=True)
class Axes:
    """How a tensor of tokens lies in memory."""

    batch: int
    length: int
    others: tuple[int, ...]  # sizes of the other axes, in order
    dtype: torch.dtype = torch.float32

    @property
    def columns(self) -> int:
        return math.prod(self.others)

    @property
    def is_plain(self) -> bool:  # (batch, length, width)
        return (self.batch, self.length) == (0, 1) and len(self.others) == 1 and self.dtype == torch.float32

    def rows(self, tensor: Tensor) -> Tensor:  # -> (batch, length, columns)
        moved = tensor.movedim((self.batch, self.length), (0, 1))
        return moved.reshape(*moved.shape[:2], self.columns).float()

    def tensor(self, rows: Tensor) -> Tensor:  # (batch, length, columns) -> as a block reads it
        apart = rows.reshape(*rows.shape[:2], *self.others)
        return apart.movedim((0, 1), (self.batch, self.length)).contiguous().to(self.dtype)


@dataclass(frozen=True)
class Piece:
    """One tensor as columns of the state."""

    axes: Axes
    start: int
    after: int = -1  # the block that makes it; -1: it is there before the first

    @property
    def where(self) -> slice:
        return slice(self.start, self.start + self.axes.columns)

    def of(self, state: Tensor) -> Tensor:
        return self.axes.tensor(state[..., self.where])


@dataclass(frozen=True)
class Layout:
    hidden: Axes
    handed: Mapping[Path, Piece]  # in arguments that all blocks share and write to
    given: Sequence[Mapping[Path, Piece]]  # of each block

    @cached_property
    def is_plain(self) -> bool:
        return self.hidden.is_plain and not self.handed and not any(self.given)

    @cached_property
    def changing(self) -> int:
        """The columns that blocks write come first: so many."""
        return self.hidden.columns + sum(piece.axes.columns for piece in self.handed.values())

    @cached_property
    def columns(self) -> int:
        return self.changing + sum({piece.start: piece.axes.columns for some in self.given for piece in some.values()}.values())

    def hidden_of(self, state: Tensor) -> Tensor:
        """As the blocks read them."""
        return state if self.is_plain else self.hidden.tensor(state[..., : self.hidden.columns])

    def entered(self, hidden: Tensor, calls: Sequence[Call]) -> Tensor:
        """The state before the first block."""
        if self.is_plain:
            return hidden
        rows = self.hidden.rows(hidden)
        given = {
            piece.start: piece.axes.rows(at(call, path))
            for call, some in zip(calls, self.given, strict=True)
            for path, piece in some.items()
        }
        nothing = rows.new_zeros(*rows.shape[:2], self.changing - rows.shape[-1])
        return torch.cat([rows, nothing, *(given[start] for start in sorted(given))], dim=-1)

    def run(self, index: int, block: nn.Module, state: Tensor, call: Call) -> Tensor:
        """The state after this block."""
        if self.is_plain:
            return first(block(state, **call))
        given = self.given[index]
        call = mapped(call, lambda path, tensor: given[path].of(state) if path in given else tensor)
        for path, piece in self.handed.items():
            if piece.after < index:
                place(call, path, piece.of(state))
        rows = [self.hidden.rows(first(block(self.hidden_of(state), **call)))]
        for path, piece in self.handed.items():
            rows.append(piece.axes.rows(at(call, path)) if piece.after <= index else state[..., piece.where])
        return torch.cat([*rows, state[..., self.changing :]], dim=-1)


def first(out: Any) -> Tensor:
    result: Tensor = out[0] if isinstance(out, tuple) else out
    return result


def mapped(value: Any, change: Callable[[Path, Tensor], Tensor], path: Path = ()) -> Any:
    """A copy of nested dicts, lists and tuples with other tensors in it."""
    if isinstance(value, Tensor):
        return change(path, value)
    if isinstance(value, MutableMapping):
        copy = type(value)()
        copy.update({key: mapped(one, change, (*path, key)) for key, one in value.items()})
        return copy
    if type(value) in (list, tuple):
        return type(value)(mapped(one, change, (*path, i)) for i, one in enumerate(value))
    return value


def at(value: Any, path: Path) -> Any:
    for step in path:
        value = value[step]
    return value


def place(mapping: MutableMapping[Any, Any], path: Path, tensor: Tensor) -> None:
    """Puts a tensor under (argument, key) or, in a tuple that grows in order, under (argument, key, number)."""
    holder = mapping[path[0]]
    holder[path[1]] = tensor if len(path) == 2 else (*holder.get(path[1], ()), tensor)


def leaves(value: Any) -> dict[Path, Any]:
    """Everything in nested dicts, lists and tuples that is none of them, by its path."""
    if isinstance(value, MutableMapping):
        return {(key, *path): leaf for key, one in value.items() for path, leaf in leaves(one).items()}
    if type(value) in (list, tuple):
        return {(i, *path): leaf for i, one in enumerate(value) for path, leaf in leaves(one).items()}
    return {(): value}
