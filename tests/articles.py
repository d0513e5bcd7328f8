"""Documents made of the embedded text, and files to put them into."""

from __future__ import annotations

from pathlib import Path

from fewbits import embedded
from fewbits.calibration.text.documents import Document


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def articles(number: int, source: str, start: int = 0) -> list[Document]:
    """Documents of 1 to 40 lines of the embedded text."""
    body = embedded.calibration_text().splitlines(keepends=True)
    found = []
    for i in range(number):
        size = 1 + (7 * i) % 40
        found.append(Document(source, "".join(body[start : start + size])))
        start = (start + size) % (len(body) - 50)
    return found
