"""Tensors that may be larger than memory: up to a limit in memory, beyond it in files that the system pages in and out."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from fewbits.errors import MissingError
from fewbits.files import is_full_disk


class Room:
    """Space for tensors that live about as long as it does. What is let go of earlier is not counted back."""

    def __init__(self, folder: Path, limit: int) -> None:
        self.limit = limit
        self._folder, self._left = folder, limit

    def new(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """All zero. One without elements is never mapped."""
        count = math.prod(shape)
        nbytes = count * dtype.itemsize
        if nbytes <= self._left or not nbytes:
            self._left -= nbytes
            return torch.zeros(*shape, dtype=dtype)
        return _mapped(self._folder, count, dtype).view(*shape)


def _mapped(folder: Path, count: int, dtype: torch.dtype) -> Tensor:
    """In a file that has no name any more: the mapping keeps it, and nothing is left behind, however this ends."""
    nbytes = count * dtype.itemsize
    handle, name = tempfile.mkstemp(dir=folder, prefix="spilled-", suffix=".bin")
    try:
        os.posix_fallocate(handle, 0, nbytes)  # asked for now: a full disk would end the process when a page is written
        return torch.from_file(name, shared=True, size=count, dtype=dtype)
    except OSError as failure:
        if is_full_disk(failure):
            raise MissingError(
                f"the disk is full: {nbytes:,} bytes of activations do not fit `{folder}`", "free some space, or give a larger `--memory`"
            ) from failure
        raise
    finally:
        os.close(handle)
        Path(name).unlink()
