"""What a person sees while work is done: bars on a terminal, lines in a log.

whole.py   how much of all parts is done, and how long the rest will take     terminal.py   bars     log.py   lines
steps.py   the steps of `quantize` as parts, and what an earlier run did of them
"""

from __future__ import annotations

from fewbits.reporting.meanwhile.log import InLog
from fewbits.reporting.meanwhile.terminal import OnTerminal

on_terminal, in_log = OnTerminal(), InLog()
