"""What a person sees while work is done: bars on a terminal, lines in a log, or the bars of whoever calls.

whole.py   how much of all parts is done, and how long the rest will take     terminal.py   bars     log.py   lines
steps.py   the steps of `quantize` as parts, and what an earlier run did of them
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

from fewbits.errors import InputError
from fewbits.progress import Progress, by_bars, silent
from fewbits.reporting.meanwhile.log import InLog
from fewbits.reporting.meanwhile.terminal import OnTerminal

on_terminal, in_log = OnTerminal(), InLog()


def shown() -> Progress[Any]:
    """As the command line does."""
    return on_terminal if sys.stderr.isatty() else in_log


def shown_by(given: Any) -> Progress[Any]:
    """What a caller gives as `progress`: tqdm, True (as the command line shows it), False, or a function of (items, total, text)."""
    if given is None or given is False:
        return silent
    if given is True:
        return shown()
    if not callable(given):
        raise InputError(f"`progress={given!r}` shows nothing", "give tqdm, True, False, or a function of (items, total, text)")
    class_of_bars = isinstance(getattr(given, "func", given), type)  # also as a functools.partial; tqdm's own classes hide their arguments
    return by_bars(given) if class_of_bars or {"total", "desc"} <= set(inspect.signature(given).parameters) else given
