"""Which levels the kernels can decode, and why a format's levels are not among them. Needs no torch."""

from __future__ import annotations

from functools import cache

from fewbits.formats import Format
from fewbits.formats.block32 import NON_LINEAR
from fewbits.formats.fp8 import values
from fewbits.formats.microscaling import E2M1
from fewbits.kernels.triton import codebooks

SIGNS = (-1.0, 1.0)
GROUPS = (16, 32, 64, 128, 256)
_FLOATS8 = {"e4m3": values(4, 3, infinite=False), "e5m2": values(5, 2, infinite=True)}
_FARTHEST = 1 << 15  # largest |first integer|: multiplied by 2^8, the place of a code in its word, it is still exact next to 2^23


@cache
def kind(levels: tuple[float, ...]) -> tuple[str, float] | None:
    """(how kernels/decode.py turns a code into a level, the level of code 0); None: it cannot."""
    first = levels[0]
    if levels == SIGNS:
        return "signs", 0.0
    if list(levels) == [first + code for code in range(len(levels))] and first == int(first) and abs(first) <= _FARTHEST:
        return "integers", first
    if levels == NON_LINEAR:
        return "non-linear", first
    if levels == E2M1:
        return "e2m1", 0.0
    texts = [str(level) for level in levels]  # as text, because NaN is not equal to itself
    return next(((name, 0.0) for name, known in _FLOATS8.items() if texts == [str(level) for level in known]), None)


def unsupported(fmt: Format) -> str | None:
    """Why no kernel decodes it; None if one does, provided that families.py recognises the structure of its scales."""
    if fmt.is_cast:
        return f"{fmt.name} is a cast: torch multiplies it as it is"
    if fmt.levels is None:
        return codebooks.unsupported(fmt)
    if len(fmt.levels) > 256 or kind(fmt.levels) is None:
        known = "integers of up to 8 bits, signs, iq4_nl's, e2m1, e4m3 and e5m2"
        return f"{fmt.name} has levels that the kernels do not know: they know {known}"
    if fmt.group not in (None, *GROUPS):
        return f"{fmt.name} has a scale for every {fmt.group} columns; kernels know {', '.join(map(str, GROUPS))} and whole rows"
    return None
