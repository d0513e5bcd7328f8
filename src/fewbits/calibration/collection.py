"""One pass of calibration: samples are drawn from text and run through the model, and the inputs of every weight are summarised on disk."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
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

    blocks, listing = Blocks(source, memory).expect_chain(), _Listing()
    output: dict[str, Any] = {}
    with Staged(out, marker=ABOUT) as folder, ExitStack() as stack:
        folder.mkdir()
        store = cache or Cache(Path(stack.enter_context(tempfile.TemporaryDirectory(dir=out.parent, prefix=".fewbits-"))))
        scratch = stack.enter_context(store.scratch())
        collector = Collector(blocks, samples.ids, Room(Path(scratch), memory), store, hessians=hessians, gradients=gradients)
        if known := collector.blocks_in_cache():
            say(progress, f"resuming: statistics of {known} of {len(blocks)} blocks were there")
        for block, part, result in collector.forward(progress):
            result.link(folder / file_name("input", block, part))
            listing.add(block, part, result.values)
        lookups: dict[str, dict[str, Any]] = {f"{name}:lookup": {"usage": usage} for name, usage in collector.entry.usage.items()}
        if gradients:
            moved: set[str] = set()
            for block, part, result in collector.backward(progress):
                if block < len(blocks):
                    result.link(folder / file_name("gradient", block, part))
                    moved |= {key.rpartition(":")[0] for key in result.tensors}
                else:
                    output = result.tensors
            listing.drop_unmoved(len(blocks), moved)
            looked_up, multiplied = collector.at_entry()
            output |= packed({name: gradients.finished() for name, gradients in multiplied.items()})
            for name, gradient in looked_up.items():
                done = gradient.finished()
                lookups[f"{name}:lookup"] |= {"fisher_square": done["fisher_square"], "fisher": done["fisher"]}
        save(folder, "gradient", len(blocks), output | packed(lookups))
        about = {
            "schema": SCHEMA,
            "model": source.path.name,
            "model_sha256": source.fingerprint,
            "options": {"hessians": hessians, "gradients": gradients},
            "runs": [{"data_sha256": samples.digest, "samples": len(samples.ids), "tokens": samples.tokens, "seed": samples.seed}],
            **listing.finished(source, len(blocks)),
        }
        (folder / ABOUT).write_text(json.dumps(about, indent=1))
    return Statistics(out)


@dataclass
class _Listing:
    """Where the statistics of each weight are, as statistics.json says it."""

    weights: dict[str, dict[str, Any]] = field(default_factory=dict)
    experts: dict[str, list[int]] = field(default_factory=dict)  # by module: how many tokens each was given
    borrowed: dict[str, int] = field(default_factory=dict)  # by stack: tokens that each of its experts borrows

    def add(self, block: int, part: str, values: Mapping[str, Any]) -> None:
        self.experts |= values.get("experts", {})
        self.borrowed |= values.get("borrowed", {})
        place = {"block": block} | ({"part": part} if part else {})
        sites: dict[str, list[str]] = values.get("readers", {})
        self.weights |= {reader: place | {"site": site} for site, readers in sites.items() for reader in readers}

    def drop_unmoved(self, outside: int, moved: set[str]) -> None:
        """Weights in blocks whose outputs moved nothing: what they read says nothing of what they are worth."""
        unmoved = {name for name, place in self.weights.items() if place["block"] != outside} - moved
        self.weights |= {name: self.weights[name] | {"site": None} for name in unmoved}

    def finished(self, source: Model, outside: int) -> dict[str, Any]:
        for weight in source.weights:  # embeddings, what no text reaches, and convolutions in groups: each group has another input
            self.weights.setdefault(weight.name, {"block": outside, "site": None})
        return {"experts": self.experts, "borrowed": self.borrowed, "weights": self.weights}


def listed(paths: Paths) -> Sequence[str | Path]:
    return [paths] if isinstance(paths, str | Path) else paths
