"""Whether a model is a chain: a block reads the output of the block before it and nothing else that depends on the tokens, and the logits
depend on nothing but the last block's output.

Only then is running block after block the same as running the model. It is tested with stubs in the blocks' places: whatever they return,
and whatever the tokens are, the other arguments of the blocks must stay the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from fewbits.model.blocks import Blocks, Call

_TOKENS = 4


def is_chain(blocks: Blocks) -> bool:
    """As a side effect, tells the stubs whether to return a tuple: some models take the first of what a block returns."""
    if not blocks.own_their_weights():
        return False
    for in_tuple in (False, True):
        for stub in blocks.stubs:
            stub.in_tuple = in_tuple
        try:
            if _holds(blocks):
                return True
        except Exception:  # a model may raise anything when a block returns the wrong type
            continue
    return False


@torch.no_grad()
def _holds(blocks: Blocks) -> bool:
    ids = torch.arange(_TOKENS).unsqueeze(0)
    with blocks.random_ends():
        shape = blocks.enter(ids)[0].shape
        if len(shape) != 3 or shape[:2] != ids.shape:
            return False
        a, b = (torch.randn(len(blocks), *shape, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
        calls, others = _calls(blocks, ids, a), _calls(blocks, ids + _TOKENS, b)
        if calls is None or others is None or not _same(calls, others):
            return False
        out = blocks.leave(a[0])
        return len(out) == 1 and torch.equal(out, blocks.leave(a[0], ids)) and not torch.equal(out, blocks.leave(b[0]))


def _calls(blocks: Blocks, ids: Tensor, answers: Tensor) -> list[Call] | None:
    """The arguments of blocks that return these answers; None if one of them does not read the answer of the block before it."""
    for stub, answer in zip(blocks.stubs, answers, strict=True):
        stub.answer = answer
    try:
        calls = blocks.enter(ids)[1]
        read = [stub.hidden for stub in blocks.stubs[1:]]
        in_line = all(hidden is not None and torch.equal(hidden, answer) for hidden, answer in zip(read, answers[:-1], strict=True))
        return calls if in_line else None
    finally:
        for stub in blocks.stubs:
            stub.answer = None


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return isinstance(b, list | tuple) and len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b) if isinstance(a, bool | int | float | str | None) else type(a) is type(b)
