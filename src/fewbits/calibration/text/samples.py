"""The samples that calibration runs the model on: documents packed to one length, or at their own length, drawn by a seed.

Every draw is decided by hashes of (seed, source, number), so that the same data and seed give the same tokens on any machine and with
any version of any library.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fewbits.calibration.text.documents import Document
from fewbits.calibration.text.windows import encoded
from fewbits.errors import InputError

# Text held in memory per token asked for. A token has 3 to 5 characters, so each window is chosen from at least six. Tokenizing all
# of the data would take 20 s per 50 MB and make the draw another one, not a better one.
_CHARACTERS_PER_TOKEN = 32
_FEWEST, _MOST = 2_000_000, 256_000_000  # characters held, however many tokens are asked for
_SHARED = "\0small sources"  # no file has such a name
_BATCH = 64  # documents tokenized in one call, which does them in parallel

Ids = NDArray[np.int32]
Owner = tuple[str, str]  # a file and the kind of its text


@dataclass(frozen=True)
class Samples:
    ids: tuple[tuple[int, ...], ...]  # in an order drawn by the seed: any first part of them is a fair sample too
    sources: tuple[str, ...]  # for each sample, where most of its tokens come from
    seed: int
    digest: str  # sha256 over the ids: the checksum of the data
    documents: int  # number of documents read
    notes: tuple[str, ...] = ()  # for the user: fewer samples than asked for, files skipped, documents dropped
    domains: tuple[str, ...] = ()  # for each sample, the kind of its text; none: not known

    @property
    def tokens(self) -> int:
        return sum(map(len, self.ids))


def sample(
    documents: Iterable[Document],
    tokenizer: Any,
    count: int = 512,
    length: int | Literal["data"] = 512,
    seed: int = 0,
    longest: int | None = None,
    of: str = "the data",
) -> Samples:
    """At most `count` samples, from each source in proportion to its share of the data, and at least one from each if there is room.

    If `length` is a number, documents are joined with the end-of-text token between them and cut into windows of that many tokens, each
    starting with the beginning-of-text token if the tokenizer adds one. If it is `"data"`, every document is one sample, cut to `longest`.
    `of`: what messages call the data.
    """
    longest = longest or _longest(tokenizer)
    _check(count, length, longest)
    shelf = _Shelf(seed, count * (longest if length == "data" else length))
    for document in documents:
        if length == "data":
            if document.continues:
                continue  # always beyond `longest`: the pieces before it have a million characters
            document = replace(document, text=document.text[: 32 * longest])  # 32 characters for a token: more than the average
        shelf.add(document)
    prefix = tokenizer("").input_ids[:1]  # as in `windows`
    notes = list(getattr(documents, "notes", ())) + shelf.notes()
    if length == "data":
        pieces, owners, dropped, cut = _whole(shelf, tokenizer, prefix, longest, of)
        if dropped:
            notes.append(f"{_counted(dropped, 'document')} of {shelf.documents} dropped: shorter than 2 tokens")
        if cut:
            notes.append(f"{_counted(cut, 'document')} cut to {longest} tokens")
    else:
        pieces, owners = _packed(shelf, tokenizer, prefix, length, of)
    chosen = _draw([source for source, _ in owners], shelf.weights(), count, seed)
    if len(chosen) < count:
        notes.append(f"{of} gives {_counted(len(chosen), 'sample')}, {count} were asked for")
    ids = tuple(tuple(pieces[i].tolist()) for i in chosen)
    sources, domains = (tuple(owners[i][part] for i in chosen) for part in (0, 1))
    return Samples(ids, sources, seed, checksum(ids), shelf.documents, tuple(notes), domains)


class _Shelf:
    """The text to choose samples from: all of it, or, if it is far more than needed, documents drawn from each source.

    Large sources are cut first, so that a small one stays whole beside a large one; `weights` says how much was cut from each. If there
    are more sources than room for a document of each, the small ones share a place.
    """

    def __init__(self, seed: int, tokens: int) -> None:
        self.room = min(max(tokens * _CHARACTERS_PER_TOKEN, _FEWEST), _MOST)
        self.documents = 0
        self._seed = seed
        self._kept: dict[str, list[tuple[int, int, Document]]] = {}  # place -> (key, position, document)
        self._seen: Counter[str] = Counter()  # characters read, by place
        self._held: Counter[str] = Counter()  # characters kept, by place
        self._total = 0
        self._limit = self.room * 5 // 4  # a quarter above `room`, because making room takes a sort
        self._crowded = False
        self._position = 0

    def add(self, document: Document) -> None:
        self.documents += not document.continues
        if not document.text:
            return
        place = self._place(document.source)
        key = _hash(self._seed, "document", document.source, self._position)
        self._kept.setdefault(place, []).append((key, self._position, document))
        self._seen[place] += len(document.text)
        self._held[place] += len(document.text)
        self._total += len(document.text)
        self._position += 1
        if self._total > self._limit:
            self._make_room()
            if self._total > self.room and not self._crowded:
                self._share_a_place()
                self._make_room()
            self._limit = max(self._total, self.room) * 5 // 4

    def in_order(self) -> list[tuple[int, Document]]:
        """(position, document) in the order they were read."""
        return sorted(((position, document) for kept in self._kept.values() for _, position, document in kept), key=lambda entry: entry[0])

    def weights(self) -> dict[str, float]:
        """How many characters read each character held stands for, by source."""
        return {entry[2].source: self._seen[place] / self._held[place] for place, kept in self._kept.items() for entry in kept}

    def notes(self) -> list[str]:
        seen = self._seen.total()
        return [f"{self._total / 1e6:.1f} of {seen / 1e6:.1f} million characters used, drawn by the seed"] if self._total < seen else []

    def _place(self, source: str) -> str:
        return _SHARED if self._crowded and source not in self._kept else source

    def _make_room(self) -> None:
        level = _water_level(sorted(self._held.values()), self.room)
        for place, held in self._held.items():
            if held > level:
                kept = sorted(self._kept[place], key=lambda entry: entry[:2])
                while len(kept) > 1 and held > level:
                    held -= len(kept.pop()[2].text)
                self._kept[place], self._held[place] = kept, held
        self._total = self._held.total()

    def _share_a_place(self) -> None:
        self._crowded = True
        whole = [place for place in self._kept if self._held[place] == self._seen[place]]
        self._kept[_SHARED] = [entry for place in whole for entry in self._kept.pop(place)]
        self._seen[_SHARED] = self._held[_SHARED] = sum(self._held[place] for place in whole)
        for place in whole:
            del self._seen[place], self._held[place]


def _water_level(sizes: list[int], room: int) -> int:
    """The level at which sum(min(size, level)) is `room`; `sizes` ascending, their sum beyond it."""
    for i, size in enumerate(sizes):
        if size * (len(sizes) - i) >= room:  # this and all after it reach the level
            return room // (len(sizes) - i)
        room -= size
    return sizes[-1]


def _tokenized(shelf: _Shelf, tokenizer: Any) -> Iterator[tuple[int, Document, list[int]]]:
    """(position, document, its ids), without the tokenizer's special tokens."""
    entries = iter(shelf.in_order())
    while batch := list(islice(entries, _BATCH)):
        for (position, document), ids in zip(batch, encoded(tokenizer, [document.text for _, document in batch]), strict=True):
            yield position, document, ids


