"""Temporary folders. One whose process was killed is removed by the next process that makes one.

A process holds a lock on its folder, which the system releases when the process ends, however it ends.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PREFIX = "fewbits-scratch-"
_YOUNG = 60.0  # seconds: a folder that was just made may not be locked yet


@contextmanager
def scratch_folder() -> Iterator[str]:
    _remove_abandoned()
    with tempfile.TemporaryDirectory(prefix=_PREFIX) as folder:
        held = os.open(folder, os.O_RDONLY)
        with suppress(OSError):  # the file system has no locks
            fcntl.flock(held, fcntl.LOCK_EX)
        try:
            yield folder
        finally:
            os.close(held)


def _remove_abandoned() -> None:
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):  # another user's, in use, or removed meanwhile
            about = path.lstat()
            ours = stat.S_ISDIR(about.st_mode) and stat.S_IMODE(about.st_mode) == 0o700 and about.st_uid == os.getuid()
            if not ours or time.time() - about.st_mtime < _YOUNG:
                continue
            handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(handle)
