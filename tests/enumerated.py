"""What enumerates goes to `make test-all`; one case of each kind stays in `make test`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from fewbits.formats import Format, affine, scale_and_bias

_MANY = (affine.__name__, scale_and_bias.__name__)
_COMMON = {"int4_g32", "int4_g128", "int8_channel", "int8_g32", "affine4_g64", "affine8_g64_bf16"}


def one_of(cases: Iterable[Any], stay: int = 1) -> list[Any]:
    """For `parametrize`: the first cases as they are, the others marked slow. A tuple is the arguments of one case."""
    arguments = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*each, marks=() if place < stay else pytest.mark.slow) for place, each in enumerate(arguments)]


def each_kind(formats: Iterable[Format]) -> list[Any]:
    """For `parametrize`: every format, but of the hundred integers those in common use and one of each kind; the others are marked slow."""
    kinds = set()
    cases = []
    for fmt in formats:
        kind = (type(fmt), fmt.tensor_wide, fmt.group is None) if type(fmt).__module__ in _MANY else fmt.name
        stays = kind not in kinds or fmt.name in _COMMON
        kinds.add(kind)
        cases.append(pytest.param(fmt, id=fmt.name, marks=() if stays else pytest.mark.slow))
    return cases
