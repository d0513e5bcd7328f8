"""A disk as small as a test wants it, and really full when it is: a file system in memory that only this process and its children see.

It is mounted in namespaces of the process's own, for which Linux asks no privileges, but containers and some systems forbid it.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

PAGE = os.sysconf("SC_PAGESIZE")  # what a file takes is rounded up to it
_NEW_USER, _NEW_MOUNTS, _REMOUNT = 0x10000000, 0x00020000, 32  # sched.h, mount.h
_ROOM, _FILES = 64 << 20, 1 << 16


class SmallDisk:
    """At a folder that is there already, from now to the end of this process, which must have one thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        user, group = os.getuid(), os.getgid()
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._checked(self._libc.unshare(_NEW_USER | _NEW_MOUNTS))
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
            Path(f"/proc/self/{name}").write_text(text)
        self._mount(_ROOM, _FILES, 0)

    def fill(self, pages: int, files: int) -> None:
        """No more than this is left."""
        said = os.statvfs(self._folder)
        self._mount((said.f_blocks - said.f_bfree) * said.f_frsize + pages * PAGE, said.f_files - said.f_ffree + files, _REMOUNT)

    def free(self) -> None:
        self._mount(_ROOM, _FILES, _REMOUNT)

    def _mount(self, nbytes: int, files: int, how: int) -> None:
        options = f"size={max(PAGE, nbytes)},nr_inodes={files}".encode()  # a size of 0 is none
        self._checked(self._libc.mount(b"tmpfs", os.fsencode(self._folder), b"tmpfs", how, options))

    def _checked(self, status: int) -> None:
        if status:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def possible(folder: Path) -> bool:
    """Tried in a child, which then has it and ends."""
    child = os.fork()
    if child == 0:
        try:
            SmallDisk(folder)
        except OSError:
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0
