"""Calibration: a model and text come in; a folder of statistics goes out, which says for every weight what its inputs look like and how
its output moves the loss.

text/                 documents, samples drawn from them, how well they represent the evaluation text
by_domain.py          samples of several kinds of text         split.py       text to calibrate with, text to judge on
collection.py         one pass: samples in, folder out         collector.py   the pass itself, block by block
recorders.py          hooks that see inputs and gradients      moments.py     sums over the inputs of one layer
histogram.py          counts of all values of an input         ranges.py      which range of an activation to quantize
statistics.py         the statistics of one weight             triangles.py   symmetric matrices as upper triangles
gram.py               x^T x, summed over batches               output_moments.py   of gradients at outputs
passes.py             which weights in which pass              pooled.py      what experts borrow
folder.py             statistics on disk, and merging them     checks.py      statistics from a file, checked
shards.py, units.py   calibration in parts, by workers         reuse.py       statistics given or of an earlier run
importance_matrix.py  llama.cpp's importance matrix            drift.py       how many samples are enough
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits import embedded
from fewbits import model as models
from fewbits.calibration import drift, folder
from fewbits.calibration.collection import MEMORY, SAMPLES, Paths, collect, draw, listed
from fewbits.calibration.folder import Statistics
from fewbits.calibration.shards import CollectOptions, check_shards, collect_shards, drop_shards
from fewbits.calibration.text.coverage import Coverage, coverage
from fewbits.calibration.text.documents import documents
from fewbits.calibration.text.domains import mixed
from fewbits.calibration.text.windows import window_length, windows
from fewbits.devices.units import bytes_of
from fewbits.model import Model, placement
from fewbits.model.gguf import architectures
from fewbits.progress import say, silent
from fewbits.store import executors
from fewbits.store.cache import open_cache
from fewbits.store.files import remove

if TYPE_CHECKING:
    from fewbits.progress import Progress

__all__ = ["MEMORY", "SAMPLES", "Calibrated", "Paths", "calibrate", "collect", "draw", "listed"]


@dataclass(frozen=True)
class Calibrated:
    folder: Path
    statistics: Statistics
    coverage: Coverage
    drift: tuple[drift.Drift, ...]  # per weight, how far more data would still change its statistics

    def __str__(self) -> str:
        text, warnings = self.coverage, len(self.coverage.warnings)
        said = "no warnings" if not warnings else f"{warnings} warning{'s' * (warnings > 1)}: {text.warnings[0]}"
        seen = f"{text.samples} samples, {text.tokens} tokens, {text.vocabulary_seen:.0%} of the vocabulary"
        return f"{self.folder}: statistics of {self.statistics.about['model']}\n{seen}\n{said}"

    def to_dict(self) -> dict[str, object]:
        about = {key: self.statistics.about[key] for key in ("model", "model_sha256", "runs", "options", "experts")}
        rows = [asdict(row) for row in self.drift]
        return {"statistics": str(self.folder), **about, "coverage": self.coverage.to_dict(), "drift": rows}


def calibrate(
    model: str | Path | Model,
    out: str | Path,
    *,
    data: Paths = (),
    samples: int = SAMPLES,
    weights: str | Mapping[str, float] | None = None,
    length: int | str | Mapping[str, int] | None = None,
    seed: int = 0,
    held_out: Paths = (),
    no_hessians: bool = False,
    no_gradients: bool = False,
    memory: str | int = MEMORY,
    merge: Paths = (),
    imatrix: str | Path | None = None,
    shards: int = 1,
    device: str = placement.AUTO,
    executor: str = executors.LOCAL,
    store: str | None = None,
    offline: bool = False,
    progress: Progress[Any] = silent,
) -> Calibrated:
    """Collect the statistics of this text, and say how well it represents use. Each path of `data` is a kind of text, named by its stem or
    as `NAME=PATH`; `weights`: the tokens of each in proportion, `prose=1,code=2`. `length`: of a sample, or `data`: that of each document;
    of one kind too: `books=4096`. `held_out`: the text that results will be judged on.
    `merge`: statistics of other texts, collected before with the same options, to add to these. `shards`: parts of the samples that go
    through the model separately, each in a worker of the executor."""
    workers = executors.parse(executor, store)
    where = placement.for_executor(device, workers.in_process)
    placement.find(where)
    mix, usual = mixed(weights, length)
    source = model if isinstance(model, Model) else models.open(model, offline)
    if imatrix is not None:
        architectures.of(source.config)  # an error, before the work: llama.cpp's names of its tensors must be known
    drawn = draw(source, data, samples, usual, seed, mix)
    text = "\n\n".join(d.text for d in documents(listed(held_out), source.tokenizer)) if held_out else embedded.verification_text()
    evaluation = windows(text, source.tokenizer, window_length(source.config, None))
    seen = coverage(drawn, source.tokenizer, evaluation)
    check_shards(drawn, shards)
    options = CollectOptions(bytes_of(memory, "--memory"), not no_hessians, not no_gradients)
    work = Path(out).with_name(f"{Path(out).name}.work")  # removed at the end
    with open_cache(work, progress=progress) as cache, executors.open_crew(workers, source, source.path, offline) as crew:
        new = work / "new" if merge else Path(out)
        if crew and shards == 1:
            say(progress, "one shard is not divided: this process calibrates; `--shards` gives workers something to do")
        with placement.passes_on(where, progress):
            cache = cache.of(**placement.part_of_key())
            if shards > 1:
                statistics = collect_shards(source, drawn, new, shards, options, cache=cache, crew=crew, progress=progress)
            else:
                statistics = collect(source, drawn, new, cache=cache, progress=progress, **asdict(options))
        if merge:
            statistics = folder.merge([*map(Path, listed(merge)), new], Path(out))
        drop_shards(cache)
        cache.drop_all()
        remove(work / "new")
    if imatrix is not None:
        from fewbits.calibration import importance_matrix

        importance_matrix.write(statistics, source, Path(imatrix))
    return Calibrated(Path(out), statistics, seen, drift.drift(statistics))
