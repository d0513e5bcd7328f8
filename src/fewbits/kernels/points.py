"""The points of codebook formats, handed to the native module once, before the first weight of theirs is read."""

from __future__ import annotations

from functools import cache

from fewbits.devices import processor
from fewbits.formats.storage.grids import grid


@cache
def give(name: str) -> None:
    """Nothing to do for a format without a codebook. What is forgotten is no garbage: the native module refuses to read without points."""
    if name in processor.native().grids():
        import torch

        processor.native().give_grid(name, grid(name).to(torch.int8).numpy())
