"""A stub takes the place of a block, so that a model can be called without it: it records what the block would be given."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn

Call = dict[str, Any]  # the arguments of one block, hidden states left out
FORMS = (None, 1, 2, 3)  # how blocks return hidden states: alone, or first in a tuple of this length


class Stub(nn.Module):
    def __init__(self, block: nn.Module, form: int | None = None) -> None:
        super().__init__()
        self._block = [block]  # in a list, so that it does not count as a submodule
        self.seen: Call = {}
        self.hidden: Tensor | None = None  # what it was given; None: it was not called
        self.answer: Tensor | None = None  # what it returns; None: what it was given
        self.stop = False
        self.form = form

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
            raise Stopped
        answer = self.hidden if self.answer is None else self.answer
        assert answer is not None
        return answer if self.form is None else (answer, None, None)[: self.form]


class Stopped(Exception):  # noqa: N818 - not an error: all blocks were called, and the rest of the model need not run
    pass


def put(module: nn.Module, path: str, part: nn.Module) -> None:
    parent, _, attribute = path.rpartition(".")
    setattr(module.get_submodule(parent), attribute, part)
