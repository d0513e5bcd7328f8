"""The kernel for every format: unpack, then `scale * level + offset`. It is slow; every other kernel must equal it bit for bit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fewbits.formats import Format

if TYPE_CHECKING:
    from torch import Tensor

    from fewbits.formats import Parts


def decode(fmt: Format, parts: Parts) -> Tensor:  # -> (rows, cols) float32
    # a GPU's arrays are decoded on the processor, because that is where formats keep their tables
    where = next(iter(parts.values())).device
    chosen, grid = fmt.unpack({name: part.cpu() for name, part in parts.items()})
    return fmt.decode(chosen, grid).to(where)
