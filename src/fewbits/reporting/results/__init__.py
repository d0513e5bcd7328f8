"""Fills results.json (reporting/schema.py) at the end of a run: a model, its artifact and the file made of it come in, `Gathered` goes out.

The plan, the verdict and the coverage of the text are known to the caller, who adds them (quantized.py, demonstration.py).
distributions.py: values of weights and inputs. frontiers.py: the plan at every size. reproduction.py: commands, hashes, versions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits import formats, kernels, targets
from fewbits.errors import FewbitsError
from fewbits.formats.runtime import kv
from fewbits.inspection.sizes import tensor_bytes
from fewbits.planning import footprint
from fewbits.progress import silent
from fewbits.reporting.results import distributions, frontiers, reproduction
from fewbits.reporting.results.reproduction import commands, for_size
from fewbits.reporting.schema import NAME, Gathered, KernelUse, MemoryUse, Source
from fewbits.store.files import Staged, to_json
from fewbits.targets import running

if TYPE_CHECKING:
    from fewbits.artifact import Artifact
    from fewbits.artifact.outcomes import StatisticsSource
    from fewbits.model import Model
    from fewbits.planning.decision import Decision
    from fewbits.progress import Progress
    from fewbits.verification.forecast.block_errors import Accumulation

__all__ = ["Gathered", "Subject", "commands", "for_size", "gather", "write"]

PAGE = "report.html"
_CONTEXTS = (2048, 8192, 32768, 131072)
_CACHES = ("float", "int8")
_SHARE = 8  # measuring how errors add up may cost an eighth of a verification
_LEAST_TOKENS = 128


@dataclass(frozen=True)
class Subject:
    """What is reported on: the file, the artifact that it was written from, and the model before."""

    model: Model
    artifact: Artifact
    path: Path


def gather(
    subject: Subject,
    *,
    decision: Decision | None = None,
    statistics: StatisticsSource | None = None,
    windows: Sequence[Sequence[int]] = (),
    commands: Sequence[str] = (),
    memory: int = 1 << 30,
    remarks: Sequence[str] = (),
    progress: Progress[Any] = silent,
) -> Gathered:
    """`windows`: the text on which to measure how errors add up. Without one that is left out."""
    model, artifact, path = subject.model, subject.artifact, subject.path
    uses: tuple[MemoryUse, ...] = ()
    accumulation, left_out = None, dict[str, str]()
    try:
        uses = _uses(artifact, path)
    except (FewbitsError, AttributeError) as failure:  # a config that the arithmetic does not know is no reason to lose the result
        left_out["memory"] = str(failure.args[0])
    try:
        accumulation = _accumulated(model, artifact, windows, memory, progress) if windows else None
    except FewbitsError as failure:
        left_out["accumulation"] = failure.args[0]
    if not windows:
        left_out["accumulation"] = "nothing was run"
    return Gathered(
        source=_source(model),
        reproduction=reproduction.of(artifact, path, commands),
        frontier_plans=frontiers.of(decision) if decision else None,
        accumulation=accumulation,
        distributions=distributions.of(model, artifact, statistics, progress),
        memory=uses,
        kernels=_kernels(artifact),
        notes=_notes(artifact),
        left_out=left_out,
        remarks=tuple(remarks),
        how_to_run=running.how_to_run(targets.get(artifact.plan.target), path, artifact.config),
    )


def write(folder: Path, result: Mapping[str, object]) -> Path:
    """Writes results.json and the page made of it, whose path is returned."""
    from fewbits.reporting import page

    with Staged(folder / NAME) as staged:
        staged.write_text(to_json(result))
    return page.report(folder / NAME, folder / PAGE)


def _source(model: Model) -> Source:
    if stored := model.lossy:  # a GGUF that is quantized already: its own bytes, not those that its numbers would take as floats
        numbers = sum(weight.shape[0] * weight.shape[1] for weight in model.weights)
        nbytes = round(stored.bits * numbers / 8)
        return Source(model.name, str(model.config.model_type), numbers, nbytes, ", ".join(stored.names))
    elements = Counter[str]()
    for weight in model.weights:
        elements[weight.dtype] += weight.shape[0] * weight.shape[1]
    nbytes = sum(formats.get(weight.dtype).nbytes(weight.shape) for weight in model.weights)
    return Source(model.name, str(model.config.model_type), elements.total(), nbytes, elements.most_common(1)[0][0])


def _uses(artifact: Artifact, path: Path) -> tuple[MemoryUse, ...]:
    config = artifact.config
    shape, weights = footprint.shape(config), tensor_bytes(path)
    longest = getattr(getattr(config, "text_config", None) or config, "max_position_embeddings", None) or _CONTEXTS[-1]
    uses = []
    for context in [context for context in _CONTEXTS if context <= longest] or [longest]:
        for cache in _CACHES:
            need = footprint.memory(shape, weights, footprint.Use(context=context, kv=kv.get(cache)))
            uses.append(MemoryUse(context, cache, need.weights, need.kv_cache, need.activations, need.overhead))
    return tuple(uses)


def _kernels(artifact: Artifact) -> tuple[KernelUse, ...]:
    uses: dict[str, KernelUse] = {}
    for weight in artifact.weights:
        entry = artifact.plan[weight.name]
        if entry.format not in uses:
            uses[entry.format] = KernelUse(entry.format, kernels.bind(formats.get(entry.format), weight.shape).backend, 0, 0)
        use = uses[entry.format]
        uses[entry.format] = replace(use, weights=use.weights + 1, bytes=use.bytes + entry.nbytes)
    return tuple(sorted(uses.values(), key=lambda use: -use.bytes))


def _notes(artifact: Artifact) -> dict[str, tuple[str, ...]]:
    """Such as: no token of the calibration text was routed to this expert."""
    weights: dict[str, list[str]] = {}
    for weight, outcome in artifact.outcomes.items():
        for note in outcome.get("notes", ()):
            weights.setdefault(note, []).append(weight)
    return {note: tuple(names) for note, names in weights.items()}


def _accumulated(model: Model, artifact: Artifact, windows: Sequence[Sequence[int]], memory: int, progress: Progress[Any]) -> Accumulation:
    from fewbits.model.blocks import Blocks
    from fewbits.verification.forecast.accumulation import accumulate

    return accumulate(model, artifact, _few(windows, len(Blocks(model))), memory, progress)


def _few(windows: Sequence[Sequence[int]], blocks: int) -> list[Sequence[int]]:
    """So much of the text that the cost stays below `_SHARE`. A stream branches off at every block: a token runs half of all blocks on
    average in each of them."""
    wanted = max(_LEAST_TOKENS, sum(map(len, windows)) // _SHARE // (blocks // 2 + 1))
    length = min(max(map(len, windows)), wanted)
    return [window[:length] for window in windows[: max(1, wanted // length)]]
