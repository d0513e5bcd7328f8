"""Samples to calibrate with and windows to judge on, which are never the same text."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from fewbits import embedded
from fewbits.calibration import collection
from fewbits.calibration.text.documents import documents
from fewbits.calibration.text.samples import checksum
from fewbits.calibration.text.windows import Window, check_ids, window_length, windows
from fewbits.errors import InputError

if TYPE_CHECKING:
    from fewbits.calibration.collection import Paths
    from fewbits.calibration.text.samples import Samples
    from fewbits.model import Model


@dataclass(frozen=True)
class Text:
    samples: Samples | None  # to calibrate with; None: nothing is calibrated
    windows: list[Window]  # to judge on


def split(source: Model, data: Paths, held_out: Paths, samples: int, length: int | Literal["data"] | None, seed: int, tokens: int) -> Text:
    """With `samples` 0 nothing is calibrated. Without `held_out`, a part of the data is set aside to judge on."""
    if held_out or not data:
        judged = held_out_windows(source, held_out, None if length == "data" else length, tokens)
        return Text(collection.draw(source, data, samples, length, seed) if samples else None, judged)
    wanted = max(1, tokens // (window_length(source.config, None if length == "data" else length) - 1))
    drawn = collection.draw(source, data, samples + wanted, length, seed)
    judged = [list(ids) for ids in drawn.ids]
    if not samples:
        return Text(None, judged[:wanted])
    if len(judged) < 2:
        raise InputError("the data gives a single sample", "give more text with `--data`, or other text with `--held-out`")
    aside = max(1, min(wanted, len(judged) // 4))
    some = slice(aside, aside + samples)
    ids = drawn.ids[some]
    return Text(replace(drawn, ids=ids, sources=drawn.sources[some], digest=checksum(ids)), judged[:aside])


def held_out_windows(source: Model, data: Paths, length: int | None, tokens: int) -> list[Window]:
    if not data:
        text = embedded.verification_text()
    else:
        text = "\n\n".join(document.text for document in documents(collection.listed(data), source.tokenizer))
    cut = windows(text, source.tokenizer, window_length(source.config, length), tokens)
    check_ids(cut, source.config)
    return cut
