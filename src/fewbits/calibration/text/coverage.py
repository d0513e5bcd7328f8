"""How representative the calibration samples are: how much text, which tokens, which sources, and how close to the evaluation text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fewbits.calibration.text.overlap import overlap
from fewbits.calibration.text.samples import Samples

FEW_TOKENS = 50_000  # a Hessian of several thousand columns needs many times as many tokens
LOW_VOCABULARY = 0.1
MANY_MISSING = 0.01
LEAK = 0.01
LONG_PASSAGE = 128  # tokens in a row (a paragraph): worth a warning even if it is a small share of a long evaluation text
_SHOWN = 10
_EXCERPT = 160  # characters


@dataclass(frozen=True)
class Lengths:
    """Tokens per sample."""

    least: int
    median: int
    p90: int
    most: int
    histogram: tuple[tuple[int, int], ...]  # (at most this many tokens, samples): powers of two, and the longest


@dataclass(frozen=True)
class MissingToken:
    id: int
    text: str
    count: int  # in the evaluation text


@dataclass(frozen=True)
class Missing:
    """Tokens of the evaluation text that are not in the calibration samples."""

    occurrences: float  # share of its tokens
    distinct: float  # share of its distinct tokens
    most_frequent: tuple[MissingToken, ...]


@dataclass(frozen=True)
class Source:
    name: str
    samples: int
    tokens: int
    share: float  # of all tokens


@dataclass(frozen=True)
class Leak:
    n: int  # tokens in an n-gram: 13, or 8 where windows are short
    share: float  # of the evaluation's n-grams that occur in the calibration samples
    longest: int  # tokens of the longest shared passage
    example: str  # its text, or the beginning of it


@dataclass(frozen=True)
class Coverage:
    samples: int
    tokens: int
    lengths: Lengths
    vocabulary: int  # ids of the tokenizer
    vocabulary_seen: float  # share of the ids that the samples hold
    sources: tuple[Source, ...]  # largest first
    domains: tuple[Source, ...]  # kinds of text, largest first; none: not known
    missing_in_evaluation: Missing | None  # None: no evaluation text was given
    overlap: Leak | None
    warnings: tuple[str, ...]
    notes: tuple[str, ...]  # about the samples: fewer than asked for, files skipped

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def coverage(samples: Samples, tokenizer: Any, evaluation: Sequence[Sequence[int]] = ()) -> Coverage:
    vocabulary = len(tokenizer)
    seen = _counts(samples.ids, vocabulary)
    vocabulary_seen = float((seen > 0).mean())
    missing = _missing(seen, _counts(evaluation, vocabulary), tokenizer) if len(evaluation) else None
    leak = _leak(samples.ids, evaluation, tokenizer) if len(evaluation) else None
    sources = _shares(samples, samples.sources)
    warnings = _warnings(samples.tokens, vocabulary_seen, sources, missing, leak)
    return Coverage(
        samples=len(samples.ids), tokens=samples.tokens, lengths=_lengths(samples.ids), vocabulary=vocabulary,
        vocabulary_seen=vocabulary_seen, sources=sources, missing_in_evaluation=missing, overlap=leak,
        domains=_shares(samples, samples.domains) if samples.domains else (),
        warnings=warnings, notes=samples.notes,
    )  # fmt: skip


def _counts(windows: Sequence[Sequence[int]], vocabulary: int) -> NDArray[np.int64]:
    """How often each id occurs."""
    total = np.zeros(vocabulary, np.int64)
    for window in windows:
        total += np.bincount(window, minlength=vocabulary)
    return total


def _lengths(windows: Sequence[Sequence[int]]) -> Lengths:
    """Percentiles are lengths that occur: the smallest that this share of the samples does not exceed."""
    lengths = sorted(map(len, windows))
    most = lengths[-1]
    bounds = [2**power for power in range(1, most.bit_length()) if 2**power < most] + [most]
    below = [int(np.searchsorted(lengths, bound, side="right")) for bound in bounds]
    histogram = tuple((bound, n - m) for bound, n, m in zip(bounds, below, [0, *below], strict=False) if n > m)
    return Lengths(lengths[0], _percentile(lengths, 50), _percentile(lengths, 90), most, histogram)


def _percentile(ascending: list[int], percent: int) -> int:
    return ascending[-(-len(ascending) * percent // 100) - 1]


def _missing(seen: NDArray[np.int64], wanted: NDArray[np.int64], tokenizer: Any) -> Missing:
    unseen = np.flatnonzero((seen == 0) & (wanted > 0))
    often = sorted(unseen.tolist(), key=lambda token: (-wanted[token], token))[:_SHOWN]
    return Missing(
        occurrences=float(wanted[unseen].sum() / wanted.sum()),
        distinct=len(unseen) / int((wanted > 0).sum()),
        most_frequent=tuple(MissingToken(id, _token_text(tokenizer, id), int(wanted[id])) for id in often),
    )


def _token_text(tokenizer: Any, id: int) -> str:
    text = str(tokenizer.decode([id]))
    return text if text and "\ufffd" not in text else str(tokenizer.convert_ids_to_tokens(id))  # a part of a character


def _shares(samples: Samples, names: Sequence[str]) -> tuple[Source, ...]:
    """What is of each name, where `names` has one for each sample."""
    count: Counter[str] = Counter(names)
    tokens: Counter[str] = Counter()
    for name, ids in zip(names, samples.ids, strict=True):
        tokens[name] += len(ids)
    ordered = sorted(count, key=lambda name: (-tokens[name], name))
    return tuple(Source(name, count[name], tokens[name], tokens[name] / samples.tokens) for name in ordered)


def _leak(calibration: Sequence[Sequence[int]], evaluation: Sequence[Sequence[int]], tokenizer: Any) -> Leak:
    prefix = list(tokenizer("").input_ids[:1])  # the beginning-of-text token is added to windows and not part of the text
    shared = overlap(_without(prefix, calibration), _without(prefix, evaluation))
    text = str(tokenizer.decode(list(shared.passage)))
    return Leak(shared.n, shared.share, shared.longest, text if len(text) <= _EXCERPT else text[:_EXCERPT].rstrip() + " ...")


def _without(prefix: list[int], windows: Sequence[Sequence[int]]) -> list[Sequence[int]]:
    return [window[len(prefix) :] if list(window[: len(prefix)]) == prefix else window for window in windows]


def _warnings(tokens: int, seen: float, sources: tuple[Source, ...], missing: Missing | None, leak: Leak | None) -> tuple[str, ...]:
    warnings = []
    if tokens < FEW_TOKENS:
        warnings.append(f"{tokens:,} tokens are few: Hessians (gptq) want {FEW_TOKENS:,} or more, plain ranges do with less")
    if len(sources) == 1:
        warnings.append(f"all samples come from one source, `{sources[0].name}`: other kinds of text may fare worse than measured")
    if seen < LOW_VOCABULARY:
        warnings.append(
            f"the samples show {seen:.1%} of the vocabulary: rows of the embedding that were never seen get no importance of their own"
        )
    if missing is not None and missing.occurrences > MANY_MISSING:
        warnings.append(
            f"{missing.occurrences:.1%} of the evaluation text is tokens that calibration never saw: it may be text of another kind"
        )
    if leak is not None and leak.share > LEAK:
        warnings.append(
            f"{leak.share:.1%} of the evaluation's runs of {leak.n} tokens are in the calibration samples too, the longest passage has "
            f"{leak.longest} tokens: boilerplate that both share, or a leak that makes the result look better than it is"
        )
    elif leak is not None and leak.longest >= LONG_PASSAGE:
        warnings.append(f"a passage of {leak.longest} tokens is in both the calibration samples and the evaluation text")
    return tuple(warnings)
