"""Documents in, samples out, and what is said about them."""

from __future__ import annotations

import gzip
import io
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fewbits import embedded, model, texts
from fewbits.calibration import data
from fewbits.calibration import documents as reading
from fewbits.calibration.coverage import coverage
from fewbits.calibration.data import Document, Samples, documents, sample
from fewbits.calibration.leaks import overlap
from fewbits.errors import InputError, MissingError

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
TURNS = [{"role": "user", "content": "What is a list?"}, {"role": "assistant", "content": "A sequence."}]
CHAT = "<user>What is a list?\n<assistant>A sequence.\n"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return model.load_tokenizer(embedded.MODEL)


@pytest.fixture(scope="module")
def chat_tokenizer() -> Any:
    tokenizer = model.load_tokenizer(embedded.MODEL)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def lines(*records: Any) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def read(path: str | Path, tokenizer: Any) -> list[tuple[str, str]]:
    return [(document.source, document.text) for document in documents([path], tokenizer)]


def complaint(path: str | Path, tokenizer: Any) -> InputError:
    with pytest.raises(InputError) as caught:
        list(documents([path], tokenizer))
    assert caught.value.hint
    return caught.value


# Reading


def test_a_plain_text_is_one_document_unless_it_says_otherwise(tmp_path: Path, tokenizer: Any) -> None:
    assert read(write(tmp_path / "a.txt", "one\n\ntwo\n"), tokenizer) == [("a.txt", "one\n\ntwo\n")]
    text = "one\n<|endoftext|>\ntwo\fthree\n\n<|endoftext|>\n\n<|endoftext|>\nthe token <|endoftext|> within a line\n"
    parts = ["one\n", "two", "three\n\n", "the token <|endoftext|> within a line\n"]
    assert read(write(tmp_path / "b.md", text), tokenizer) == [("b.md", part) for part in parts]
    assert read(write(tmp_path / "c.txt", b"\xef\xbb\xbfmarked\r\nlines\r\n"), tokenizer) == [("c.txt", "marked\nlines\n")]


def test_a_long_text_comes_in_pieces_that_give_it_back(tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_PIECE", 50)
    long_line = "x" * 173 + "\n"
    first, second = "".join(f"line {i}\n" for i in range(40)) + long_line + "end\n", "next\n" * 20
    found = list(documents([write(tmp_path / "a.txt", first + "\f" + second)], tokenizer))
    starts = [i for i, document in enumerate(found) if not document.continues]
    assert len(starts) == 2 and starts[0] == 0
    assert "".join(document.text for document in found[: starts[1]]) == first
    assert "".join(document.text for document in found[starts[1] :]) == second
    assert all(len(document.text) <= 50 for document in found)
    assert all(document.text.endswith("\n") for document in found if "x" not in document.text)


def test_json_lines_and_arrays_hold_text_or_chats(tmp_path: Path, chat_tokenizer: Any) -> None:
    shared = [{"from": "human", "value": "What is a list?"}, {"from": "gpt", "value": "A sequence."}]
    records = [{"text": "plain \u2603"}, {"messages": TURNS, "id": 7}, {"conversations": shared}, {"text": None, "messages": TURNS}]
    wanted = ["plain \u2603", CHAT, CHAT, CHAT]
    for name, content in {
        "a.jsonl": lines(*records).replace("\n", "\n\n"),
        "b.json": json.dumps(records, indent=1),
        "c.json": lines(*records),
        "d.json": json.dumps(records),
    }.items():
        assert [text for _, text in read(write(tmp_path / name, content), chat_tokenizer)] == wanted, name
    packed = write(tmp_path / "e.jsonl.gz", gzip.compress(lines(*records).encode()))
    assert read(packed, chat_tokenizer) == [("e.jsonl.gz", text) for text in wanted]
    assert read(write(tmp_path / "f.json", " [ ] "), chat_tokenizer) == []


def test_parquet_gives_the_same_as_json_lines(tmp_path: Path, chat_tokenizer: Any) -> None:
    pytest.importorskip("pyarrow")
    import pyarrow
    import pyarrow.parquet

    rows = [{"text": f"row {i}", "other": i} for i in range(7)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "text.parquet", row_group_size=3)
    assert read(tmp_path / "text.parquet", chat_tokenizer) == [("text.parquet", f"row {i}") for i in range(7)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"messages": TURNS}]), tmp_path / "chat.parquet")
    assert read(tmp_path / "chat.parquet", chat_tokenizer) == [("chat.parquet", CHAT)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"prompt": "x"}]), tmp_path / "other.parquet")
    assert "`prompt`" in str(complaint(tmp_path / "other.parquet", chat_tokenizer))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"text": "x"}, {"text": None}]), tmp_path / "null.parquet")
    assert "null.parquet: row 2" in str(complaint(tmp_path / "null.parquet", chat_tokenizer))
    assert "broken.parquet" in str(complaint(write(tmp_path / "broken.parquet", "no"), chat_tokenizer))


