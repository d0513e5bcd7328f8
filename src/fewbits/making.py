"""One plan made into a file: text and statistics at hand, channels rescaled, weights quantized and tuned, the file written."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits import artifact as artifacts
from fewbits import outcomes, preparation, provenance
from fewbits.files import Staged

if TYPE_CHECKING:
    from fewbits.artifact import Artifact
    from fewbits.calibration.importance_matrix import ImportanceMatrix
    from fewbits.calibration.storing import Statistics
    from fewbits.executors.crew import Crew
    from fewbits.kept import Kept
    from fewbits.model import Model
    from fewbits.planning import Plan
    from fewbits.preparation import Prepared, Text
    from fewbits.progress import Progress
    from fewbits.targets import Target


@dataclass(frozen=True)
class Made:
    path: Path
    artifact: Artifact
    ready: Prepared


@dataclass(frozen=True)
class Maker:
    """Everything but the plan; what plans share (text, statistics) is made once."""

    source: Model
    target: Target
    text: Text
    work: Path  # where statistics and artifacts lie, for this run and for the next
    kept: Kept  # what was finished so far, there too
    progress: Progress[Any]
    stats: str | Path | None = None
    rewrite: str = "none"
    sequential: bool = False
    tune: int = 0
    memory: int = 1 << 30
    crew: Crew | None = None  # who measures and quantizes; None: this process
    shards: int = 1  # parts of the text that are calibrated apart

    @cached_property
    def statistics(self) -> Statistics | ImportanceMatrix | None:
        folder = self.work / "statistics"
        return preparation.statistics_for(
            self.source, self.stats, self.text.samples, self.memory, folder, self.kept, self.progress, self.shards, self.crew
        )

    def make(self, plan: Plan, path: Path, name: str = "artifact") -> Made:
        """Weights that were quantized before as this plan asks for, for another plan or by a run that was killed, are taken as they are."""
        with Staged(path, self.target.marker) as staged:
            ready = preparation.prepare(
                self.source,
                plan,
                self.text,
                self.statistics,
                rewrite=self.rewrite,
                memory=self.memory,
                work=self.work,
                kept=self.kept,
                progress=self.progress,
            )
            kept = self.kept.of(source=self.source.fingerprint, statistics=preparation.digest(ready.statistics))
            stream = self._stream(ready, kept)
            seen = artifacts.calibration_hash(ready.statistics)
            artifact = artifacts.write(ready.model, ready.plan, self.work / ("untuned" if self.tune else name), stream, seen)
            if self.tune:
                artifact = artifacts.write(ready.model, ready.plan, self.work / name, self._tuned(ready, artifact, kept), seen)
            self.target.write(artifact, staged, self.progress)
            self.target.check(ready.plan, artifact.weights, staged)
            provenance.forget(path)  # what is known of the file that this one replaces
        return Made(path, artifact, ready)

    def _stream(self, ready: Prepared, kept: Kept) -> outcomes.Stream:
        if not self.sequential:
            return outcomes.independent(ready.model, ready.plan, ready.statistics, self.progress, kept, self.crew)
        assert ready.statistics is not None and self.text.samples is not None, "text was drawn for it"
        return outcomes.sequential(ready.model, ready.plan, ready.statistics, self.text.samples.ids, self.memory, self.progress, kept)

    def _tuned(self, ready: Prepared, untuned: Artifact, kept: Kept) -> outcomes.Stream:
        from fewbits import tuning

        assert self.text.samples is not None, "text was drawn for it"
        known, scratch, samples = outcomes.Stored(untuned), untuned.path.parent, self.text.samples.ids
        kept = kept.of(sequential=self.sequential)
        return tuning.tuned_outcomes(ready.model, ready.plan, samples, known, self.memory, self.tune, self.progress, scratch, kept)
