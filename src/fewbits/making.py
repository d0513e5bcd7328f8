"""One plan made into a file: text and statistics at hand, channels rescaled, weights quantized and tuned, the file written."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits import artifact as artifacts
from fewbits import outcomes, preparation
from fewbits.files import Staged

if TYPE_CHECKING:
    from fewbits.artifact import Artifact
    from fewbits.calibration.importance_matrix import ImportanceMatrix
    from fewbits.calibration.storing import Statistics
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
    work: Path  # where statistics and artifacts are kept, for this run and for the next
    progress: Progress[Any]
    stats: str | Path | None = None
    rewrite: str = "none"
    sequential: bool = False
    tune: int = 0
    memory: int = 1 << 30

    @cached_property
    def statistics(self) -> Statistics | ImportanceMatrix | None:
        return preparation.statistics_for(self.source, self.stats, self.text.samples, self.memory, self.work / "statistics", self.progress)

    def make(self, plan: Plan, path: Path, name: str = "artifact", earlier: Artifact | None = None) -> Made:
        """`earlier`: weights that it holds in the very format that the plan asks for are taken from there."""
        with Staged(path, self.target.marker) as staged:
            ready = preparation.prepare(
                self.source,
                plan,
                self.text,
                self.statistics,
                rewrite=self.rewrite,
                memory=self.memory,
                work=self.work,
                progress=self.progress,
            )
            stream = self._stream(ready, None if self.tune else earlier)  # tuned scales are not what a method gives
            seen = artifacts.calibration_hash(ready.statistics)
            artifact = artifacts.write(ready.model, ready.plan, self.work / ("untuned" if self.tune else name), stream, seen)
            if self.tune:
                artifact = artifacts.write(ready.model, ready.plan, self.work / name, self._tuned(ready, artifact), seen)
            self.target.write(artifact, staged, self.progress)
            self.target.check(ready.plan, artifact.weights, staged)
        return Made(path, artifact, ready)

    def _stream(self, ready: Prepared, earlier: Artifact | None) -> outcomes.Stream:
        if not self.sequential:
            return outcomes.independent(ready.model, ready.plan, ready.statistics, self.progress, earlier)
        assert ready.statistics is not None and self.text.samples is not None, "text was drawn for it"
        return outcomes.sequential(ready.model, ready.plan, ready.statistics, self.text.samples.ids, self.memory, self.progress)

    def _tuned(self, ready: Prepared, untuned: Artifact) -> outcomes.Stream:
        from fewbits import tuning

        assert self.text.samples is not None, "text was drawn for it"
        known, scratch = outcomes.Stored(untuned), untuned.path.parent
        return tuning.tuned_outcomes(ready.model, ready.plan, self.text.samples.ids, known, self.memory, self.tune, self.progress, scratch)
