"""How the file that was just written is run: the next command, on a line of its own, so that it can be copied."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.markup import escape

from fewbits.reporting.terminal import console

if TYPE_CHECKING:
    from fewbits.targets.running import HowToRun


def show(how: HowToRun) -> None:
    room = f", with a context of {how.context:,} tokens, for which this machine has room" if how.context else ""
    if how.commands:
        console.print(f"to run it{room}:", soft_wrap=True)
    for command in how.commands:
        console.print(f"  [dim]{escape(command.what)}:[/]", soft_wrap=True)
        console.print("\n".join(f"    {line}" for line in escape(command.text).splitlines()), soft_wrap=True)
