"""What the installed onnxruntime is too old for: the first release that ran such a file, alone and in onnxruntime-genai 0.11.

bits         2      4      8
linear     1.24   1.21   1.22
embedding  1.27   1.23   1.23
"""

from __future__ import annotations

import re
from functools import cache
from importlib.metadata import PackageNotFoundError, version

_LINEAR = {2: "1.24", 4: "1.21", 8: "1.22"}
_EMBEDDING = {2: "1.27", 4: "1.23", 8: "1.23"}


def lacking(bits: int, looked_up: bool) -> str | None:
    """Why the onnxruntime that is installed cannot run a weight of so many bits; None if it can, or if there is none to ask."""
    present, first = installed("onnxruntime"), (_EMBEDDING if looked_up else _LINEAR)[bits]
    if present is None or not older(present, first):
        return None
    return f"onnxruntime {present} is installed, and {bits}-bit {'embeddings' if looked_up else 'weights'} run from {first} on"


@cache
def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def older(present: str, needed: str) -> bool:
    """By the numbers at the front: `1.9.0rc1` is older than 1.10."""
    return _numbers(present) < _numbers(needed)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)[:2]]
