"""Folders for what is needed for a while. One whose process was killed is removed by the next that needs one.

Whoever has one holds a lock on it, which the system lets go of when the process ends, however it ends.
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
_YOUNG = 60.0  # seconds: one that was made a moment ago may not be locked yet


@contextmanager
def scratch_folder() -> Iterator[str]:
    _clean_after_the_dead()
    with tempfile.TemporaryDirectory(prefix=_PREFIX) as folder:
        held = os.open(folder, os.O_RDONLY)
        with suppress(OSError):  # a file system without locks
            fcntl.flock(held, fcntl.LOCK_EX)
        try:
            yield folder
        finally:
            os.close(held)


def _clean_after_the_dead() -> None:
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):  # somebody else's, in use, or gone meanwhile
            about = path.lstat()
            ours = stat.S_ISDIR(about.st_mode) and stat.S_IMODE(about.st_mode) == 0o700 and about.st_uid == os.getuid()
            if not ours or time.time() - about.st_mtime < _YOUNG:
                continue
            found = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                fcntl.flock(found, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(found)
