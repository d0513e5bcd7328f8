"""Errors that a person can act on. The command line turns each into a message, a hint and an exit code; no traceback."""

from __future__ import annotations


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
