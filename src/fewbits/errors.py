"""Errors that a person can act on. The command line turns each into a message, a hint and an exit code; no traceback."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

# Options of the command line that take no value: True, for who calls a function.
FLAGS = frozenset(
    {
        "accept_unmatched", "dry_run", "fresh", "no_floor", "no_gradients", "no_hessians", "no_values", "no_verify", "offline", "private",
        "raw", "requantize", "sequential",
    }
)  # fmt: skip
_OPTIONS = re.compile(r"`((?:-o|--[a-z])[^`]*)`")  # alone between backticks; a whole command is left as it is


def as_arguments(text: str) -> str:
    """Messages name options as the command line does: `--size 4bpw`. Who calls a function reads `size="4bpw"`."""
    return _OPTIONS.sub(lambda found: f"`{', '.join(map(_argument, re.split(r' (?=--)', found[1])))}`", text)


@contextmanager
def naming_arguments() -> Iterator[None]:
    """Errors from here on are for who called a function, not for who typed a command."""
    try:
        yield
    except FewbitsError as failure:
        failure.args, failure.hint = (as_arguments(failure.args[0]),), as_arguments(failure.hint)
        raise


def _argument(option: str) -> str:
    name, has_value, value = option.lstrip("-").partition(" ")
    name = "out" if name == "o" else name.replace("-", "_")
    if not has_value:
        return f"{name}={'True' if name in FLAGS else ''}"
    is_number = re.fullmatch(r"-?\d+(\.\d+)?", value)
    return f"{name}={value}" if is_number else f'{name}="{value.strip(chr(39))}"'


class FewbitsError(Exception):
    exit_code = 2

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint

    def __str__(self) -> str:
        message = super().__str__()
        return f"{message}\n\nhint: {self.hint}" if self.hint else message


class InputError(FewbitsError):
    """The user's input is wrong."""


class MissingError(FewbitsError):
    """A runtime, a device, memory or disk space that the work needs is not here."""

    exit_code = 3


class UnknownKindError(InputError):
    """The input is well-formed, but of a kind that no table here has: an architecture, a tokenizer. There may be another way."""
