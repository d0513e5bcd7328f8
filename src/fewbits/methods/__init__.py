"""Ways to choose codes: (weight, format, statistics) -> `Outcome`, the packed weight. Every file here is a method, named as the file.

error_feedback/ is not a method by itself: it is the solver behind `gptq` and `auto`. tuned_scales/ moves the scales of a whole model after
a method chose the codes.
"""

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
    method: str  # that made the parts: `auto` chooses one, and gptq falls back to rtn where the Hessian is singular
    damping: float | None = None
    damage: dict[str, float] = field(default_factory=dict)  # candidate -> damage on the half of the samples that it was not fitted to
    places: dict[str, tuple[float, float]] = field(default_factory=dict)  # candidate -> relative output error at position 0, and later
    notes: tuple[str, ...] = ()  # what a person should know: a Hessian that could not be used, a fallback
    bias: Tensor | None = None  # of the layer, corrected for the mean shift that rounding causes; None: unchanged


class Method(Protocol):
    needs_statistics: bool

    def quantize(self, w: Tensor, fmt: Format, statistics: WeightStatistics | None = None) -> Outcome: ...


def all() -> list[str]:
    return sorted(m.name for m in pkgutil.iter_modules(__path__) if not m.ispkg)


def get(name: str) -> Method:
    if name.lower() not in all():
        raise InputError(f"no method is named `{name}`", f"known methods: {', '.join(all())}")
    method: Method = importlib.import_module(f"{__name__}.{name.lower()}").METHOD
    return method