def test_parquet_without_pyarrow_says_what_to_install(tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingError) as caught:
        read(write(tmp_path / "a.parquet", "x"), tokenizer)
    assert caught.value.hint == "pip install 'fewbits[parquet]'"


@pytest.mark.parametrize(
    ("piped", "wanted"),
    [
        ("some text\nof two lines\n", ["some text\nof two lines\n"]),
        (lines({"text": "a"}, {"text": "b"}), ["a", "b"]),
        ('{"key": 1}\n', ['{"key": 1}\n']),
    ],
    ids=["text", "json-lines", "json-that-is-no-record"],
)
def test_standard_input(piped: str, wanted: list[str], tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(piped.encode())))
    assert read("-", tokenizer) == [("stdin", text) for text in wanted]


def test_a_folder_is_read_in_order_and_says_what_it_skips(tmp_path: Path, tokenizer: Any) -> None:
    for name in ("b.txt", "a/z.txt", "a/b/c.md"):
        write(tmp_path / name, name)
    write(tmp_path / "rows.jsonl", lines({"text": "row"}))
    write(tmp_path / ".hidden", "x")
    write(tmp_path / ".git" / "config", "x")
    write(tmp_path / "latin.txt", b"good line\n" * 200_000 + b"caf\xe9")  # wrong only after the first megabyte
    write(tmp_path / "picture.bin", b"\0\1\2")
    stream = documents([tmp_path], tokenizer)
    found = [(document.source, document.text) for document in stream]
    assert found == [("a/b/c.md", "a/b/c.md"), ("a/z.txt", "a/z.txt"), ("b.txt", "b.txt"), ("rows.jsonl", "row")]
    assert stream.skipped == {"hidden": 1, "hidden folders, with all that is in them": 1, "not UTF-8 text": 2}
    notes = sample(documents([tmp_path], tokenizer), tokenizer, length=4).notes
    assert "2 files skipped: not UTF-8 text" in notes


