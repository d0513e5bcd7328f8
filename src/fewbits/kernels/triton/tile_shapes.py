"""Tile shapes: tile_shapes.csv has one line per kernel, architecture, bits of the narrowest plane and number of tokens. 0 bits: codes
that stand for vectors, which have no planes. `note` says how a line was found.

`modelled`: not timed on a GPU. It compiles for its architecture without spills, loads 8 bytes or more of codes per lane, and fits the
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
    with (resources.files(__package__) / "tile_shapes.csv").open() as stored:
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
    tiles = [tile for tile in all() if (tile.kernel, tile.architecture, tile.bits) == (kernel, known, bits) and tile.tokens_up_to >= tokens]
    return min(tiles, key=lambda tile: tile.tokens_up_to)


def nearest(architecture: str) -> str:
    """The architecture whose shapes a GPU uses: sm_87 uses those of sm_86. Its kernels are still compiled for sm_87."""
    if architecture in ARCHITECTURES:
        return architecture
    if architecture.startswith("sm_"):
        older = [int(name[3:]) for name in ARCHITECTURES if name.startswith("sm_") and int(name[3:]) <= int(architecture[3:])]
        return f"sm_{max(older, default=80)}"
    return "gfx942" if architecture.startswith("gfx9") else "gfx1100"


def lanes(architecture: str) -> int:
    return 64 if architecture.startswith("gfx9") else 32


def multiplies_float8(architecture: str) -> bool:
    """Whether tensor cores multiply OCP's e4m3. gfx942 has a different e4m3, so AMD GPUs decode it."""
    return architecture.startswith("sm_") and int(architecture[3:]) >= 89
