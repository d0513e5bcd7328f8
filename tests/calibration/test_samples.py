"""Documents in, samples out: packed, drawn by share, the same for the same seed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from articles import articles, write

from fewbits import embedded
from fewbits.calibration.text import samples as data
from fewbits.calibration.text import windows
from fewbits.calibration.text.documents import Document, documents
from fewbits.calibration.text.samples import sample
from fewbits.errors import InputError
from fewbits.model.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(embedded.MODEL)


class Remembering:
    """The tokenizer, asked once for each text: draws by many seeds are about the draw."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.eos_token_id = tokenizer, tokenizer.eos_token_id
        self.known: dict[str, list[int]] = {}

    def __call__(self, text: str | list[str], add_special_tokens: bool = True, verbose: bool = True) -> Any:
        if isinstance(text, str):
            return self.tokenizer(text)
        for one in set(text) - set(self.known):
            self.known[one] = self.tokenizer(one, add_special_tokens=add_special_tokens, verbose=verbose).input_ids
        return SimpleNamespace(input_ids=[self.known[one] for one in text])


def made(*texts_of_sources: tuple[str, str]) -> list[Document]:
    return [Document(source, text) for source, text in texts_of_sources]


def packed_slowly(given: Sequence[Document], tokenizer: Any, length: int) -> list[tuple[tuple[int, ...], str]]:
    stream: list[tuple[int, str]] = []
    for document in given:
        ids = tokenizer.encode(document.text, add_special_tokens=False, verbose=False)
        if stream and ids:
            stream.append((tokenizer.eos_token_id, stream[-1][1]))
        stream += [(token, document.source) for token in ids]
    windows = []
    while len(stream) >= length - 1:
        window, stream = stream[: length - 1], stream[length - 1 :]
        mostly = Counter(source for _, source in window).most_common(1)[0][0]
        windows.append(((tokenizer.bos_token_id, *(token for token, _ in window)), mostly))
    return windows


@pytest.mark.parametrize("length", [2, 17, 128])
def test_packing_equals_its_slow_twin(length: int, tokenizer: Any) -> None:
    given = [*articles(10, "a"), Document("a", ""), *articles(7, "b", 900), *articles(1, "c", 2000), *articles(3, "d", 700)]
    samples = sample(given, tokenizer, count=10**6, length=length)
    assert sorted(zip(samples.ids, samples.sources, strict=True)) == sorted(packed_slowly(given, tokenizer, length))
    assert samples.documents == 22


def test_one_text_packs_as_the_verification_text_does(tmp_path: Path, tokenizer: Any) -> None:
    text = embedded.calibration_text()[:60_000]
    samples = sample(documents([write(tmp_path / "a.txt", text)], tokenizer), tokenizer, length=128)
    assert sorted(map(list, samples.ids)) == sorted(windows.windows(text, tokenizer, 128))
    assert any("512 were asked for" in note for note in samples.notes)


def test_pieces_of_one_document_are_joined_without_an_end_between(tokenizer: Any) -> None:
    parts = [Document("a", "one two\n"), Document("a", "three four\n", continues=True), Document("a", "five")]
    (ids,) = sample(parts, tokenizer, length=2 + sum(len(tokenizer(p.text).input_ids) - 1 for p in parts)).ids
    assert tokenizer.decode(ids) == "<|bos|>one two\nthree four\n<|eos|>five"


def test_a_beginning_or_end_that_the_template_wrote_is_not_doubled(tokenizer: Any) -> None:
    given = made(("a", "<|bos|>one<|eos|>"), ("a", "<|bos|>two<|eos|>"))
    ids = sample(given, tokenizer, length="data").ids
    assert sorted(map(tokenizer.decode, ids)) == ["<|bos|>one<|eos|>", "<|bos|>two<|eos|>"]
    size = sum(map(len, ids)) - 1
    assert [tokenizer.decode(ids) for ids in sample(given, tokenizer, length=size).ids] == ["<|bos|>one<|eos|>two<|eos|>"]


def test_lengths_from_the_data(tokenizer: Any) -> None:
    given = [*articles(30, "a"), Document("a", "x"), Document("a", "")]
    samples = sample(given, tokenizer, length="data", longest=64)
    wanted = [tuple(tokenizer(document.text).input_ids[:64]) for document in given]
    assert sorted(samples.ids) == sorted(ids for ids in wanted if len(ids) > 2)
    assert "2 documents of 32 dropped: shorter than 2 tokens" in samples.notes
    long = sum(len(tokenizer(document.text).input_ids) > 64 for document in given)
    assert f"{long} documents cut to 64 tokens" in samples.notes


