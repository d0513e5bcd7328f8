"""Runs one file after another beside the same float model, whose hidden states are computed once and cached for all of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits import model as models
from fewbits.artifact import manifest
from fewbits.artifact import written as provenance
from fewbits.calibration import MEMORY, Paths, by_domain, listed, split
from fewbits.calibration.text.domains import in_tokens, mixed
from fewbits.errors import FewbitsError, InputError, MissingError
from fewbits.inspection.sizes import bits_per_weight, size_of
from fewbits.model import placement
from fewbits.model.gguf.model import GgufModel
from fewbits.planning.accuracy import Thresholds
from fewbits.progress import doing, say, silent
from fewbits.store import maker
from fewbits.store.cache import open_cache
from fewbits.store.scratch import scratch_folder
from fewbits.targets.gguf.source import open_source
from fewbits.verification import embeddings, metrics, sandbox
from fewbits.verification.comparison import candidates, figures
from fewbits.verification.comparison.figures import Comparison, Refused
from fewbits.verification.comparison.speed import tokens_per_second
from fewbits.verification.files import TOKENS, compared_with, sessions_of
from fewbits.verification.resume import CachedWindows
from fewbits.verification.runtimes import llamacpp
from fewbits.verification.streamed import REFERENCE

if TYPE_CHECKING:
    from fewbits.calibration.split import Text
    from fewbits.model import Model
    from fewbits.progress import Progress
    from fewbits.store.cache import Cache
    from fewbits.verification.comparison.candidates import Candidate
    from fewbits.verification.metrics import MeasuredLogits, Verdict


def compare_files(
    files: str | Path | Sequence[str | Path],
    against: str | Path | Model,
    *,
    data: Paths = (),
    weights: str | Mapping[str, float] | None = None,
    length: int | str | Mapping[str, int] | None = None,
    tokens: int = TOKENS,
    work: Path | None = None,
    memory: int = MEMORY,
    device: str = placement.AUTO,
    offline: bool = False,
    progress: Progress[Any] = silent,
) -> Comparison:
    """`work`: a folder in which every window that was judged is kept, so that the same call resumes there. Text as for `verify`."""
    mix, usual = mixed(weights, length)
    placement.find(device)
    mix.check(by_domain.names_of(listed(data)))
    if not isinstance(against, models.Model) and (Path(against) / manifest.NAME).is_file():
        raise InputError(
            f"`{against}` is an artifact of fewbits, not the float model", "`--against` takes the model that files were made of"
        )
    named = [files] if isinstance(files, str | Path) else list(files)
    known, refused = candidates.find(named, None if isinstance(against, models.Model) else Path(against))
    if not known:
        candidates.check(refused)
    source = _opened(against, offline, progress)
    text = split.held_out_text(source, data, in_tokens(usual), tokens, mix)
    measured: dict[str, MeasuredLogits] = {}
    verdicts: dict[str, Verdict] = {}
    speeds: dict[str, float | None] = {}
    with _cache(work, progress) as all_results, placement.passes_on(device, progress):
        cache = all_results.of(**placement.part_of_key())
        for number, each in enumerate(known, 1):
            say(progress, f"{number} of {len(known)}: {each.name} in {each.runtime.name}")
            try:
                verdicts[each.name], measured[each.name], speeds[each.name] = _run(each, source, text, cache, memory, progress)
            except FewbitsError as failure:
                say(progress, f"left out: {failure.args[0]}")
                refused.append(Refused(str(each.path), failure.args[0], isinstance(failure, MissingError)))
        cache.drop_step(REFERENCE)  # large, and not needed for files that were judged
    if not measured:
        candidates.check(refused)
    judged_on = sum(len(window) - 1 for window in text.windows)
    reference = f"{source.name}, itself quantized ({source.lossy})" if source.lossy else None
    rows = figures.ranked(measured, verdicts, speeds)
    return Comparison(source.name, judged_on, maker.processor_name(), rows, tuple(refused), reference)


def _opened(against: str | Path | Model, offline: bool, progress: Progress[Any]) -> Model:
    with doing(progress, f"opening {against}"):
        source = against if isinstance(against, models.Model) else open_source(against, offline)
    if embeddings.given_by(source.config):
        raise InputError("files are compared by their logits, and an encoder gives none", "use `fewbits verify` for each of them")
    if source.lossy:
        say(progress, compared_with(source))
    if isinstance(source, GgufModel):
        llamacpp.lend_tokenizer(source)
    return source


def _run(
    each: Candidate, source: Model, text: Text, cache: Cache, memory: int, progress: Progress[Any]
) -> tuple[Verdict, MeasuredLogits, float | None]:
    path, runtime, windows = each.path, each.runtime, text.windows
    provenance.check(path, progress)
    judged = CachedWindows(cache, source.fingerprint, path, runtime, floor=False)
    found, timed = judged.all(windows), judged.results.find("speed")
    if found is None or timed is None:
        sandbox.check(runtime, path)
        with sessions_of(path, source, windows, runtime, None, progress, cache) as (base, sessions):
            found = metrics.compare_logits(base, sessions, windows, progress, judged, memory)
            timed = judged.results.keep("speed", {"tokens_per_second": tokens_per_second(sessions["file"], windows[0])}, {})
    about: dict[str, Any] = {"nbytes": size_of(path), "bits_per_weight": bits_per_weight(path, source)}
    about |= {"runtime": runtime.name, "runtime_version": runtime.version() + runtime.remark(path)}
    domains = metrics.figures_by_domain(found, windows, text.domains)
    verdict = metrics.judge(found["file"], Thresholds(), **about, domains=domains)
    rate = timed.values["tokens_per_second"]
    return verdict, found["file"], None if rate is None else float(rate)


@contextmanager
def _cache(work: Path | None, progress: Progress[Any]) -> Iterator[Cache]:
    """In the work folder, or in one that is gone at the end."""
    if work is not None:
        with open_cache(work, progress=progress) as cache:
            yield cache
        return
    with scratch_folder() as folder, open_cache(Path(folder) / "work", progress=progress) as cache:
        yield cache
