"""Tile shapes: data (tiles.csv), one line per kernel, architecture, narrowest plane of bits and number of tokens. `note` says how a line
was found.

`modelled`: no GPU has timed it. It compiles without spills on its architecture, loads 8 bytes or more of codes per lane, and fits its
shared memory. `measured`: timed by `fewbits bench kernels` on the GPU that the note names.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from importlib import resources

ARCHITECTURES = ("gfx1100", "gfx90a", "gfx942", "sm_100", "sm_120", "sm_80", "sm_86", "sm_89", "sm_90")
_ANY = 1 << 30


@dataclass(frozen=True, order=True)
class Tile:
    kernel: str
    architecture: str
    bits: int
    tokens_up_to: int
    rows: int
    tokens: int
    width: int  # columns of a step
    warps: int
    stages: int
    note: str


@cache
def all() -> tuple[Tile, ...]:
    """In the order of the file, which is sorted."""
    with (resources.files(__package__) / "tiles.csv").open() as stored:
        rows = list(csv.DictReader(stored))
    return tuple(
        Tile(
            row["kernel"], row["architecture"], int(row["bits"]), _ANY if row["tokens_up_to"] == "any" else int(row["tokens_up_to"]),
            int(row["rows"]), int(row["tokens"]), int(row["width"]), int(row["warps"]), int(row["stages"]), row["note"],
        )
        for row in rows
    )  # fmt: skip


@cache
def choose(kernel: str, architecture: str, bits: int, tokens: int = 1) -> Tile:
    known = nearest(architecture)
    own = [tile for tile in all() if (tile.kernel, tile.architecture, tile.bits) == (kernel, known, bits) and tile.tokens_up_to >= tokens]
    return min(own, key=lambda tile: tile.tokens_up_to)


def nearest(architecture: str) -> str:
    """The architecture of the table that a GPU's own code stands for: sm_87 is served by sm_86's shapes. Compiling is for the GPU's own."""
    if architecture in ARCHITECTURES:
        return architecture
    if architecture.startswith("sm_"):
        own = int(architecture[3:])
        older = [int(name[3:]) for name in ARCHITECTURES if name.startswith("sm_") and int(name[3:]) <= own]
        return f"sm_{max(older, default=80)}"
    return "gfx942" if architecture.startswith("gfx9") else "gfx1100"


def lanes(architecture: str) -> int:
    return 64 if architecture.startswith("gfx9") else 32


def multiplies_float8(architecture: str) -> bool:
    """Whether tensor cores take e4m3 (as OCP has it: gfx942's own is another e4m3, so AMD decodes)."""
    return architecture.startswith("sm_") and int(architecture[3:]) >= 89
