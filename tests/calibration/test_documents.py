"""Files in, documents out; what cannot be read is named."""

from __future__ import annotations

import gzip
import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from articles import write

from fewbits import embedded
from fewbits.calibration.text import documents as reading
from fewbits.calibration.text.documents import documents
from fewbits.calibration.text.samples import sample
from fewbits.errors import InputError, MissingError
from fewbits.model.tokenizer import load_tokenizer

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
TURNS = [{"role": "user", "content": "What is a list?"}, {"role": "assistant", "content": "A sequence."}]
CHAT = "<user>What is a list?\n<assistant>A sequence.\n"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(embedded.MODEL)


@pytest.fixture(scope="module")
def chat_tokenizer() -> Any:
    tokenizer = load_tokenizer(embedded.MODEL)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def lines(*records: Any) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def read(path: str | Path, tokenizer: Any) -> list[tuple[str, str]]:
    return [(document.source, document.text) for document in documents([path], tokenizer)]


def complaint(path: str | Path, tokenizer: Any) -> InputError:
    with pytest.raises(InputError) as caught:
        list(documents([path], tokenizer))
    assert caught.value.hint
    return caught.value


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
        ("a.json", '[\n{"text": "x"}\n{"text": "y"}]', "a.json:3: not JSON: Unexpected symbol '{'"),
        ("a.json", '[{"text": "x"},\n{"no": 1}]', "a.json:2: neither"),
        ("a.json", '[{"text": "x"}]\n\nmore', "a.json:3: not JSON: Additional data found"),
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
    strict = load_tokenizer(embedded.MODEL)
    strict.chat_template = "{{ raise_exception('roles must alternate') }}"
    assert "a.jsonl:2: the model's chat template refuses the messages: roles must alternate" in str(complaint(path, strict))
