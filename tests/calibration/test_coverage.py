"""How well samples represent a text, and what of it leaked into them: against direct counting."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from articles import articles, write

from fewbits import embedded
from fewbits.calibration.text import windows
from fewbits.calibration.text.coverage import coverage
from fewbits.calibration.text.documents import documents
from fewbits.calibration.text.overlap import overlap
from fewbits.calibration.text.samples import Samples, sample
from fewbits.model.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(embedded.MODEL)


def test_coverage_equals_direct_counting(tokenizer: Any) -> None:
    samples = sample([*articles(30, "a"), *articles(9, "b", 900)], tokenizer, length="data", longest=100)
    evaluation = windows.windows(embedded.verification_text()[:30_000], tokenizer, 64)
    found = coverage(samples, tokenizer, evaluation)
    flat = [token for ids in samples.ids for token in ids]
    wanted = Counter(token for window in evaluation for token in window)
    unseen = {token: count for token, count in wanted.items() if token not in set(flat)}
    lengths = sorted(map(len, samples.ids))
    assert (found.samples, found.tokens, found.vocabulary) == (len(samples.ids), len(flat), 2048)
    assert found.vocabulary_seen == len(set(flat)) / 2048
    assert (found.lengths.least, found.lengths.most) == (lengths[0], lengths[-1])
    for percent, value in ((50, found.lengths.median), (90, found.lengths.p90)):
        assert sum(length <= value for length in lengths) * 100 >= percent * len(lengths) > sum(length < value for length in lengths) * 100
    below = 0
    for bound, count in found.lengths.histogram:
        below += count
        assert below == sum(length <= bound for length in lengths)
    assert below == len(lengths)
    missing = found.missing_in_evaluation
    assert missing is not None and missing.occurrences == sum(unseen.values()) / wanted.total() > 0
    assert missing.distinct == len(unseen) / len(wanted)
    assert [token.count for token in missing.most_frequent] == sorted(unseen.values(), reverse=True)[:10]
    assert all(unseen[token.id] == token.count and tokenizer.decode([token.id]) == token.text for token in missing.most_frequent)
    by_source = {name: [ids for ids, source in zip(samples.ids, samples.sources, strict=True) if source == name] for name in "ab"}
    for source in found.sources:
        tokens = sum(map(len, by_source[source.name]))
        assert (source.samples, source.tokens, source.share) == (len(by_source[source.name]), tokens, tokens / len(flat))
    assert json.loads(json.dumps(found.to_dict()))["vocabulary_seen"] == found.vocabulary_seen


def overlap_slowly(calibration: Sequence[Sequence[int]], evaluation: Sequence[Sequence[int]], n: int) -> tuple[int, int, int]:
    known = {tuple(ids[i : i + n]) for ids in calibration for i in range(len(ids) - n + 1)}
    matched = total = longest = 0
    for ids in evaluation:
        run = 0
        for i in range(len(ids) - n + 1):
            inside = tuple(ids[i : i + n]) in known
            run = run + 1 if inside else 0
            longest = max(longest, run + n - 1 if run else 0)
            matched, total = matched + inside, total + 1
    return matched, total, longest


@pytest.mark.parametrize("n", [2, 3, 8, 13])
def test_overlap_equals_its_slow_twin(n: int, tokenizer: Any) -> None:
    calibration = windows.windows(embedded.calibration_text()[:100_000], tokenizer, 100)
    evaluation = [*windows.windows(embedded.verification_text()[:100_000], tokenizer, 90), calibration[3][20:70], [5, 6], []]
    found = overlap(calibration, evaluation, n)
    assert (found.matched, found.total, found.longest) == overlap_slowly(calibration, evaluation, n)
    assert found.share == found.matched / found.total and len(found.passage) == found.longest


def test_planted_verification_text_is_found(tmp_path: Path, tokenizer: Any) -> None:
    clean = "".join(f"Item {i} of the list weighs {i * i % 97} grams and is painted in colour number {i * 31 % 89}.\n" for i in range(900))
    held_out = embedded.verification_text()
    planted = write(tmp_path / "planted.txt", clean + held_out[30_000:36_000])
    evaluation = windows.windows(held_out, tokenizer, 512)
    found = coverage(sample(documents([planted], tokenizer), tokenizer), tokenizer, evaluation)
    assert found.overlap is not None and found.overlap.n == 13
    share = 6_000 / len(held_out)  # less the edges: of windows, of the plant, and of the last window that is dropped
    assert share * 0.7 < found.overlap.share < share * 1.05
    assert found.overlap.example[:60] in held_out[30_000:36_000]
    assert any("leak" in warning for warning in found.warnings)
    found = coverage(sample(documents([write(tmp_path / "clean.txt", clean)], tokenizer), tokenizer), tokenizer, evaluation)
    assert found.overlap is not None and found.overlap.share == 0 and found.overlap.example == ""
    assert not any("leak" in warning or "passage" in warning for warning in found.warnings)


def test_short_windows_are_compared_by_shorter_runs(tokenizer: Any) -> None:
    ids = windows.windows(embedded.calibration_text()[:5_000], tokenizer, 32)
    found = coverage(Samples(tuple(map(tuple, ids)), ("a",) * len(ids), 0, "", 1), tokenizer, ids)
    assert found.overlap is not None and (found.overlap.n, found.overlap.share, found.overlap.longest) == (8, 1.0, 31)


def test_warnings_say_what_is_wrong_and_only_that(tokenizer: Any) -> None:
    def warned(ids: Sequence[Sequence[int]], sources: Sequence[str], evaluation: Sequence[Sequence[int]] = ()) -> str:
        return "\n".join(coverage(Samples(tuple(map(tuple, ids)), tuple(sources), 0, "", 1), tokenizer, evaluation).warnings)

    wide = [[(17 * i + 5 * j + i * j) % 2048 for j in range(512)] for i in range(100)]
    assert warned(wide, ["a", "b"] * 50, [[7, 1, 2040] * 30]) == ""
    assert "one source, `a`" in warned(wide, ["a"] * 100)
    assert "46,080 tokens are few" in warned(wide[:90], ["a", "b"] * 45)
    narrow = [[j % 100 for j in range(512)]] * 100
    said = warned(narrow, ["a", "b"] * 50, [[50] * 90 + [1000] * 10])
    assert "4.9% of the vocabulary" in said and "10.0% of the evaluation text is tokens that calibration never saw" in said
    assert "a passage of 200 tokens is in both" in warned(wide, ["a", "b"] * 50, [wide[1][:200], [3] * 30_000])
