"""`fewbits measure`: a model and its statistics in, the table of sensitivities out, corrected by a few direct measurements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits import calibration, methods, sensitivity, targets
from fewbits import model as models
from fewbits.calibration import Paths, reuse, split
from fewbits.calibration.folder import Statistics
from fewbits.devices.units import bytes_of
from fewbits.errors import InputError
from fewbits.formats import names_of
from fewbits.formats.runtime import kv as kv_formats
from fewbits.progress import silent
from fewbits.store import executors
from fewbits.store.cache import open_cache
from fewbits.targets import pricing
from fewbits.targets.gguf.source import Like, layout_for
from fewbits.verification import kv as kv_costs
from fewbits.verification.forecast.probes import compare_scores, factors, log_correlation, probe, spread_out
from fewbits.verification.forecast.side_by_side import expect_logits

if TYPE_CHECKING:
    from fewbits.progress import Progress
    from fewbits.sensitivity import Sensitivity
    from fewbits.verification.forecast.probes import Probe

TOKENS = 4096  # run for each probe: the float model runs the same tokens, so that their noise cancels


@dataclass(frozen=True)
class Measured:
    table: Sensitivity
    path: Path
    target: str
    probes: tuple[Probe, ...] = ()

    def __str__(self) -> str:
        known = sorted({name for row in self.table.rows.values() for name in row})
        weights = f"{len(self.table.rows)} weights of {self.table.model} by {self.table.method}, {len(self.probes)} probed"
        return f"{self.path}: formats of {self.target}\n{weights}\n{len(known)} formats: {', '.join(known)}"

    def to_dict(self) -> dict[str, object]:
        enough = len(self.probes) > 2
        return {
            "file": str(self.path),
            **self.table.to_dict(),
            "probes": [asdict(each) for each in self.probes],
            "probe_log_correlation": log_correlation(self.probes) if enough else None,
            "scores": [asdict(score) for score in compare_scores(self.table, self.probes, self.target)] if enough else [],
        }


def measure(
    model: str | Path,
    out: str | Path,
    *,
    stats: str | Path,
    to: str = "gguf",
    formats: str | Sequence[str] = (),
    method: str = "auto",
    probes: int = 0,
    kv: str | Sequence[str] = (),
    held_out: Paths = (),
    tokens: int = TOKENS,
    memory: str | int = calibration.MEMORY,
    executor: str = executors.LOCAL,
    store: str | None = None,
    like: str | Path | None = None,
    converter: str | None = None,
    offline: bool = False,
    progress: Progress[Any] = silent,
) -> Measured:
    """Predicted KL of every weight in every format that the target supports. A run that was interrupted resumes from its cache.

    probes: number of weights that are also measured directly, each in three formats, on `held_out` text; the mean ratio of measured to
    predicted corrects all weights of their kind. kv: formats of the KV cache, measured directly on the same text. executor, store: the
    workers that measure the weights, as in `quantize`. like, converter: how llama.cpp lays an architecture beyond the table out.
    """
    path, target, workers = Path(out), targets.get(to), executors.parse(executor, store)
    methods.get(method)
    kv = names_of(kv)
    for name in kv:
        kv_formats.get(name)
    source = models.open(model, offline)
    if probes or kv:
        expect_logits(source)
    work = path.with_name(f"{path.name}.work")  # only until it is done
    subject = layout_for(source, target, Like(like, converter), work, progress)
    if subject.layout and (probes or not workers.in_process):
        raise InputError("`--probes` and `--executor` do not go with a layout that is not fewbits' own", "leave them out")
    statistics = reuse.matched(Statistics(Path(stats)).expect(source.weights), subject)
    candidates = pricing.candidates_for(subject, target, names_of(formats))
    windows = split.held_out_windows(source, held_out, None, tokens) if probes or kv else []
    measured: list[Probe] = []
    with open_cache(work, progress=progress) as cache, executors.open_crew(workers, source, model, offline) as crew:
        table = sensitivity.measure(subject, statistics, candidates, method, cache=cache, crew=crew, progress=progress)
        if kv:
            rows = kv_costs.cache_costs(source, list(kv), [min(map(len, windows))], windows, progress)
            table = replace(table, kv={row.format: row.kl for row in rows})
        if probes:
            measured = probe(source, statistics, table, spread_out(table, probes), windows, bytes_of(memory, "--memory"), progress)
            table = replace(table, factors=factors(measured))
        table = pricing.with_container(table, subject, target)
        table.save(path)
        cache.drop_all()
    return Measured(table, path, target.name, tuple(measured))