def _packed(shelf: _Shelf, tokenizer: Any, prefix: list[int], length: int, of: str) -> tuple[list[Ids], list[Owner]]:
    """(samples, of each the file and the kind of text that most of it is of)"""
    end = getattr(tokenizer, "eos_token_id", None)
    names: dict[Owner, int] = {}
    stream: list[Ids] = []
    owners: list[Ids] = []
    before: tuple[int, list[int]] | None = None  # position and ids of the document before
    for position, document, ids in _tokenized(shelf, tokenizer):
        joined = document.continues and before is not None and before[0] == position - 1  # the piece before it was kept too
        if not joined:
            ids = ids[len(prefix) :] if prefix and ids[:1] == prefix else ids  # a chat template adds the token to the text
        if not ids:
            continue
        if end is not None and before is not None and not joined and before[1][-1] != end:
            stream.append(np.array([end], np.int32))
            owners.append(owners[-1][-1:])
        stream.append(np.array(ids, np.int32))
        owners.append(np.full(len(ids), names.setdefault((document.source, document.domain), len(names)), np.int32))
        before = position, ids
    body = length - len(prefix)
    flat = np.concatenate(stream) if stream else np.zeros(0, np.int32)
    windows = len(flat) // body
    if not windows:
        hint = "give more text with `--data`, or a smaller `--length`"
        raise InputError(f"{of} has {len(flat)} tokens, one window needs {body}", hint)
    rows = flat[: windows * body].reshape(windows, body)
    owned = np.concatenate(owners)[: windows * body].reshape(windows, body)
    listed = list(names)
    head = np.array(prefix, np.int32)
    mostly = [row[0] if row[0] == row[-1] and (row == row[0]).all() else np.bincount(row).argmax() for row in owned]
    return [np.concatenate([head, row]) for row in rows], [listed[owner] for owner in mostly]


