"""Layers by name or by a regular expression from a file. A hostile one may never end: all that one object tries have two seconds."""

from __future__ import annotations

import time

from fewbits.errors import InputError
from fewbits.store.untrusted import first_line

_PATIENCE = 2.0  # seconds


class LayerPatterns:
    def __init__(self, hint: str) -> None:
        self._ends, self._hint = time.monotonic() + _PATIENCE, hint

    def match(self, target: str, layer: str) -> bool:
        """`Linear` matches every layer, since it is asked only for layers that are quantized."""
        if not target.startswith("re:"):
            return target in (layer, "Linear")
        import regex

        try:
            return regex.match(target.removeprefix("re:"), layer, timeout=max(1e-3, self._ends - time.monotonic())) is not None
        except (regex.error, TimeoutError) as failure:
            said = first_line(failure) if isinstance(failure, regex.error) else "it does not come to an end"
            raise InputError(f"config.json names layers by `{target[:100]}`: {said}", self._hint) from failure
