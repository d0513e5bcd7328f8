"""Calibration: text through the model, one block at a time, and what every weight saw of it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fewbits import embedded, executors, texts
from fewbits import kept as results
from fewbits import model as models
from fewbits.calibration import data as sources
from fewbits.calibration import drifting, storing
from fewbits.calibration.coverage import Coverage, coverage
from fewbits.calibration.data import Document, Samples, sample
from fewbits.calibration.storing import Statistics
from fewbits.files import Staged, remove
from fewbits.kept import Kept
from fewbits.model import Model
from fewbits.progress import say, silent

if TYPE_CHECKING:
    from fewbits.progress import Progress

Paths = str | Path | Sequence[str | Path]
SAMPLES = 512
MEMORY = 1 << 30  # bytes of hidden states held in memory; more go to disk


@dataclass(frozen=True)
class Calibrated:
    folder: Path
    statistics: Statistics
    coverage: Coverage
    drift: tuple[drifting.Drift, ...]  # per weight, what more data would still change

    def to_dict(self) -> dict[str, object]:
        about = {key: self.statistics.about[key] for key in ("model", "model_sha256", "runs", "options", "experts")}
        drift = [asdict(row) for row in self.drift]
        return {"statistics": str(self.folder), **about, "coverage": self.coverage.to_dict(), "drift": drift}


def calibrate(
    model: str | Path | Model,
    out: str | Path,
    *,
    data: Paths = (),
    samples: int = SAMPLES,
    length: int | Literal["data"] | None = None,
    seed: int = 0,
    held_out: Paths = (),
    hessians: bool = True,
    gradients: bool = True,
    memory: int = MEMORY,
    merge: Paths = (),
    imatrix: str | Path | None = None,
    shards: int = 1,
    executor: str = executors.LOCAL,
    store: str | None = None,
    offline: bool = False,
    progress: Progress[Any] = silent,
) -> Calibrated:
    """Statistics of this text, and how well it represents use. `held_out` is the text that results will be judged on; `merge` are
    statistics of other texts, taken before with the same options, that these are added to. `shards`: parts of the samples that go through
    the model apart, each by one of the workers of the executor."""
    from fewbits.calibration import sharding

    workers = executors.parse(executor, store)
    source = model if isinstance(model, Model) else models.open(model, offline)
    drawn = draw(source, data, samples, length, seed)
    text = "\n\n".join(d.text for d in sources.documents(listed(held_out), source.tokenizer)) if held_out else embedded.verification_text()
    evaluation = texts.windows(text, source.tokenizer, texts.window_length(source.config, None))
    seen = coverage(drawn, source.tokenizer, evaluation)
    sharding.check(drawn, shards)
    options: dict[str, Any] = {"hessians": hessians, "gradients": gradients, "memory": memory, "progress": progress}
    work = Path(out).with_name(f"{Path(out).name}.work")  # only until it is done
    with results.opened(work, progress=progress) as kept, executors.opened(workers, source, source.path, offline) as crew:
        new = work / "new" if merge else Path(out)
        if crew and shards == 1:
            say(progress, "one shard is not divided: this process calibrates; `--shards` gives workers something to do")
        if shards > 1:
            statistics = sharding.collect(source, drawn, new, shards, kept=kept, crew=crew, **options)
        else:
            statistics = collect(source, drawn, new, kept=kept, **options)
        if merge:
            statistics = storing.merge([*map(Path, listed(merge)), new], Path(out))
        sharding.forget(kept)
        kept.drop_all()
        remove(work / "new")
    if imatrix is not None:
        from fewbits.calibration import importance_matrix

        importance_matrix.write(statistics, source, Path(imatrix))
    return Calibrated(Path(out), statistics, seen, drifting.drift(statistics))


def draw(source: Model, data: Paths, samples: int, length: int | Literal["data"] | None, seed: int) -> Samples:
    """The embedded text where no data is given."""
    longest = texts.window_length(source.config, None if length == "data" else length)
    found = sources.documents(listed(data), source.tokenizer) if data else [Document("embedded", embedded.calibration_text())]
    drawn = sample(found, source.tokenizer, samples, "data" if length == "data" else longest, seed, longest)
    texts.check_ids(drawn.ids, source.config)
    return drawn


def collect(
    source: Model,
    samples: Samples,
    out: Path,
    *,
    hessians: bool = True,
    gradients: bool = True,
    memory: int = MEMORY,
    kept: Kept | None = None,
    progress: Progress[Any] = silent,
) -> Statistics:
    """Run the samples through the model and write what every weight saw, a block at a time. `kept`: for the next run to go on from."""
    from fewbits.blocks import Blocks
    from fewbits.calibration.collecting import Collector

    blocks = Blocks(source, memory).expect_chain()
    weights: dict[str, dict[str, object]] = {}
    experts: dict[str, list[int]] = {}
    output: dict[str, Any] = {}
    with Staged(out, marker=storing.ABOUT) as folder, ExitStack() as stack:
        folder.mkdir()
        store = kept or Kept(Path(stack.enter_context(tempfile.TemporaryDirectory(dir=out.parent, prefix=".fewbits-"))))
        scratch = stack.enter_context(store.scratch())
        collector = Collector(blocks, samples.ids, Path(scratch), store, hessians=hessians, gradients=gradients, memory=memory)
        if found := collector.found():
            say(progress, f"going on: statistics of {found} of {len(blocks)} blocks were there")
        for block, result in collector.forward(progress):
            result.link(folder / storing.file_name("input", block))
            experts |= result.values["experts"]
            weights |= {reader: {"block": block, "site": site} for site, readers in result.values["readers"].items() for reader in readers}
        lookups: dict[str, dict[str, Any]] = {f"{name}:lookup": {"usage": usage} for name, usage in collector.usage.items()}
        if gradients:
            for block, result in collector.backward(progress):
                if block < len(blocks):
                    result.link(folder / storing.file_name("gradient", block))
                else:
                    output = result.tensors
            for name, gradient in collector.at_embeddings().items():
                lookups[f"{name}:lookup"] |= {"fisher_square": gradient.fisher_square, "fisher": gradient.fisher}
        storing.save(folder, "gradient", len(blocks), output | storing.packed(lookups))
        for weight in source.weights:  # embeddings, and what no text goes through or has no one input: convolutions in groups
            weights.setdefault(weight.name, {"block": len(blocks), "site": None})
        about = {
            "schema": storing.SCHEMA,
            "model": source.path.name,
            "model_sha256": source.fingerprint,
            "options": {"hessians": hessians, "gradients": gradients},
            "runs": [{"data_sha256": samples.digest, "samples": len(samples.ids), "tokens": samples.tokens, "seed": samples.seed}],
            "experts": experts,
            "weights": weights,
        }
        (folder / storing.ABOUT).write_text(json.dumps(about, indent=1))
    return Statistics(out)


def listed(paths: Paths) -> Sequence[str | Path]:
    return [paths] if isinstance(paths, str | Path) else paths
