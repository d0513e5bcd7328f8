"""The formats a weight can be stored in. A weight comes in, packed parts go out, and back. Every file here registers its `FORMATS`.

Every quantized format is `scale * codebook[code] + offset`. Formats differ in the codebook, in how many columns share a scale, in how
scales are stored, and in the packing; a `Format` holds just that. Most codebooks are a list of levels, one for each weight; those of
dimension 4 or 8 have a vector of so many weights for each code. storage/ has codes and bits, search/ finds scales, blocks/ is shared by
GGUF's formats, runtime/ has the formats of activations and KV caches.
"""

from __future__ import annotations

import difflib
import importlib
import math
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Literal, NamedTuple

from fewbits.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

    from fewbits.formats.storage.codebooks import Codebook

    Grid = dict[str, Tensor]  # maps codes to values: scales, minima, tensor-wide factors
    Parts = dict[str, Tensor]  # as stored: one named array per tensor of the artifact
    Columns = slice | Tensor  # which columns: a range, every n-th, or a list in GPTQ's visiting order

How = Literal["search", "max"]  # "max" is the textbook rule; "search" minimises the weighted squared error
Shape = tuple[int, int]

LEAST_BITS = 3  # below, some importance must say which columns matter
_ANY = (256, 256)  # a shape that every format fits
_ITEM_BYTES = {"uint8": 1, "int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "float16": 2, "bfloat16": 2, "float32": 4}


class Spec(NamedTuple):
    dtype: str  # torch's name, as a string: pricing a plan must not load torch
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype]


@dataclass(frozen=True, kw_only=True)
class Format(ABC):
    """How a (rows, cols) weight is stored.

    Shapes: a weight is (rows, cols) float32, its codes have the same shape in uint8 (for a cast they are the values themselves), or are
    (rows, cols / dimension) int32 where they stand for vectors.
    Grid entries are (rows, n); a tensor-wide one is (1, 1). `fit` takes any whole number of blocks, so that GPTQ can
    fit a block at a time to weights that it has already corrected.
    """

    name: str  # as in files, on the command line, in plans and reports
    about: str  # one line for the table of formats
    levels: tuple[float, ...] | None  # value of each code, in code order; None: a plain cast, or codes stand for vectors
    group: int | None  # columns under one scale; None: the whole row
    version: int = 1  # of its storage: raised when the same parts are read differently
    block: int = 1  # columns packed together: a row holds a whole number of blocks
    tensor_wide: bool = False  # one scale for the whole weight, fitted once and passed on as `fixed`
    dimension: int = 1  # weights that one code stands for

    @abstractmethod
    def parts(self, shape: Shape) -> dict[str, Spec]:
        """Exact storage, from the shape alone."""

    @abstractmethod
    def fit(self, w: Tensor, importance: Tensor | None = None, fixed: Grid | None = None, how: How = "search") -> Grid:
        """The grid for w. `importance` (cols,) weighs the squared error of each column."""

    @abstractmethod
    def affine(self, grid: Grid, columns: Columns = slice(None)) -> tuple[Tensor, Tensor | None]:
        """(scale, offset) of each of these columns, broadcastable to (rows, n); offset None where it is always zero."""

    @abstractmethod
    def pack(self, codes: Tensor, grid: Grid) -> Parts: ...

    @abstractmethod
    def unpack(self, parts: Parts) -> tuple[Tensor, Grid]: ...

    @property
    def is_cast(self) -> bool:
        """Whether values are stored as they are, in another type: there is no codebook and no scale."""
        return self.levels is None and self.dimension == 1

    @property
    def codebook(self) -> Codebook | None:
        """None: a cast."""
        from fewbits.formats.storage.codebooks import Levels

        return None if self.levels is None else Levels(self.levels)

    def encode(self, w: Tensor, grid: Grid, importance: Tensor | None = None) -> Tensor:
        """The codes nearest to w. `importance` (cols,) weighs columns against each other where they share a code."""
        from fewbits.formats.storage.codes import unit_values

        assert self.codebook
        return self.codebook.nearest(unit_values(w, *self.affine(grid)), importance)

    def decode(self, codes: Tensor, grid: Grid) -> Tensor:  # -> (rows, cols) float32, a copy
        from fewbits.formats.storage.codes import scaled_values

        return codes.float().clone() if self.codebook is None else scaled_values(self.codebook.values(codes), *self.affine(grid))

    def nbytes(self, shape: Shape) -> int:
        return sum(spec.nbytes for spec in self.parts(shape).values())

    def bits_per_weight(self, shape: Shape) -> float:
        return 8 * self.nbytes(shape) / math.prod(shape)

    @property
    def needs_importance(self) -> bool:
        """Too little of each weight is kept for all columns to count alike: llama.cpp refuses most of these types without importance."""
        return not self.is_cast and self.bits_per_weight(_ANY) < LEAST_BITS

    def fits(self, shape: Shape) -> str | None:
        """Why a weight of this shape cannot be stored here; None if it can."""
        if shape[1] % self.block:
            return f"{shape[1]} columns do not divide into {self.name}'s blocks of {self.block}"
        return None


@cache
def all() -> dict[str, Format]:
    """Every format found in this folder, by name, smallest first; of equal size, in the order of their file."""
    known: dict[str, Format] = {}
    for module in sorted(m.name for m in pkgutil.iter_modules(__path__) if not m.ispkg):
        for fmt in importlib.import_module(f"{__name__}.{module}").FORMATS:
            if fmt.name in known:
                raise RuntimeError(f"two formats are named `{fmt.name}`; the second is in {module}.py")
            known[fmt.name] = fmt
    return dict(sorted(known.items(), key=lambda item: item[1].bits_per_weight((4096, 4096))))


def get(name: str) -> Format:
    """By name, upper or lower case."""
    known = all()
    if name.lower() in known:
        return known[name.lower()]
    raise InputError(f"no format is named `{name}`", _nearest(name.lower(), list(known)))


def names_of(given: str | Sequence[str]) -> tuple[str, ...]:
    """A list, or one text with commas, as the command line has it."""
    return tuple(name.strip() for name in given.split(",") if name.strip()) if isinstance(given, str) else tuple(given)


def _nearest(name: str, known: list[str]) -> str:
    """A hint. `int4` leaves out what shares a scale: of the formats that begin so, groups of 32 first."""
    begun = sorted((each for each in known if each.startswith(f"{name}_")), key=lambda each: (not each.endswith("_g32"), len(each), each))
    if begun:
        return f"did you mean {' or '.join(f'`{each}`' for each in begun[:3])}?"
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean `{near[0]}`?" if near else f"known formats: {', '.join(known)}"


def granularity(name: str) -> str:
    """What shares a scale, in words."""
    fmt = get(name)
    if fmt.is_cast:
        return "none: a cast"
    return "tensor" if fmt.tensor_wide and fmt.group is None else "channel" if fmt.group is None else f"group of {fmt.group}"