def test_the_same_seed_gives_the_same_samples_and_another_gives_others(tokenizer: Any) -> None:
    given = [*articles(60, "a"), *articles(60, "b", 900)]
    first, again, other = (sample(given, tokenizer, 20, 32, seed) for seed in (3, 3, 4))
    assert first == again
    assert other.digest != first.digest and set(other.ids) != set(first.ids)
    pool = set(sample(given, tokenizer, 10**6, 32).ids)
    assert set(first.ids) <= pool and len(first.ids) == 20 == len(set(first.ids))
    # Written down once: the draw must not depend on Python's or numpy's generators, or on the hash seed of the process.
    assert first.digest == "06ee4debdf5ededda05307677c4a5f5a1c8616bb626a02e87ec369b074c9f4df"


def test_a_small_source_keeps_its_share(tokenizer: Any) -> None:
    tokenizer = Remembering(tokenizer)
    given = [*articles(150, "big"), *articles(15, "small", 500), *articles(2, "tiny", 30)]
    everything = Counter(sample(given, tokenizer, 10**6, 32).sources)
    total = sum(everything.values())
    assert everything["tiny"] * 50 < total  # less than one of fifty: lost more often than not if left to chance
    for seed in range(20):
        drawn = Counter(sample(given, tokenizer, 50, 32, seed).sources)
        assert drawn.total() == 50 and drawn["tiny"] == 1
        for source in ("big", "small"):
            assert abs(drawn[source] - 50 * everything[source] / total) < 2  # rounded, and one given to the tiny source


def test_with_more_sources_than_samples_each_is_drawn_by_its_share(tokenizer: Any) -> None:
    tokenizer = Remembering(tokenizer)
    given = [Document(f"{i}", articles(1, "", 40 * i)[0].text * (40 if i < 10 else 8)) for i in range(60)]
    big = 0
    for seed in range(60):
        drawn = sample(given, tokenizer, 12, 16, seed).sources
        assert len(drawn) == 12
        big += sum(int(source) < 10 for source in drawn)
    pool = Counter(int(source) < 10 for source in sample(given, tokenizer, 10**6, 16).sources)
    expected = pool[True] / pool.total()
    # Systematic draws vary less than independent ones; five standard errors of the latter.
    assert abs(big / 720 - expected) < 5 * (expected * (1 - expected) / 720) ** 0.5


def test_of_a_big_corpus_only_a_part_is_tokenized_and_shares_hold(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "_FEWEST", 60_000)
    big, small = articles(900, "big"), articles(30, "small", 500)
    seen: list[int] = []

    class Counting:
        eos_token_id = tokenizer.eos_token_id

        def __call__(self, text: Any, **options: Any) -> Any:
            seen.append(sum(map(len, text)))
            return tokenizer(text, **options)

    samples = sample([*big, *small], Counting(), 40, 32)
    whole = {name: sum(len(document.text) for document in group) for name, group in {"big": big, "small": small}.items()}
    assert sum(seen) <= 60_000 * 5 / 4 < whole["big"]
    assert any("million characters used" in note for note in samples.notes)
    drawn = Counter(samples.sources)
    wanted = 40 * whole["small"] / sum(whole.values())
    assert abs(drawn["small"] - wanted) < 2  # characters stand for tokens here: a few per cent of `wanted`, and rounding
    assert samples == sample([*big, *small], tokenizer, 40, 32)


def test_a_crowd_of_small_sources_does_not_fill_the_memory() -> None:
    shelf = data._Shelf(0, 0)
    shelf.room = shelf._limit = 20_000
    for i in range(3000):
        shelf.add(Document(f"file {i}", "x" * 100))
        if i % 10 == 0:
            shelf.add(Document("big", "y" * 1000))
    kept = [document for _, document in shelf.in_order()]
    assert sum(len(document.text) for document in kept) <= 25_000
    weights = shelf.weights()
    stands_for = Counter({"big": 0.0, "small": 0.0})
    for document in kept:
        stands_for["big" if document.source == "big" else "small"] += len(document.text) * weights[document.source]
    assert stands_for["big"] == pytest.approx(300_000) and stands_for["small"] == pytest.approx(300_000)
    late = sum(int(document.source[5:]) >= 1500 for document in kept if document.source != "big")
    early = sum(document.source != "big" for document in kept) - late
    assert abs(late - early) < 5 * (late + early) ** 0.5  # as many from the second half as from the first


@pytest.mark.parametrize(
    "options", [{"count": 0}, {"length": 1}, {"length": 1024, "longest": 512}, {"length": 400}, {"length": "data", "text": "x"}]
)
def test_a_request_that_cannot_be_met_is_refused(options: dict[str, Any], tokenizer: Any) -> None:
    text = options.pop("text", "a few words")
    with pytest.raises(InputError) as caught:
        sample(made(("a", text)), tokenizer, **options)
    assert caught.value.hint
