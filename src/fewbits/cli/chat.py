"""`fewbits run` without a prompt: a chat, a line at a time."""

from __future__ import annotations

import contextlib
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from fewbits.errors import FewbitsError

if TYPE_CHECKING:
    from fewbits.inference.conversation import Conversation
    from fewbits.inference.text_model import Limits
    from fewbits.progress import Progress


class _Interrupts:
    """Ctrl-C stops the answer; a second one before the next line ends the chat."""

    def __init__(self) -> None:
        self.count, self._answering = 0, False

    def __enter__(self) -> _Interrupts:
        self._before = signal.signal(signal.SIGINT, self._pressed)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    @contextlib.contextmanager
    def answering(self) -> Any:
        self.count, self._answering = 0, True
        try:
            yield
        finally:
            self._answering = False

    def stopped(self) -> bool:
        return self.count > 0

    def _pressed(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self.count > 1 or not self._answering:
            raise KeyboardInterrupt


def chat(
    out: Path, limits: Limits, *, system: str | None, raw: bool, context: int | None, kv: str | None, stats: bool, progress: Progress[Any]
) -> None:
    from fewbits.inference.conversation import Conversation
    from fewbits.inference.engine import open_for_texts
    from fewbits.reporting.terminal import generation

    model = open_for_texts(out, context=context, kv=kv, progress=progress)
    conversation = Conversation(model, limits, system, raw)
    generation.chat_begins(conversation.plain, model.context, sys.stdin.isatty())
    with _Interrupts() as interrupts:
        while (said := _line(interrupts)) is not None:
            if said == "/clear":
                conversation.clear()
            elif said:
                _answered(conversation, said, interrupts)
                if stats and conversation.last:
                    generation.stats(conversation.last.generated().stats)


def _answered(conversation: Conversation, said: str, interrupts: _Interrupts) -> None:
    from fewbits.reporting.terminal import error, generation, note

    left_out = conversation.left_out
    try:
        with interrupts.answering():
            for text in conversation.answer(said, interrupts.stopped):
                generation.stream(text)
    except KeyboardInterrupt:
        pass  # the second one in a row: the next line is the end
    except FewbitsError as failure:  # this message cannot be answered, such as one that is too long; another may
        error(failure.args[0], failure.hint)
        return
    generation.stream("\n")
    if conversation.left_out > left_out:
        note(f"the oldest {conversation.left_out} turns are left out from now on: the context has no room for them")


def _line(interrupts: _Interrupts) -> str | None:
    """The next message; None at the end."""
    from fewbits.reporting.terminal import note

    while interrupts.count < 2:
        try:
            said = _read()
        except EOFError:
            return None
        except KeyboardInterrupt:
            if interrupts.count < 2:
                sys.stderr.write("\n")
                note("Ctrl-C again, Ctrl-D or /exit ends the chat")
            continue
        return None if said.strip() == "/exit" else said.strip()
    return None


def _read() -> str:
    if not sys.stdin.isatty():
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - arrow keys and earlier lines in `input`
    if sys.stdout.isatty():
        return input("> ")
    sys.stderr.write("> ")  # the answers alone go where stdout was sent
    sys.stderr.flush()
    return input()
