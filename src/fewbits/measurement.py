"""`fewbits measure`: a model and its statistics in, the table of sensitivities out, corrected by a few direct measurements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits import budgeted, calibration, executors, preparation, sensitivity, targets
from fewbits import kept as results
from fewbits import model as models
from fewbits.calibration import Paths
from fewbits.calibration.storing import Statistics
from fewbits.progress import silent

if TYPE_CHECKING:
    from fewbits.progress import Progress
    from fewbits.sensitivity import Sensitivity
    from fewbits.sensitivity.probing import Probe

TOKENS = 4096  # run for each probe: the same tokens for the float model, so that their noise cancels


@dataclass(frozen=True)
class Measured:
    table: Sensitivity
    path: Path
    target: str
    probes: tuple[Probe, ...] = ()

    def to_dict(self) -> dict[str, object]:
        from fewbits.sensitivity import probing

        enough = len(self.probes) > 2
        return {
            "file": str(self.path),
            **self.table.to_dict(),
            "probes": [asdict(probe) for probe in self.probes],
            "probe_log_correlation": probing.log_correlation(self.probes) if enough else None,
            "scores": [asdict(score) for score in probing.compare_scores(self.table, self.probes, self.target)] if enough else [],
        }


def measure(
    model: str | Path,
    out: str | Path,
    *,
    stats: str | Path,
    to: str = "gguf",
    formats: Sequence[str] = (),
    method: str = "auto",
    probes: int = 0,
    kv: Sequence[str] = (),
    held_out: Paths = (),
    tokens: int = TOKENS,
    memory: int = calibration.MEMORY,
    executor: str = executors.LOCAL,
    store: str | None = None,
    offline: bool = False,
    progress: Progress[Any] = silent,
) -> Measured:
    """Predicted KL of every weight in every format that the target carries. Interrupted, it goes on where it was.

    probes: so many weights are also measured directly, each in three formats, on `held_out` text; what the prediction misses on average
    corrects the other weights of their kind. kv: formats of the KV cache, measured directly on the same text. executor, store: who
    measures the weights, as `quantize` takes them.
    """
    from fewbits import kv as caches
    from fewbits import kv_cache, methods
    from fewbits.sensitivity import probing

    path, target, workers = Path(out), targets.get(to), executors.parse(executor, store)
    methods.get(method)
    for name in kv:
        caches.get(name)
    source = models.open(model, offline)
    statistics = Statistics(Path(stats)).expect(source.weights)
    candidates = budgeted.candidates_for(source, target, tuple(formats))
    windows = preparation.held_out_windows(source, held_out, None, tokens) if probes or kv else []
    work = path.with_name(f"{path.name}.work")  # only until it is done
    with results.opened(work, progress=progress) as kept, executors.opened(workers, source, model, offline) as crew:
        table = sensitivity.measure(source, statistics, candidates, method, kept=kept, crew=crew, progress=progress)
        found: list[Probe] = []
        if kv:
            rows = kv_cache.measure(source, list(kv), [min(map(len, windows))], windows, progress)
            table = replace(table, kv={row.format: row.kl for row in rows})
        if probes:
            found = probing.probe(source, statistics, table, probing.spread_out(table, probes), windows, memory, progress)
            table = replace(table, factors=probing.factors(found))
        table = budgeted.with_container(table, source, target)
        table.save(path)
        kept.drop_all()
    return Measured(table, path, target.name, tuple(found))
