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
from fewbits.store.files import is_full_disk


class Room:
    """Space for tensors that live about as long as it does: those that are freed earlier still count against the limit."""

    def __init__(self, folder: Path, limit: int) -> None:
        self.limit = limit
        self._folder, self._left = folder, limit

    def rest(self) -> Room:
        """Another one of the bytes that are left, for tensors that are freed before the next is asked for."""
        return Room(self._folder, self._left)

    def new(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """All zero. A tensor without elements is never mapped."""
        count = math.prod(shape)
        nbytes = count * dtype.itemsize
        if nbytes <= self._left or not nbytes:
            self._left -= nbytes
            return torch.zeros(*shape, dtype=dtype)
        return _mapped(self._folder, count, dtype).view(*shape)


def _mapped(folder: Path, count: int, dtype: torch.dtype) -> Tensor:
    """In a file whose name is removed at once: the mapping keeps its contents, and nothing is left on disk when the process ends."""
    nbytes = count * dtype.itemsize
    handle, name = tempfile.mkstemp(dir=folder, prefix="mapped-", suffix=".bin")
    try:
        os.posix_fallocate(handle, 0, nbytes)  # allocated now: on a full disk, writing to a page later would kill the process
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
