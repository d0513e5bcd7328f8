"""A plan in, a file out: channels rescaled, weights quantized and tuned, the artifact filled, the target's file written."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from fewbits import artifact as artifacts
from fewbits.artifact import outcomes, written
from fewbits.artifact.preparation import Prepared, Preparer
from fewbits.planning.target import Target
from fewbits.rewrites.statistics import digest
from fewbits.store.files import Staged

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fewbits.artifact import Artifact
    from fewbits.model.weights import Weight
    from fewbits.planning import Plan
    from fewbits.progress import Progress
    from fewbits.store.cache import Cache
    from fewbits.store.executors.crew import Crew


class Writer(Target, Protocol):
    """What writes an artifact to a file: `targets.Target`, which this room may not import."""

    marker: str | None

    @property
    def suffix(self) -> str: ...

    def write(self, artifact: Artifact, path: Path, progress: Progress[Any]) -> None: ...

    def check(self, plan: Plan, weights: Iterable[Weight], path: Path) -> None: ...


@dataclass(frozen=True)
class OutputFile:
    path: Path
    artifact: Artifact
    prepared: Prepared


@dataclass(frozen=True, kw_only=True)
class Maker(Preparer):
    """Makes the plans of one run into files."""

    target: Writer
    sequential: bool = False
    tune: int = 0
    crew: Crew | None = None  # workers that quantize; None: this process does

    def make(self, plan: Plan, path: Path, name: str = "artifact") -> OutputFile:
        """Weights that are in the cache in the format of this plan (from another plan, or from a run that was killed) are reused."""
        with Staged(path, self.target.marker) as staged:
            prepared = self.prepare(plan)
            cache = self.cache.of(source=self.source.fingerprint, statistics=digest(prepared.statistics))
            calibration = artifacts.calibration_hash(prepared.statistics)
            stream = self._stream(prepared, cache)
            artifact = artifacts.write(prepared.model, prepared.plan, self.work / ("untuned" if self.tune else name), stream, calibration)
            if self.tune:
                artifact = artifacts.write(
                    prepared.model, prepared.plan, self.work / name, self._tuned(prepared, artifact, cache), calibration
                )
            self.target.write(artifact, staged, self.progress)
            self.target.check(prepared.plan, artifact.weights, staged)
            written.forget(path)  # the hashes of the file that this one replaces
        return OutputFile(path, artifact, prepared)

    def _stream(self, prepared: Prepared, cache: Cache) -> outcomes.Stream:
        if not self.sequential:
            return outcomes.independent(prepared.model, prepared.plan, prepared.statistics, self.progress, cache, self.crew)
        assert prepared.statistics is not None and self.text.samples is not None, "text was drawn for it"
        return outcomes.sequential(
            prepared.model, prepared.plan, prepared.statistics, self.text.samples.ids, self.memory, self.progress, cache
        )

    def _tuned(self, prepared: Prepared, untuned: Artifact, cache: Cache) -> outcomes.Stream:
        from fewbits.artifact.tuned import tuned_outcomes

        assert self.text.samples is not None, "text was drawn for it"
        known, samples, cache = outcomes.ArtifactOutcomes(untuned), self.text.samples.ids, cache.of(sequential=self.sequential)
        return tuned_outcomes(prepared.model, prepared.plan, samples, known, self.tune, self.memory, self.progress, cache)
