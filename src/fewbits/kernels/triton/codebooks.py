"""Which codebooks the kernels can look up. Formats whose codes stand for vectors are recognised by the grid of their points. Needs no
torch.

kernels/codebooks.py has a function for each of them and explains the arrays, kernels/points.py the look-up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fewbits.formats import Format

COLUMNS = 32  # four vectors of eight
Scales = Literal["above the signs", "above the indices", "above d", "in bytes"]


@dataclass(frozen=True)
class Points:
    """How a codebook's indices, signs and scales are stored on a GPU."""

    group: int  # columns under one scale
    high: int  # bits of a vector: of its indices above the lowest eight, and of its shift
    signs: Literal["even", "free", "shifted", "in the points"]  # "shifted": in the points, each of which is shifted up or down
    scales: Scales  # where their bits are
    width: int = 8  # weights of a point

    @property
    def arrays(self) -> tuple[tuple[str, int, str], ...]:
        """(name, columns per entry, type), in the order in which the kernel takes them."""
        made = [("low", COLUMNS, "int32")]
        if self.width == 4:
            made += [("second", COLUMNS, "int32")]
        if self.signs in ("even", "free"):
            made += [("signs", COLUMNS, "int32")]
        if self.high and not self.high_above_the_signs:
            made += [("high", COLUMNS, "uint8" if self.scales == "in bytes" else "int16")]
        if self.scales == "above d":
            return (*made, ("sub", 256, "int64"))
        if self.scales == "in bytes":
            made += [("sub", 2 * self.group, "uint8")]
        return (*made, ("d", 256, "float16"))

    @property
    def high_above_the_signs(self) -> bool:
        """Seven signs of four vectors leave four bits of a word: they are for the scale, or else for one bit of each index."""
        return self.high == 1 and self.signs == "even"


BY_GRID = {
    "iq1_s": Points(32, 3, "in the points", "above the indices"),
    "iq1_m": Points(16, 4, "shifted", "above d"),
    "iq2_xxs": Points(32, 0, "even", "above the signs"),
    "iq2_xs": Points(16, 1, "even", "in bytes"),
    "iq2_s": Points(16, 2, "free", "in bytes"),
    "iq3_xxs": Points(32, 0, "even", "above the signs", width=4),
    "iq3_s": Points(32, 2, "free", "in bytes", width=4),
}


def unsupported(fmt: Format) -> str | None:
    """Of a format whose codes stand for vectors: why no kernel looks its points up; None if one does."""
    known = BY_GRID.get(fmt.name)
    if known is None:
        return f"{fmt.name} has a codebook that the kernels do not know: they know {', '.join(BY_GRID)}"
    if fmt.group != known.group or fmt.block != 256:
        return f"{fmt.name} has a scale for every {fmt.group} columns of {fmt.block}; the kernels know {known.group} of 256 for its points"
    return None
