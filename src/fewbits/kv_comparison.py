"""What a quantized KV cache costs, by format and context length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from fewbits import kv, kv_cache, preparation
from fewbits import model as models
from fewbits.calibration import Paths
from fewbits.errors import InputError
from fewbits.progress import Progress, silent
from fewbits.texts import Window


@dataclass(frozen=True)
class KvComparison:
    model: str
    rows: tuple[kv_cache.Row, ...]

    def to_dict(self) -> dict[str, object]:
        return {"model": self.model, "rows": [asdict(row) for row in self.rows]}


def compare_kv(
    model: str | Path,
    formats: Sequence[str] | None = None,
    lengths: Sequence[int] = (128, 512),
    data: Paths = (),
    tokens: int = 4096,
    offline: bool = False,
    progress: Progress[Window] = silent,
) -> KvComparison:
    source = models.open(model, offline)
    if why_not := kv.unsupported(source.config):
        raise InputError(f"`{source.path.name}`: {why_not}", "compare another model")
    windows = preparation.held_out_windows(source, data, max(lengths), tokens)
    return KvComparison(source.path.name, tuple(kv_cache.measure(source, list(formats or kv.all()), lengths, windows, progress)))
