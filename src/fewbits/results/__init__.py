"""results.json: all that a run decided, measured and saw, in one file, so that a page can be made from it alone and elsewhere.

What a run knows anyway (plan, verdict, coverage) comes from the caller. Added here is what only a reader of the result asks for: the plan
at every size of the frontier, how values are spread and what ranges they got, how errors add up, memory, kernels, hashes and commands.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits import formats, hardware, kernels, kv
from fewbits.errors import FewbitsError
from fewbits.files import Staged, to_json
from fewbits.inspection import tensor_bytes
from fewbits.progress import silent
from fewbits.results import distributions, frontiers, reproduction
from fewbits.results.distributions import Distribution
from fewbits.results.frontiers import Frontier
from fewbits.results.reproduction import Reproduction, commands

if TYPE_CHECKING:
    from fewbits.artifact import Artifact
    from fewbits.model import Model
    from fewbits.outcomes import Known
    from fewbits.planning.deciding import Decision
    from fewbits.progress import Progress
    from fewbits.sensitivity.accumulation import Accumulation

__all__ = ["Gathered", "commands", "gather", "write"]

NAME = "results.json"
PAGE = "report.html"
_CONTEXTS = (2048, 8192, 32768, 131072)
_CACHES = ("float", "int8")
_SHARE = 8  # a look at how errors add up may cost this part of a verification
_LEAST_TOKENS = 128


@dataclass(frozen=True)
class Source:
    """The model before."""

    name: str
    architecture: str
    elements: int  # in matrices
    float_bytes: int  # of the matrices, as they are in the checkpoint
    float_format: str  # of most of them


@dataclass(frozen=True)
class Use:
    """What running it takes, in bytes, at one context length and with one kind of KV cache."""

    context: int
    kv: str
    weights: int
    kv_cache: int
    activations: int
    overhead: int


@dataclass(frozen=True)
class Kernel:
    """Who multiplies a format on this machine in `fewbits run`."""

    format: str
    backend: str
    weights: int
    bytes: int


@dataclass(frozen=True)
class Gathered:
    source: Source
    reproduction: Reproduction
    frontier_plans: Frontier | None = None
    accumulation: Accumulation | None = None
    distributions: tuple[Distribution, ...] = ()
    memory: tuple[Use, ...] = ()
    kernels: tuple[Kernel, ...] = ()
    notes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # what a person should know of weights -> which
    left_out: Mapping[str, str] = field(default_factory=dict)  # what is not here, and why

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def gather(
    model: Model,
    artifact: Artifact,
    path: Path,
    *,
    decision: Decision | None = None,
    statistics: Known | None = None,
    windows: Sequence[Sequence[int]] = (),
    commands: Sequence[str] = (),
    memory: int = 1 << 30,
    progress: Progress[Any] = silent,
) -> Gathered:
    """`path`: the file that was made of the artifact. `windows`: text to measure on how errors add up; none: that is left out."""
    left_out: dict[str, str] = {}
    uses: tuple[Use, ...] = ()
    try:
        uses = _uses(artifact, path)
    except (FewbitsError, AttributeError) as failure:  # a config that the arithmetic does not know is no reason to lose the result
        left_out["memory"] = str(failure.args[0])
    added = None
    if windows:
        try:
            added = _accumulated(model, artifact, windows, memory, progress)
        except FewbitsError as failure:
            left_out["accumulation"] = failure.args[0]
    else:
        left_out["accumulation"] = "nothing was run"
    return Gathered(
        source=_source(model),
        reproduction=reproduction.of(artifact, path, commands),
        frontier_plans=frontiers.of(decision) if decision else None,
        accumulation=added,
        distributions=distributions.of(model, artifact, statistics, progress),
        memory=uses,
        kernels=_kernels(artifact),
        notes=_notes(artifact),
        left_out=left_out,
    )


def write(folder: Path, result: Mapping[str, object]) -> Path:
    """results.json, and the page that is made of it. The page's path."""
    from fewbits.reporting import page

    with Staged(folder / NAME) as staged:
        staged.write_text(to_json(result))
    return page.report(folder / NAME, folder / PAGE)


def _source(model: Model) -> Source:
    by_format: dict[str, int] = {}
    for weight in model.weights:
        by_format[weight.dtype] = by_format.get(weight.dtype, 0) + weight.shape[0] * weight.shape[1]
    nbytes = sum(formats.get(weight.dtype).nbytes(weight.shape) for weight in model.weights)
    most = max(by_format, key=lambda name: by_format[name])
    return Source(model.path.name, str(model.config.model_type), sum(by_format.values()), nbytes, most)


def _uses(artifact: Artifact, path: Path) -> tuple[Use, ...]:
    config = artifact.config
    shape, weights = hardware.shape(config), tensor_bytes(path)
    longest = getattr(getattr(config, "text_config", None) or config, "max_position_embeddings", None) or _CONTEXTS[-1]
    contexts = [context for context in _CONTEXTS if context <= longest] or [longest]
    found = []
    for context in contexts:
        for cache in _CACHES:
            need = hardware.memory(shape, weights, hardware.Use(context=context, kv=kv.get(cache)))
            found.append(Use(context, cache, need.weights, need.kv_cache, need.activations, need.overhead))
    return tuple(found)


def _kernels(artifact: Artifact) -> tuple[Kernel, ...]:
    found: dict[str, Kernel] = {}
    for weight in artifact.weights:
        entry = artifact.plan[weight.name]
        old = found.get(entry.format)
        backend = old.backend if old else kernels.bind(formats.get(entry.format), weight.shape).backend
        found[entry.format] = Kernel(entry.format, backend, (old.weights if old else 0) + 1, (old.bytes if old else 0) + entry.nbytes)
    return tuple(sorted(found.values(), key=lambda row: -row.bytes))


def _notes(artifact: Artifact) -> dict[str, tuple[str, ...]]:
    """Such as an expert that no token of the calibration text was given to."""
    found: dict[str, list[str]] = {}
    for weight, row in artifact.outcomes.items():
        for note in row.get("notes", ()):
            found.setdefault(note, []).append(weight)
    return {note: tuple(weights) for note, weights in found.items()}


def _accumulated(model: Model, artifact: Artifact, windows: Sequence[Sequence[int]], memory: int, progress: Progress[Any]) -> Accumulation:
    from fewbits.blocks import Blocks
    from fewbits.sensitivity.accumulation import accumulate

    return accumulate(model, artifact, _few(windows, len(Blocks(model))), memory, progress)


def _few(windows: Sequence[Sequence[int]], blocks: int) -> list[Sequence[int]]:
    """As much of the text as keeps the look cheap: a stream branches off at every block, so that a token costs half of them."""
    wanted = max(_LEAST_TOKENS, sum(map(len, windows)) // _SHARE // (blocks // 2 + 1))
    length = min(max(map(len, windows)), wanted)
    return [window[:length] for window in windows[: max(1, wanted // length)]]
