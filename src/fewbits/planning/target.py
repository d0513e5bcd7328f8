"""What planning asks of a target: which formats it can store, and in how many bytes; `fewbits.targets.Target` says what a method does."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from fewbits.formats import Format
    from fewbits.formats.runtime.activations import Activation
    from fewbits.model.weights import Weight
    from fewbits.planning import Plan


class Target(Protocol):
    name: str
    together: tuple[str, ...]

    def accepts(self, weight: Weight, fmt: Format) -> str | None: ...

    def nbytes(self, weight: Weight, fmt: Format, activation: Activation | None = None) -> int: ...

    def accepts_activation(self, weight: Weight, fmt: Format, activation: Activation) -> str | None: ...

    def accepts_kv(self, kv: str) -> str | None: ...

    def accepts_plan(self, plan: Plan, weights: Iterable[Weight]) -> str | None: ...

    def activation_block(self, weight: Weight, fmt: Format) -> int | None: ...
