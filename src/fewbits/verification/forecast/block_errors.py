"""What accumulation.py measures, as plain values: the report page reads them from results.json without torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class BlockError:
    block: int  # -1: what is in no block (embedding, output); of a deep model the last of several that are looked at together
    weights: int
    predicted: float | None  # KL of its weights; None: the plan was not made from measurements
    predicted_so_far: float | None
    measured_so_far: float  # KL of the model with the blocks up to this one quantized
    hidden_error: float  # of what the block gives: squared, relative, mean over tokens


@dataclass(frozen=True)
class Accumulation:
    tokens: int
    rows: tuple[BlockError, ...]

    def to_dict(self) -> dict[str, object]:
        return asdict(self)
