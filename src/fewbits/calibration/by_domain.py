"""Samples of several kinds of text, each kind drawn by itself: as many as its weight says, and as long as was asked for it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from fewbits.calibration.text import domains
from fewbits.calibration.text.documents import documents
from fewbits.calibration.text.samples import Samples, checksum, sample
from fewbits.calibration.text.windows import check_ids, window_length

if TYPE_CHECKING:
    from fewbits.calibration.text.domains import Length, Mix
    from fewbits.model import Model

EMBEDDED = "embedded"  # the kind of the text that is taken where none is given


@dataclass(frozen=True)
class Part:
    """One kind of text: how many samples to calibrate with and windows to judge on are wanted of it."""

    domain: str
    length: int | Literal["data"]
    tokens: int  # in a sample, at most
    samples: int
    judged: int


def parts(source: Model, names: Sequence[str], samples: int, length: Length, judged: int, mix: Mix) -> list[Part]:
    """What each kind gets of so many samples of this length, and of so many tokens to judge on."""
    mix.check(names)
    usual = window_length(source.config, None if length == "data" else length)
    found = []
    for name, share in mix.shares(names).items():
        own = mix.lengths.get(name)
        tokens = usual if own is None else window_length(source.config, own)
        count = max(1, round(samples * usual * share / tokens)) if samples else 0
        aside = max(1, round(judged * share) // (tokens - 1)) if judged else 0
        found.append(Part(name, "data" if own is None and length == "data" else tokens, tokens, count, aside))
    return found


def draw(source: Model, paths: Sequence[str | Path], part: Part, seed: int) -> Samples:
    """Of one kind: what is wanted to calibrate with and to judge on together."""
    texts = documents(paths, source.tokenizer, part.domain)
    count = part.samples + part.judged
    drawn = sample(texts, source.tokenizer, count, part.length, seed, part.tokens, of=f"`{part.domain}`")
    check_ids(drawn.ids, source.config)
    return drawn


def joined(drawn: Iterable[Samples], seed: int) -> Samples:
    """All kinds in one order, drawn by the seed: any first part of it, and every second sample of it, has some of each."""
    all_of = list(drawn)
    keyed = [(_key(seed, one.domains[i], i), one, i) for one in all_of for i in range(len(one.ids))]
    keyed.sort(key=lambda entry: entry[0])
    ids = tuple(one.ids[i] for _, one, i in keyed)
    return Samples(
        ids,
        tuple(one.sources[i] for _, one, i in keyed),
        seed,
        checksum(ids),
        sum(one.documents for one in all_of),
        tuple(note for one in all_of for note in one.notes),
        tuple(one.domains[i] for _, one, i in keyed),
    )


def _key(seed: int, domain: str, number: int) -> bytes:
    return hashlib.blake2b(f"{seed}\0{domain}\0{number}".encode(), digest_size=8).digest()


def names_of(paths: Sequence[str | Path]) -> list[str]:
    return domains.names(paths) if paths else [EMBEDDED]
