"""What ships with fewbits: a small language model (the demo's default and the tests' model) and texts to calibrate and to verify with.
smollm2.py fetches a larger model for the demo when asked."""

from __future__ import annotations

from pathlib import Path

MODEL = Path(__file__).parent / "model"
_TEXT = Path(__file__).parent / "text"


def verification_text() -> str:
    return (_TEXT / "verification.txt").read_text(encoding="utf-8")


def calibration_text() -> str:
    return (_TEXT / "calibration.txt").read_text(encoding="utf-8")