def test_files_of_the_same_name_are_told_apart(tmp_path: Path, tokenizer: Any) -> None:
    paths = [write(tmp_path / folder / "train.txt", folder) for folder in ("code", "prose")] + [write(tmp_path / "x.txt", "x")]
    assert [document.source for document in documents(paths, tokenizer)] == ["code/train.txt", "prose/train.txt", "x.txt"]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", lines({"text": "x"}) * 16 + '{"text": \n', "a.jsonl:17: not JSON"),
        ("a.jsonl", lines({"text": "x"}, {"prompt": "y"}), "a.jsonl:2: neither `text` nor `messages` in the record, which has `prompt`"),
        ("a.jsonl", lines({"text": 5}), "a.jsonl:1: `text` must be a string, this is a number"),
        ("a.jsonl", "\n[1]\n", "a.jsonl:2: a record must be an object, this is a list"),
        ("a.jsonl", lines({"messages": []}), "a.jsonl:1: `messages` must be a list of turns, this is an empty list"),
        ("a.jsonl", lines({"messages": [{"role": "user"}]}), "a.jsonl:1: turn 1 of `messages` has no `role` and `content`"),
        ("a.jsonl", lines({"conversations": [{"from": "elf", "value": ""}]}), "a.jsonl:1: turn 1 of `conversations` is from `elf`"),
        ("a.json", '[\n{"text": "x"},\n{"text": }\n]', "a.json:3: not JSON"),
        ("a.json", '[\n{"text": "x"}\n{"text": "y"}]', "a.json:3: not JSON: a comma or `]` is missing"),
        ("a.json", '[{"text": "x"},\n{"no": 1}]', "a.json:2: neither"),
        ("a.json", '[{"text": "x"}]\n\nmore', "a.json:3: not JSON: more text after the array"),
        ("a.json", '\n\n[{"text": "x"}', "a.json:3: not JSON"),
        ("a.txt", b"fine\nfine\ncaf\xe9\n", "a.txt:3: not UTF-8 text, byte 0xe9"),
        ("a.txt.gz", b"\x1f\x8bnonsense", "`a.txt.gz` is not a whole gzip file"),
    ],
)
def test_an_error_names_file_and_line(name: str, content: str | bytes, said: str, tmp_path: Path, chat_tokenizer: Any) -> None:
    assert str(complaint(write(tmp_path / name, content), chat_tokenizer)).startswith(said)


def test_what_is_not_there_is_an_error(tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "does not exist" in str(complaint(tmp_path / "nothing.txt", tokenizer))
    assert "holds no files" in str(complaint(tmp_path, tokenizer))
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"")))
    assert "empty" in str(complaint("-", tokenizer))
    with pytest.raises(InputError):
        documents([], tokenizer)


def test_a_chat_needs_a_template_that_takes_it(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path / "a.jsonl", lines({"text": "x"}, {"messages": TURNS}))
    assert str(complaint(path, tokenizer)).startswith("a.jsonl:2: chat messages, but the model has no chat template")
    strict = model.load_tokenizer(embedded.MODEL)
    strict.chat_template = "{{ raise_exception('roles must alternate') }}"
    assert "a.jsonl:2: the model's chat template refuses the messages: roles must alternate" in str(complaint(path, strict))


# Sampling


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


def articles(number: int, source: str, start: int = 0) -> list[Document]:
    """Documents of 1 to 40 lines of the embedded text."""
    body = embedded.calibration_text().splitlines(keepends=True)
    found = []
    for i in range(number):
        size = 1 + (7 * i) % 40
        found.append(Document(source, "".join(body[start : start + size])))
        start = (start + size) % (len(body) - 50)
    return found


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
    assert sorted(map(list, samples.ids)) == sorted(texts.windows(text, tokenizer, 128))
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


# Coverage


def test_coverage_equals_direct_counting(tokenizer: Any) -> None:
    samples = sample([*articles(30, "a"), *articles(9, "b", 900)], tokenizer, length="data", longest=100)
    evaluation = texts.windows(embedded.verification_text()[:30_000], tokenizer, 64)
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
    calibration = texts.windows(embedded.calibration_text()[:100_000], tokenizer, 100)
    evaluation = [*texts.windows(embedded.verification_text()[:100_000], tokenizer, 90), calibration[3][20:70], [5, 6], []]
    found = overlap(calibration, evaluation, n)
    assert (found.matched, found.total, found.longest) == overlap_slowly(calibration, evaluation, n)
    assert found.share == found.matched / found.total and len(found.passage) == found.longest


def test_planted_verification_text_is_found(tmp_path: Path, tokenizer: Any) -> None:
    clean = "".join(f"Item {i} of the list weighs {i * i % 97} grams and is painted in colour number {i * 31 % 89}.\n" for i in range(900))
    held_out = embedded.verification_text()
    planted = write(tmp_path / "planted.txt", clean + held_out[30_000:36_000])
    evaluation = texts.windows(held_out, tokenizer, 512)
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
    windows = texts.windows(embedded.calibration_text()[:5_000], tokenizer, 32)
    found = coverage(Samples(tuple(map(tuple, windows)), ("a",) * len(windows), 0, "", 1), tokenizer, windows)
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
