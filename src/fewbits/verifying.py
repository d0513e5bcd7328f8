"""A file run in the runtime that it is meant for, beside the float model in torch, and judged by the difference."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits import artifact as artifacts
from fewbits import embeddings, manifest, planning, preparation, provenance, runtimes, targets, texts, trial, verification
from fewbits import model as models
from fewbits.calibration import MEMORY, Paths
from fewbits.drafting import Draft
from fewbits.errors import InputError
from fewbits.exporting import written
from fewbits.inspection import tensor_bytes
from fewbits.progress import say, silent
from fewbits.scratch import scratch_folder
from fewbits.verification import Thresholds, Verdict

if TYPE_CHECKING:
    from fewbits.embeddings import EmbeddingVerdict
    from fewbits.kept import Kept
    from fewbits.model import Model
    from fewbits.progress import Progress
    from fewbits.runtimes import Runtime, Session
    from fewbits.targets import Target

REFERENCE = "reference"  # the step under which what the float model gives is kept while files are judged beside it
TOKENS = 16384  # predicted by default: the interval of the mean KL is then about 3 % wide


def verify(
    path: str | Path,
    against: str | Path | Model,
    *,
    data: Paths = (),
    runtime: str = "auto",
    max_kl: float | None = None,
    min_agreement: float | None = None,
    max_ppl_ratio: float | None = None,
    min_cosine: float | None = None,
    length: int | None = None,
    tokens: int = TOKENS,
    floor: bool = True,
    memory: int = MEMORY,
    offline: bool = False,
    progress: Progress[Any] = silent,
) -> Verdict | EmbeddingVerdict:
    """Runs the file itself in the runtime it is meant for, beside the float model in torch, and judges the difference.

    `data` is held-out text, by default the embedded one. `floor`: also run the float file there, to know the runtime's own error.
    """
    path, thresholds = Path(path), Thresholds(max_kl, min_agreement, max_ppl_ratio, min_cosine)
    if not path.exists():
        raise InputError(f"there is nothing at `{path}`", "give a .gguf, an .onnx, or a folder that fewbits wrote")
    judge = runtimes.needed(runtimes.for_file(path) if runtime == "auto" else runtimes.get(runtime))
    if not judge.takes(path):
        raise InputError(
            f"{judge.name} does not run files like `{path.name}`", f"leave `--runtime` out: {runtimes.for_file(path).name} does"
        )
    if not isinstance(against, models.Model) and (Path(against) / manifest.NAME).is_file():
        hint = "`fewbits verify OUT --against MODEL`: the other way round?"
        raise InputError(f"`{against}` is an artifact of fewbits, not the float model", hint)
    source = against if isinstance(against, models.Model) else models.open(against, offline)
    embeddings.check_thresholds(thresholds, source.config)
    provenance.check(path, progress)
    trial.check(judge, path)
    return verified(
        path, source, preparation.held_out_windows(source, data, length, tokens), judge, thresholds, floor, progress, memory=memory
    )


def verified(
    path: Path,
    source: Model,
    windows: list[texts.Window],
    judge: Runtime,
    thresholds: Thresholds,
    floor: bool,
    progress: Progress[Any],
    kept: Kept | None = None,
    memory: int = MEMORY,
) -> Verdict | EmbeddingVerdict:
    from fewbits.judged import Judged

    target = _target_of(judge) if floor else None
    about: dict[str, Any] = {"nbytes": size_of(path), "bits_per_weight": bits_per_weight(path, source)}
    about |= {"runtime": judge.name, "runtime_version": judge.version()}
    if embeddings.given_by(source.config):
        ended = embeddings.texts_of(windows, source.tokenizer)
        with _sessions(path, source, windows, judge, target, progress, None) as (reference, sessions):
            vectors = embeddings.measure(reference, sessions, ended, progress)
        return embeddings.judge(vectors["file"], thresholds, **about, floor=vectors.get("floor"))
    known = Judged(kept, source.fingerprint, path, judge, target is not None) if kept else None
    if known and (found := known.count(windows)):
        say(progress, f"going on: {found} of {len(windows)} windows were judged")
    measured = known.all(windows) if known else None
    if measured is None:
        with _sessions(path, source, windows, judge, target, progress, kept) as (reference, sessions):
            measured = verification.measure(reference, sessions, windows, progress, known, memory)
    kl_floor = float(sum(measured["floor"].kl) / len(measured["floor"].kl)) if "floor" in measured else None
    return verification.judge(measured["file"], thresholds, **about, kl_floor=kl_floor)


@contextmanager
def _sessions(
    path: Path,
    source: Model,
    windows: list[texts.Window],
    judge: Runtime,
    target: Target | None,
    progress: Progress[Any],
    kept: Kept | None,
) -> Iterator[tuple[Session, dict[str, Session]]]:
    """The float model in torch, the file in its runtime, and the float file there.

    `target`: what the float file, which tells the runtime's own error, is written for."""
    from fewbits.runtimes import torch as torch_runtime

    length = max(map(len, windows))
    with kept.scratch() if kept else scratch_folder() as scratch, ExitStack() as opened:
        sessions: dict[str, Session] = {"file": opened.enter_context(closing(judge.open(path, length)))}
        if target:
            file = float_file(source, target, Path(scratch), progress)
            sessions["floor"] = opened.enter_context(closing(judge.open(file, length)))
        yield torch_runtime.of_model(source, kept), sessions


def float_file(source: Model, target: Target, folder: Path, progress: Progress[Any]) -> Path:
    """The unquantized model in the same container: what the runtime itself adds to the error is measured on it."""
    plan = planning.kept(source.weights, target)
    if target.takes_drafts:
        path = folder / target.file_name
        target.write_draft(Draft(source, plan), path, progress)
        return path
    floor = artifacts.quantize(source, plan, folder / "float", progress)
    return written(floor, folder / target.file_name, to=target.name, progress=progress)


def bits_per_weight(path: Path, source: Model) -> float:
    """Of the matrices, as a plan counts them: what lies beside them (norms, biases: float32 in every target) is left out."""
    elements = sum(rows * cols for rows, cols in (w.shape for w in source.weights))
    if (path / "genai_config.json").is_file():  # which has rotary tables beside them
        from fewbits.targets.onnx_genai import reading

        return 8 * reading.weight_bytes(path) / elements
    rest = sum((4 if path.is_file() else tensor.element_size()) * tensor.numel() for tensor in map(source.tensor, source.rest))
    return 8 * (tensor_bytes(path) - rest) / elements


def size_of(path: Path) -> int:
    if path.suffix.lower() == ".onnx" and path.is_file():  # weights may lie beside it
        from fewbits.onnx_files import reading

        return reading.size_of(path)
    return path.stat().st_size if path.is_file() else sum(p.stat().st_size for p in path.iterdir())


def _target_of(runtime: Runtime) -> Target | None:
    return next((target for target in targets.all().values() if target.runtime == runtime.name), None)
