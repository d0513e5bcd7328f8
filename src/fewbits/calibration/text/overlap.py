"""Overlap of calibration and evaluation text by n-grams of tokens: a method tuned on the text it is judged on looks better than it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_USUAL = 13  # tokens, about eight words: longer than an idiom, and still within a sentence
_SHORT = 8  # for windows below 64 tokens, where n-grams of 13 would lose 12 positions: a fifth or more
_SHORT_WINDOW = 64

Hashes = NDArray[np.uint64]


@dataclass(frozen=True)
class Overlap:
    n: int  # tokens in an n-gram
    share: float  # of the evaluation's n-grams, by occurrence, that are in the calibration samples
    matched: int
    total: int
    longest: int  # tokens of the longest passage of the evaluation whose n-grams are all in the calibration samples
    passage: tuple[int, ...]  # that passage


def overlap(calibration: Sequence[Sequence[int]], evaluation: Sequence[Sequence[int]], n: int | None = None) -> Overlap:
    """`n` is 2 or more. N-grams do not cross windows, so a passage that a window cuts in two loses n - 1 of them."""
    n = n or ngram_length(calibration, evaluation)
    known = np.unique(_hashes(*_flat(calibration), n)[0])
    ids, ends = _flat(evaluation)
    hashes, starts = _hashes(ids, ends, n)
    shared = np.isin(hashes, known)
    matched = int(shared.sum())
    start, count = _longest_sequence(starts[shared])
    longest = count + n - 1 if count else 0
    passage = tuple(ids[start : start + longest].tolist())
    return Overlap(n, matched / len(hashes) if len(hashes) else 0.0, matched, len(hashes), longest, passage)


def ngram_length(*texts: Sequence[Sequence[int]]) -> int:
    """Depends on the median window of the text with the shorter windows."""
    medians = [float(np.median([len(window) for window in text])) for text in texts if len(text)]
    return _USUAL if medians and min(medians) >= _SHORT_WINDOW else _SHORT


def _flat(windows: Sequence[Sequence[int]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """All ids in one array, and for each position where its window ends."""
    lengths = np.array([len(window) for window in windows], np.int64)
    ids = np.fromiter((token for window in windows for token in window), np.int64, int(lengths.sum()))
    return ids, np.repeat(np.cumsum(lengths), lengths)


def _hashes(ids: NDArray[np.int64], ends: NDArray[np.int64], n: int) -> tuple[Hashes, NDArray[np.int64]]:
    """A 64-bit hash of every n-gram within a window, and where each starts. The chance of a false match among two million is 1e-7."""
    starts = np.flatnonzero(np.arange(len(ids)) + n <= ends)
    hashes = np.zeros(len(starts), np.uint64)
    for place in range(n):
        hashes = _mix(hashes + ids[starts + place].astype(np.uint64) + np.uint64(1))
    return hashes, starts


def _mix(x: Hashes) -> Hashes:
    """A bijection that spreads every bit over all others: it multiplies by odd numbers and folds the high half down."""
    x = x * np.uint64(0x9E3779B97F4A7C15)
    x ^= x >> np.uint64(32)
    x = x * np.uint64(0xD6E8FEB86659FD93)
    return x ^ (x >> np.uint64(32))


def _longest_sequence(starts: NDArray[np.int64]) -> tuple[int, int]:
    """(first, length) of the longest sequence of successive numbers; (0, 0) for none."""
    if not len(starts):
        return 0, 0
    breaks = np.flatnonzero(np.diff(starts) != 1) + 1
    bounds = np.concatenate([[0], breaks, [len(starts)]])
    best = int(np.diff(bounds).argmax())
    return int(starts[bounds[best]]), int(bounds[best + 1] - bounds[best])
