"""A file run in the runtime that it is meant for, beside the float model in torch, and judged by the difference."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits import artifact as artifacts
from fewbits import model as models
from fewbits import planning, targets
from fewbits.artifact import manifest
from fewbits.artifact import written as provenance
from fewbits.artifact.draft import Draft
from fewbits.calibration import MEMORY, Paths, by_domain, listed, split
from fewbits.calibration.text.domains import in_tokens, mixed
from fewbits.calibration.text.windows import Window
from fewbits.devices.units import bytes_of
from fewbits.errors import InputError
from fewbits.inspection.sizes import bits_per_weight, size_of
from fewbits.model import placement
from fewbits.model.gguf import laid_out
from fewbits.model.gguf.model import GgufModel
from fewbits.planning.accuracy import Thresholds
from fewbits.progress import say, silent
from fewbits.store.scratch import scratch_folder
from fewbits.targets.export import written
from fewbits.targets.gguf.source import open_source
from fewbits.verification import embeddings, metrics, runtimes, sandbox
from fewbits.verification.metrics import Verdict
from fewbits.verification.runtimes import llamacpp

if TYPE_CHECKING:
    from fewbits.model import Model
    from fewbits.progress import Progress
    from fewbits.store.cache import Cache
    from fewbits.targets import Target
    from fewbits.verification.embeddings import EmbeddingVerdict
    from fewbits.verification.runtimes import Runtime
    from fewbits.verification.session import Session

TOKENS = 16384  # that are predicted by default: the interval of the mean KL is then about 3 % wide


def verify(
    path: str | Path,
    against: str | Path | Model,
    *,
    data: Paths = (),
    weights: str | Mapping[str, float] | None = None,
    runtime: str = "auto",
    max_kl: float | None = None,
    min_agreement: float | None = None,
    max_ppl_ratio: float | None = None,
    min_cosine: float | None = None,
    length: int | str | Mapping[str, int] | None = None,
    tokens: int = TOKENS,
    no_floor: bool = False,
    like: str | Path | None = None,
    memory: str | int = MEMORY,
    device: str = placement.AUTO,
    offline: bool = False,
    progress: Progress[Any] = silent,
) -> Verdict | EmbeddingVerdict:
    """Runs the file itself in the runtime it is meant for, beside the float model in torch, and judges the difference.

    `data`: held-out text, by default the embedded one; each path is a kind of text, named by its stem or as `NAME=PATH`. `weights`: the
    tokens of each kind in proportion, `prose=1,code=2`; without them all alike. `length`: tokens in a window, of one kind too:
    `books=4096`. `no_floor`: do not run the float file there too, which measures the runtime's own error.
    `like`: that float file, of a model that fewbits itself cannot write. `device`: where the float model runs, `cpu`, `cuda`, `auto`.
    """
    path, thresholds = Path(path), Thresholds(max_kl, min_agreement, max_ppl_ratio, min_cosine)
    placement.find(device)
    mix, usual = mixed(weights, length)
    room = bytes_of(memory, "--memory")
    mix.check(by_domain.names_of(listed(data)))
    if not path.exists():
        raise InputError(f"there is nothing at `{path}`", "give a .gguf, an .onnx, or a folder that fewbits wrote")
    chosen = runtimes.needed(runtimes.for_file(path) if runtime == "auto" else runtimes.get(runtime))
    if not chosen.takes(path):
        hint = f"leave `--runtime` out: {runtimes.for_file(path).name} does"
        raise InputError(f"{chosen.name} does not run files like `{path.name}`", hint)
    if not isinstance(against, models.Model) and (Path(against) / manifest.NAME).is_file():
        hint = "`fewbits verify OUT --against MODEL`: the other way round?"
        raise InputError(f"`{against}` is an artifact of fewbits, not the float model", hint)
    source = against if isinstance(against, models.Model) else open_source(against, offline)
    if like is not None:
        source = laid_out.like(_checkpoint(source), Path(like), progress=progress)
    embeddings.check_thresholds(thresholds, source.config)
    if source.lossy:
        say(progress, compared_with(source))
    provenance.check(path, progress)
    sandbox.check(chosen, path)
    if isinstance(source, GgufModel):
        llamacpp.lend_tokenizer(source)
    text = split.held_out_text(source, data, in_tokens(usual), tokens, mix)
    with placement.passes_on(device, progress):
        return verdict_on(path, source, text.windows, Trial(chosen, thresholds, not no_floor, text.domains), progress, memory=room)


@dataclass(frozen=True)
class Trial:
    """How a file is judged."""

    runtime: Runtime
    thresholds: Thresholds
    floor: bool = True  # the float file is run too: its error is the runtime's own
    domains: Sequence[str] = ()  # of each window, the kind of its text; none: all of one kind


def verdict_on(
    path: Path,
    source: Model,
    windows: list[Window],
    trial: Trial,
    progress: Progress[Any],
    cache: Cache | None = None,
    memory: int = MEMORY,
) -> Verdict | EmbeddingVerdict:
    """Runs the file on these windows. With a `cache`, windows that an earlier run judged are not run again."""
    from fewbits.verification.resume import CachedWindows

    runtime, target = trial.runtime, _target_of(trial.runtime) if trial.floor else None
    about: dict[str, Any] = {"nbytes": size_of(path), "bits_per_weight": bits_per_weight(path, source)}
    about |= {"runtime": runtime.name, "runtime_version": runtime.version() + runtime.remark(path)}
    reference = f"{source.name}, itself quantized ({source.lossy})" if source.lossy else None
    if embeddings.given_by(source.config):
        ended = embeddings.texts_of(windows, source.tokenizer)
        with sessions_of(path, source, windows, runtime, target, progress, None) as (base, sessions):
            vectors = embeddings.compare_embeddings(base, sessions, ended, progress)
        return replace(embeddings.judge(vectors["file"], trial.thresholds, **about, floor=vectors.get("floor")), reference=reference)
    judged = CachedWindows(cache, source.fingerprint, path, runtime, target is not None) if cache else None
    if judged and (count := judged.count(windows)):
        say(progress, f"resuming: {count} of {len(windows)} windows were judged")
    measured = judged.all(windows) if judged else None
    if measured is None:
        with sessions_of(path, source, windows, runtime, target, progress, cache) as (base, sessions):
            measured = metrics.compare_logits(base, sessions, windows, progress, judged, memory)
    kl_floor = float(sum(measured["floor"].kl) / len(measured["floor"].kl)) if "floor" in measured else None
    domains = metrics.figures_by_domain(measured, windows, trial.domains)
    return replace(metrics.judge(measured["file"], trial.thresholds, **about, kl_floor=kl_floor, domains=domains), reference=reference)


def compared_with(source: Model) -> str:
    """Said of a source that is quantized already, before anything is run."""
    return f"`{source.name}` is itself quantized ({source.lossy}): figures compare with it, not with the float model it was made of"


@contextmanager
def sessions_of(
    path: Path,
    source: Model,
    windows: list[Window],
    runtime: Runtime,
    target: Target | None,
    progress: Progress[Any],
    cache: Cache | None,
) -> Iterator[tuple[Session, dict[str, Session]]]:
    """The float model in torch; the file in its runtime; and, where a target is given, the float model written for it, in that runtime."""
    from fewbits.verification.runtimes import torch as torch_runtime

    length = max(map(len, windows))
    with cache.scratch() if cache else scratch_folder() as scratch, ExitStack() as stack:
        sessions: dict[str, Session] = {"file": stack.enter_context(closing(runtime.open(path, length)))}
        if isinstance(source, GgufModel) and source.origin is None:  # the file that it was made of, in the same runtime
            yield stack.enter_context(closing(runtime.open(source.file.path, length))), sessions
            return
        if target and (file := _float_file(source, target, Path(scratch), progress)):
            sessions["floor"] = stack.enter_context(closing(runtime.open(file, length)))
        yield torch_runtime.of_model(_checkpoint(source), cache), sessions


def _float_file(source: Model, target: Target, folder: Path, progress: Progress[Any]) -> Path | None:
    """None: fewbits cannot write one."""
    if isinstance(source, GgufModel):
        return source.file.path
    try:
        return float_file(source, target, folder, progress)
    except InputError as failure:
        say(progress, f"the runtime's own error is not measured: {failure.args[0]}; `--like FLOAT.gguf` names a float file")
        return None


def _checkpoint(source: Model) -> Model:
    if not isinstance(source, GgufModel):
        return source
    if source.origin is None:
        raise InputError(f"`{source.name}` is of an architecture that is not known here", "give the folder of its checkpoint")
    return source.origin


def float_file(source: Model, target: Target, folder: Path, progress: Progress[Any]) -> Path:
    """The unquantized model in the same container, on which the runtime's own error is measured."""
    plan = planning.unquantized(source.weights, target)
    if target.takes_drafts:
        path = folder / target.file_name
        target.write_draft(Draft(source, plan), path, progress)
        return path
    floor = artifacts.quantize(source, plan, folder / "float", progress)
    return written(floor, folder / target.file_name, to=target.name, progress=progress)


def _target_of(runtime: Runtime) -> Target | None:
    return next((target for target in targets.all().values() if target.runtime == runtime.name), None)
