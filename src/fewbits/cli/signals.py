"""Ctrl-C and SIGTERM stop a command as exceptions, so that partial files are removed, and what is finished stays for the next run.

An exception that happens to rise inside a destructor or a callback of C code is printed there by Python and lost: it is raised again.
"""

from __future__ import annotations

import signal
import sys
from types import FrameType
from typing import Any

_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}
_RESUME = ("quantize", "calibrate", "measure")  # verbs that resume from what an earlier run finished
_AGAIN = 0.05  # seconds until the exception is raised again: the destructor has ended by then


class _Stopped(SystemExit):
    pass


def arm() -> None:
    for number in _CODES:
        signal.signal(number, _stop)
    sys.unraisablehook = _unraisable


def say(code: object) -> None:
    """Tells that the command was stopped, if this exit code says so, and whether the same command would resume."""
    if code not in _CODES.values():
        return
    from fewbits.reporting.terminal import note

    resumes = len(sys.argv) > 1 and sys.argv[1] in _RESUME
    note("stopped: the same command goes on from what is finished" if resumes else "stopped")


def _stop(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - the signature of a signal handler
    raise _Stopped(_CODES[signal.Signals(number)])


def _unraisable(lost: Any) -> None:
    if not issubclass(lost.exc_type, _Stopped | KeyboardInterrupt):
        sys.__unraisablehook__(lost)
        return
    code = getattr(lost.exc_value, "code", _CODES[signal.SIGINT])

    def again(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        raise _Stopped(code)

    signal.signal(signal.SIGALRM, again)
    signal.setitimer(signal.ITIMER_REAL, _AGAIN)