def _whole(shelf: _Shelf, tokenizer: Any, prefix: list[int], longest: int, of: str) -> tuple[list[Ids], list[Owner], int, int]:
    """(samples, their files and kinds of text, number of documents too short, number of documents cut), one sample per document."""
    samples: list[Ids] = []
    owners: list[Owner] = []
    cut = 0
    for _, document, ids in _tokenized(shelf, tokenizer):
        body = ids[len(prefix) :] if prefix and ids[:1] == prefix else ids
        if len(body) < 2:
            continue
        cut += len(prefix) + len(body) > longest
        samples.append(np.array((prefix + body)[:longest], np.int32))
        owners.append((document.source, document.domain))
    if not samples:
        raise InputError(f"{of} holds no document of 2 tokens or more", "give more text with `--data`")
    return samples, owners, shelf.documents - len(samples), cut


def _draw(sources: Sequence[str], weights: dict[str, float], count: int, seed: int) -> list[int]:
    """Indices of the chosen samples: from each source its share, in a mixed order."""
    groups: dict[str, list[int]] = defaultdict(list)
    for index, source in enumerate(sources):
        groups[source].append(index)
    if len(sources) <= count:
        chosen = list(range(len(sources)))
    else:
        sizes = {source: len(group) for source, group in groups.items()}
        quotas = _quotas(sizes, {source: sizes[source] * weights[source] for source in sizes}, count, seed)
        chosen = [
            index
            for source, group in groups.items()
            for index in sorted(group, key=lambda index, source=source: _hash(seed, "sample", source, index))[: quotas[source]]  # type: ignore[misc]
        ]
    return sorted(chosen, key=lambda index: _hash(seed, "order", "", index))


def _quotas(sizes: dict[str, int], shares: dict[str, float], count: int, seed: int) -> dict[str, int]:
    """How many of the `count` samples come from each source: its share, rounded down or up so that the expectation over seeds is exact;
    at least one each if `count` allows it; never more than the source has."""
    least = 1 if len(sizes) <= count else 0
    start = _hash(seed, "start", "", 0) / 2**64
    total, below, quotas = sum(shares.values()), 0.0, {}
    for source, share in shares.items():
        above = below + share
        given = int(above / total * count + start) - int(below / total * count + start)
        quotas[source] = min(max(given, least), sizes[source])
        below = above
    while sum(quotas.values()) > count:
        quotas[max(quotas, key=lambda source: quotas[source])] -= 1
    while sum(quotas.values()) < count:
        quotas[max(quotas, key=lambda source: sizes[source] - quotas[source])] += 1
    return quotas


def _hash(seed: int, what: str, source: str, number: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}\0{what}\0{source}\0{number}".encode(), digest_size=8).digest(), "big")


def checksum(ids: Iterable[Sequence[int]]) -> str:
    digest = hashlib.sha256()
    for one in ids:
        digest.update(np.array([len(one), *one], "<i4").tobytes())  # with the length, so that the digest depends on where samples begin
    return digest.hexdigest()


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _longest(tokenizer: Any) -> int:
    longest = int(getattr(tokenizer, "model_max_length", 0) or 0)
    return longest if 2 <= longest < 10**6 else 2048  # a tokenizer without a limit says 10^30


def _check(count: int, length: int | Literal["data"], longest: int) -> None:
    if count < 1:
        raise InputError(f"`--samples {count}`: at least one is needed", "512 is usual")
    if length != "data" and length < 2:
        raise InputError(f"`--length {length}`: a sample needs 2 tokens or more", "512 is usual")
    if length != "data" and length > longest:
        raise InputError(f"`--length {length}` is beyond the model's {longest} positions", f"use at most {longest}")
