"""Some rows of a weight, from values to codes, in one native call without the interpreter's lock: `rows.py` is the same in torch.

Native code has to fit a block's scales as it comes to it, so the format's search must be native too; or there is one block, whose scales
are fitted before. The bytes are the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fewbits.devices import processor
from fewbits.formats.storage.codebooks import Points
from fewbits.kernels.quantize import fitter
from fewbits.methods.error_feedback import columns, vectors

if TYPE_CHECKING:
    from fewbits.formats import Format, Grid
    from fewbits.methods.error_feedback.hessian import Ordered


def solve(w: Tensor, fmt: Format, h: Ordered, fixed: Grid | None, passes: int, refits: int, isa: str) -> tuple[Tensor, Grid] | None:
    """w (rows, cols) -> (codes, grid); None where torch has to do it: scales have no native search, or it refuses these values."""
    w, rows = w.contiguous(), len(w)
    scale = offset = search = None
    fields: dict[str, Tensor] = {}
    if len(h.blocks) == 1:
        grid = fmt.fit(w, h.stakes, fixed)
        scale, offset = (None if each is None else each.expand(w.shape).contiguous().numpy() for each in fmt.affine(grid))
    else:
        found = fitter(fmt, h.blocks[0].stop)
        if found is None or fixed is not None:
            return None
        search, entries = found
        grid = fields = {name: torch.empty(rows, len(h.blocks) * count, dtype=dtype) for name, (count, dtype) in entries.items()}
    codebook, attempts = fmt.codebook, list[int]()
    if isinstance(codebook, Points):
        book, attempts = codebook.native, [vectors.ATTEMPTS]
        codes = torch.empty(rows, w.shape[1] // fmt.dimension, dtype=torch.int32)
    else:
        assert fmt.levels
        book = columns.table(fmt.levels).arrays
        codes = torch.empty(w.shape, dtype=torch.uint8)
    stored: list[Any] = [field.view(torch.uint8).numpy() for field in fields.values()]
    into = scale, offset, codes.numpy(), stored
    done = processor.native().feed_back(isa, h.native, search, book, w.numpy(), passes, refits, *into, *attempts, torch.get_num_threads())
    return (codes, grid) if done else None
