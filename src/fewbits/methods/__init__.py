"""Ways to choose codes: (weight, format, ...) -> parts. One file per method; the file is the registration."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from typing import TYPE_CHECKING

from fewbits.errors import InputError

if TYPE_CHECKING:
    from fewbits.formats import Parts

    Method = Callable[..., Parts]  # (w, fmt, ...) -> parts


def all() -> list[str]:
    return sorted(m.name for m in pkgutil.iter_modules(__path__))


def get(name: str) -> Method:
    if name.lower() not in all():
        raise InputError(f"no method is named `{name}`", f"known methods: {', '.join(all())}")
    method: Method = importlib.import_module(f"{__name__}.{name.lower()}").quantize
    return method
