"""The searches in C++ (kernels/native/search). Each function returns None where torch has to search instead."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fewbits.devices import processor
from fewbits.formats.search.integers import MOST, Steps, line_bits
from fewbits.formats.search.trial_points import KEPT, ScaleTrials, line_starts

if TYPE_CHECKING:
    from numpy.typing import NDArray

Store = Callable[[Tensor], Tensor]
Weights = tuple["NDArray[Any]", "NDArray[Any] | None"]


@dataclass(frozen=True)
class Units:
    """What the second step of a K-quant's search tries, for native code."""

    maker: str
    sizes: tuple[int, ...]  # groups in a super-block, then the range of the integers
    trials: tuple[tuple[float, ...], ...]
    rounds: int

    @property
    def per_super(self) -> int:
        return self.sizes[0]


def isa() -> str | None:
    """The instruction set to search with: the fastest here, or the one that FEWBITS_KERNEL forces; None: search in torch."""
    return processor.fastest(_searches()) if processor.backend() != "reference" else None


@cache
def _searches() -> tuple[str, ...]:
    return tuple(processor.native().search_isas())


def keeps_all(store: Store) -> bool:
    """Whether `store` leaves scales unchanged."""
    probe = torch.empty(0)
    return store(probe) is probe


def arrays(x: Tensor, importance: Tensor | None) -> Weights | None:
    """x and importance with groups as rows; None where torch must search. Where all rows of a weight share one importance it is not
    repeated for each: native code goes through its rows in turn, from the first again after the last."""
    tensors = [x] if importance is None else [x, importance]
    if any(t.dtype != torch.float32 or t.device.type != "cpu" for t in tensors) or x.numel() == 0 or (n := x.shape[-1]) < 2:
        return None
    rows = None
    if importance is not None:
        shared = importance.shape[next((i for i, size in enumerate(importance.shape) if size > 1), importance.ndim - 1) :]
        repeats = importance.ndim <= x.ndim and shared == x.shape[x.ndim - len(shared) :]
        rows = (importance if repeats else importance.expand_as(x)).detach().reshape(-1, n).contiguous().numpy()
    return x.detach().reshape(-1, n).contiguous().numpy(), rows


def fit_scale(x: Tensor, trials: ScaleTrials, importance: Tensor | None) -> Tensor | None:
    if (taken := _short(x, importance)) is None or (search := scale_search(trials)) is None:
        return None
    scale = torch.empty(x.shape[:-1])
    written = processor.native().fit_scale(*taken, search, scale.view(-1).numpy(), torch.get_num_threads())
    return scale if written else None  # not written: a weight is NaN, which torch handles


def fit_scale_and_min(x: Tensor, top: int, importance: Tensor | None, float16: bool) -> tuple[Tensor, Tensor] | None:
    if (taken := _short(x, importance)) is None:
        return None
    scale, minimum = torch.empty(x.shape[:-1]), torch.empty(x.shape[:-1])
    into = scale.view(-1).numpy(), minimum.view(-1).numpy()
    written = processor.native().fit_line(*taken, line_search(top, float16), *into, torch.get_num_threads())
    return (scale, minimum) if written else None


def fit_sub_scales(x: Tensor, steps: Steps, wanted: Tensor, units: Units, importance: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """wanted (rows, groups) -> sub int8 like it, d float16 (rows, super-blocks)."""
    if (taken := _short(x, importance)) is None or x.shape[-1] * units.per_super > MOST:
        return None
    if (search := scale_search(ScaleTrials(steps, (), (), (1.0,), False))) is None:
        return None
    sub, d = torch.empty(wanted.shape, dtype=torch.int8), torch.empty(len(wanted), wanted.shape[1] // units.per_super, dtype=torch.float16)
    ideal = wanted.contiguous().view(-1).numpy()
    written = processor.native().fit_sub_scales(
        *taken, search, made_units(units), ideal, sub.view(-1).numpy(), _bits(d), torch.get_num_threads()
    )
    return (sub, d) if written else None


def fit_sub_lines(
    x: Tensor, top: int, scale: Tensor, minimum: Tensor, units: Units, importance: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """scale and minimum (rows, groups) -> sub, sub_min uint8 like them, d, dmin float16 (rows, super-blocks)."""
    if (taken := _short(x, importance)) is None or x.shape[-1] * units.per_super > MOST:
        return None
    sub, sub_min = (torch.empty(scale.shape, dtype=torch.uint8) for _ in range(2))
    d, dmin = (torch.empty(len(scale), scale.shape[1] // units.per_super, dtype=torch.float16) for _ in range(2))
    ideal = (entries.contiguous().view(-1).numpy() for entries in (scale, minimum))
    into = sub.view(-1).numpy(), sub_min.view(-1).numpy(), _bits(d), _bits(dmin)
    written = processor.native().fit_sub_lines(*taken, line_search(top, False), made_units(units), *ideal, *into, torch.get_num_threads())
    return (sub, sub_min, d, dmin) if written else None


@cache
def scale_search(trials: ScaleTrials) -> Any:
    """None where levels lie too close to each other for the native rounding."""
    steps = trials.steps
    try:
        return processor.native().scale_search(
            steps.bits,
            steps.low,
            steps.high,
            list(steps.levels),
            list(steps.thresholds),
            trials.ends[0],
            len(trials.ends) == 1,
            trials.float16,
            list(trials.inverses),
            list(trials.around),
        )
    except ValueError:
        return None


@cache
def made_units(units: Units) -> Any:
    return getattr(processor.native(), units.maker)(*units.sizes, *map(list, units.trials), units.rounds)


@cache
def line_search(top: int, float16: bool) -> Any:
    kept, starts = ([number for pair in pairs for number in pair] for pairs in (KEPT, line_starts(top)))
    return processor.native().line_search(top, line_bits(top), float16, kept, starts)


def _short(x: Tensor, importance: Tensor | None) -> tuple[str, NDArray[Any], NDArray[Any] | None] | None:
    """(instruction set, x, importance) of groups of an even number of weights, up to 256: native code takes two in each 32-bit lane."""
    if x.shape[-1] > MOST or x.shape[-1] % 2 or (taken := arrays(x, importance)) is None or (chosen := isa()) is None:
        return None
    return chosen, *taken


def _bits(halves: Tensor) -> NDArray[Any]:
    bits: NDArray[Any] = halves.view(torch.int16).view(-1).numpy().view("uint16")
    return bits
