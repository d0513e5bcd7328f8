"""Ways to choose codes: (weight, format, statistics) -> Outcome. One file per method; the file is the registration."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from fewbits.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

    from fewbits.calibration.statistics import WeightStatistics
    from fewbits.formats import Format, Parts


@dataclass(frozen=True)
class Outcome:
    """One weight, quantized, and how it went."""

    parts: Parts
    method: str  # what made the parts in the end: `auto` chooses, and a method may have to give way to another
    damping: float | None = None
    damage: dict[str, float] = field(default_factory=dict)  # by candidate, on the half of the samples that it was not fitted to
    places: dict[str, tuple[float, float]] = field(default_factory=dict)  # the same: relative error of the output at position 0, and later
    notes: tuple[str, ...] = ()  # what a person should know: a Hessian that could not be used, a fallback
    bias: Tensor | None = None  # the weight's own, corrected for the mean of the rounding errors; None: as it was


class Method(Protocol):
    needs_statistics: bool

    def quantize(self, w: Tensor, fmt: Format, statistics: WeightStatistics | None = None) -> Outcome: ...


def all() -> list[str]:
    return sorted(m.name for m in pkgutil.iter_modules(__path__))


def get(name: str) -> Method:
    if name.lower() not in all():
        raise InputError(f"no method is named `{name}`", f"known methods: {', '.join(all())}")
    method: Method = importlib.import_module(f"{__name__}.{name.lower()}").METHOD
    return method
