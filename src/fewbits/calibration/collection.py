"""One pass of calibration: samples are drawn from text and run through the model, and the inputs of every weight are summarised on disk."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits import embedded
from fewbits.calibration import by_domain
from fewbits.calibration.folder import ABOUT, SCHEMA, Statistics, file_name, packed, save
from fewbits.calibration.text.documents import Document, documents
from fewbits.calibration.text.samples import Samples, sample
from fewbits.calibration.text.windows import check_ids, window_length
from fewbits.model import Model
from fewbits.progress import say, silent
from fewbits.store.cache import Cache
from fewbits.store.files import Staged

if TYPE_CHECKING:
    from fewbits.calibration.text.domains import Length, Mix
    from fewbits.progress import Progress

Paths = str | Path | Sequence[str | Path]
SAMPLES = 512
MEMORY = 1 << 30  # bytes of hidden states held in memory; more go to disk


def draw(source: Model, data: Paths, samples: int, length: Length, seed: int, mix: Mix | None = None) -> Samples:
    """Samples of this data, or of the embedded text where none is given. `mix`: how much each kind of text counts; None: as much as there
    is of it."""
    if mix:
        kinds = by_domain.parts(source, by_domain.names_of(listed(data)), samples, length, 0, mix)
        return by_domain.joined((by_domain.draw(source, listed(data), part, seed) for part in kinds), seed)
    longest = window_length(source.config, None if length == "data" else length)
    shipped = Document("embedded", embedded.calibration_text(), domain=by_domain.EMBEDDED)
    texts = documents(listed(data), source.tokenizer) if data else [shipped]
    drawn = sample(texts, source.tokenizer, samples, "data" if length == "data" else longest, seed, longest)
    check_ids(drawn.ids, source.config)
    return drawn


def collect(
    source: Model,
    samples: Samples,
    out: Path,
    *,
    hessians: bool = True,
    gradients: bool = True,
    memory: int = MEMORY,
    cache: Cache | None = None,
    progress: Progress[Any] = silent,
) -> Statistics:
    """Run the samples through the model, a block at a time, and write the statistics of every weight. `cache`: where an interrupted run
    resumes from."""
    from fewbits.calibration.collector import Collector
    from fewbits.model.blocks import Blocks
    from fewbits.store.mapped import Room

    blocks = Blocks(source, memory).expect_chain()
    weights: dict[str, dict[str, object]] = {}
    experts: dict[str, list[int]] = {}
    output: dict[str, Any] = {}
    with Staged(out, marker=ABOUT) as folder, ExitStack() as stack:
        folder.mkdir()
        store = cache or Cache(Path(stack.enter_context(tempfile.TemporaryDirectory(dir=out.parent, prefix=".fewbits-"))))
        scratch = stack.enter_context(store.scratch())
        collector = Collector(blocks, samples.ids, Room(Path(scratch), memory), store, hessians=hessians, gradients=gradients)
        if known := collector.blocks_in_cache():
            say(progress, f"resuming: statistics of {known} of {len(blocks)} blocks were there")
        for block, result in collector.forward(progress):
            result.link(folder / file_name("input", block))
            experts |= result.values["experts"]
            weights |= {reader: {"block": block, "site": site} for site, readers in result.values["readers"].items() for reader in readers}
        lookups: dict[str, dict[str, Any]] = {f"{name}:lookup": {"usage": usage} for name, usage in collector.entry.usage.items()}
        if gradients:
            for block, result in collector.backward(progress):
                if block < len(blocks):
                    result.link(folder / file_name("gradient", block))
                    moved = {key.rpartition(":")[0] for key in result.tensors}
                    weights |= {name: {"block": block, "site": None} for name in set(weights) - moved if weights[name]["block"] == block}
                else:
                    output = result.tensors
            looked_up, multiplied = collector.at_entry()
            output |= packed({name: gradients.finished() for name, gradients in multiplied.items()})
            for name, gradient in looked_up.items():
                lookups[f"{name}:lookup"] |= {"fisher_square": gradient.fisher_square, "fisher": gradient.finished()["fisher"]}
        save(folder, "gradient", len(blocks), output | packed(lookups))
        for weight in source.weights:  # embeddings, what no text reaches, and convolutions in groups: each group has another input
            weights.setdefault(weight.name, {"block": len(blocks), "site": None})
        about = {
            "schema": SCHEMA,
            "model": source.path.name,
            "model_sha256": source.fingerprint,
            "options": {"hessians": hessians, "gradients": gradients},
            "runs": [{"data_sha256": samples.digest, "samples": len(samples.ids), "tokens": samples.tokens, "seed": samples.seed}],
            "experts": experts,
            "weights": weights,
        }
        (folder / ABOUT).write_text(json.dumps(about, indent=1))
    return Statistics(out)


def listed(paths: Paths) -> Sequence[str | Path]:
    return [paths] if isinstance(paths, str | Path) else paths
