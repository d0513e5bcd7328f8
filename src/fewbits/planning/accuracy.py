"""Thresholds that a file is judged by."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fewbits.errors import InputError


@dataclass(frozen=True)
class Thresholds:
    max_kl: float | None = None
    min_agreement: float | None = None
    max_ppl_ratio: float | None = None
    min_cosine: float | None = None  # of encoders, see verification/embeddings.py

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and not (0 <= value < math.inf and (not name.startswith("min_") or value <= 1)):
                option = f"--{name.replace('_', '-')}"
                raise InputError(f"`{option} {value}` is no threshold", "agreement and cosine go up to 1, KL and ratio are at least 0")
