"""Kinds of text: what they are called, how many samples are drawn of each, how long they are, and what is refused."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from articles import write

from fewbits import calibration, embedded
from fewbits.calibration import split
from fewbits.calibration.folder import Statistics
from fewbits.calibration.text import domains
from fewbits.calibration.text.documents import documents
from fewbits.calibration.text.domains import Mix, mixed
from fewbits.calibration.text.samples import sample
from fewbits.errors import InputError
from fewbits.model import Model
from fewbits.model.tokenizer import load_tokenizer
from fewbits.model.walk import batches
from fewbits.request import Request

LINES = embedded.calibration_text().splitlines(keepends=True)
CODE = "".join(f"def f{i}(x):\n    return {i * 7 % 13} * x[{i % 5}]\n\n" for i in range(300))
BEGINNING = "{{ bos_token }}"
TEMPLATE = BEGINNING + "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}\n{% endfor %}"


@pytest.fixture
def data(tmp_path: Path) -> list[str]:
    """Ten times as much prose as code."""
    return [str(write(tmp_path / "prose.txt", "".join(LINES[:1200]))), str(write(tmp_path / "code.txt", CODE))]


def test_a_kind_is_called_as_its_file_is_or_as_it_is_named(tmp_path: Path) -> None:
    for name in ("wiki.txt", "chat.jsonl", "a/train.txt", "b/train.txt", "folder/x.txt", "e=mc2.txt"):
        write(tmp_path / name, "x")
    write(tmp_path / "news.txt.gz", gzip.compress(b"x"))
    names = ["wiki.txt", "chat.jsonl", "news.txt.gz", "a/train.txt", "b/train.txt", "folder", "e=mc2.txt"]
    called = ["wiki", "chat", "news", "a/train.txt", "b/train.txt", "folder", "e=mc2"]
    assert domains.names([tmp_path / name for name in names]) == called
    named = [f"code={tmp_path / 'a/train.txt'}", f"code={tmp_path / 'wiki.txt'}", tmp_path / "b/train.txt", "talk=-"]
    assert domains.names(named) == ["code", "train", "talk"]
    assert [each.path for each in domains.named(named)] == [str(tmp_path / p) for p in ("a/train.txt", "wiki.txt", "b/train.txt")] + ["-"]
    assert {document.domain for document in documents([tmp_path / "folder", f"x={tmp_path / 'wiki.txt'}"], None)} == {"folder", "x"}


def test_samples_without_weights_are_those_of_old(tmp_path: Path, embedded_model: Model) -> None:
    """The digests are those of the version before there were kinds of text."""
    first = write(tmp_path / "first.txt", "".join(LINES[:600]))
    write(tmp_path / "second" / "a.txt", "".join(LINES[600:900]))
    write(tmp_path / "second" / "b.txt", "".join(LINES[900:1000]))
    text = split.split(embedded_model, [first, tmp_path / "second"], (), 24, 64, 3, 512)
    assert text.samples is not None
    assert text.samples.digest == "789e73f9ca10943bef9e2fb2b5785b37852f5394750c89fe9e58e3c02cf4ab62"
    assert hashlib.sha256(repr(text.windows).encode()).hexdigest()[:16] == "c58c534a16cdf788"
    assert set(text.samples.domains) == set(text.domains) == {"first", "second"}
    assert len(text.domains) == len(text.windows)


@pytest.mark.parametrize(("weights", "counts"), [("prose=1,code=2", (10, 20)), ("code=4", (6, 24)), ("prose=1,code=1", (15, 15))])
def test_weights_are_shares_of_the_tokens(weights: str, counts: tuple[int, int], data: list[str], embedded_model: Model) -> None:
    mix, _ = mixed(weights)
    drawn = calibration.draw(embedded_model, data, 30, 32, 0, mix)
    assert Counter(drawn.domains) == {"prose": counts[0], "code": counts[1]}
    tokenizer = embedded_model.tokenizer
    for path, name in zip(data, ("prose", "code"), strict=True):  # no window has two kinds of text in it
        alone = set(sample(documents([path], tokenizer), tokenizer, 10**6, 32).ids)
        assert {ids for ids, domain in zip(drawn.ids, drawn.domains, strict=True) if domain == name} <= alone
    assert drawn == calibration.draw(embedded_model, data, 30, 32, 0, mix)
    assert drawn.digest != calibration.draw(embedded_model, data, 30, 32, 0).digest


def test_both_halves_of_the_samples_have_every_kind(data: list[str], embedded_model: Model) -> None:
    drawn = calibration.draw(embedded_model, data, 60, 32, 0, mixed("prose=1,code=1")[0])
    for half in (0, 1):
        assert min(Counter(drawn.domains[half::2]).values()) >= 8  # of 30: fewer has a chance of 1 %, and the draw is always the same


def test_some_text_of_every_kind_is_set_aside(data: list[str], embedded_model: Model) -> None:
    mix, _ = mixed("prose=30,code=1")
    text = split.split(embedded_model, data, (), 40, 32, 0, 310, mix)
    assert text.samples is not None
    assert Counter(text.domains) == {"prose": 9, "code": 1}  # 300 and 10 tokens in windows that predict 31
    assert not {tuple(window) for window in text.windows} & set(text.samples.ids)


def test_a_kind_with_too_little_text_says_so(tmp_path: Path, data: list[str], embedded_model: Model) -> None:
    mix, _ = mixed("prose=1,code=1")
    drawn = calibration.draw(embedded_model, [data[0], f"code={write(tmp_path / 'few.txt', CODE[:1000])}"], 100, 64, 0, mix)
    had = Counter(drawn.domains)
    assert had["prose"] == 50 and had["code"] < 50
    assert any(note.startswith(f"`code` gives {had['code']} samples, 50 were asked for") for note in drawn.notes)
    short = [data[0], f"code={write(tmp_path / 'short.txt', CODE[:60])}"]
    with pytest.raises(InputError, match=r"`code` has \d+ tokens, one window needs 63"):
        calibration.draw(embedded_model, short, 100, 64, 0, mix)
    with pytest.raises(InputError, match=r"`code` has \d+ tokens, one window needs 63"):
        split.held_out_text(embedded_model, short, 64, 512)


def test_a_kind_may_have_a_length_of_its_own(data: list[str], embedded_model: Model) -> None:
    mix, usual = mixed(None, "32,code=128")
    assert usual == 32
    text = split.split(embedded_model, data, (), 40, usual, 0, 1240, mix)
    assert text.samples is not None
    lengths = {domain: {len(ids)} for domain, ids in zip(text.samples.domains, text.samples.ids, strict=True)}
    assert lengths == {"prose": {32}, "code": {128}}
    assert Counter(text.samples.domains) == {"prose": 20, "code": 5}  # half of the tokens each
    assert {len(window) for window, name in zip(text.windows, text.domains, strict=True) if name == "code"} == {128}
    held = split.held_out_text(embedded_model, data, usual, 1240, mix)
    assert Counter(zip(map(len, held.windows), held.domains, strict=True)) == {(32, "prose"): 20, (128, "code"): 4}
    assert sum(batch.ids.numel() for batch in batches(text.samples.ids)) == text.samples.tokens  # nothing is padded


def test_statistics_of_other_weights_are_not_taken_for_these(data: list[str], tmp_path: Path, narrow_checkpoint: Path) -> None:
    """The text of every run is the one that its weights draw, in the same work folder."""
    from fewbits import pipeline

    digests = []
    for weights in ("prose=1,code=3", "prose=3,code=1", "prose=1,code=3"):
        pipeline.quantize(
            narrow_checkpoint,
            tmp_path / "m.gguf",
            data=data,
            weights=weights,
            format="q4_0",
            samples=8,
            length=32,
            tokens=64,
            no_verify=True,
        )
        digests.append(Statistics(tmp_path / "m.gguf.work" / "statistics").about["runs"][0]["data_sha256"])
    assert digests[0] == digests[2] != digests[1]


@pytest.mark.parametrize(
    ("weights", "length", "message"),
    [
        ("prose=1,cod=2", None, "`--weights` names `cod`, and the kinds of text are `prose`, `code`"),
        (None, "books=64", "`--length` names `books`, and the kinds of text are `prose`, `code`"),
    ],
)
def test_a_kind_that_is_not_there_is_refused(
    weights: str | None, length: str | None, message: str, data: list[str], tmp_path: Path, run: Any
) -> None:
    given = [word for path in data for word in ("--data", path)]
    given += ["--weights", weights] if weights else ["--length", length]
    for verb in (
        ("calibrate", embedded.MODEL, "-o", tmp_path / "stats"),
        ("quantize", embedded.MODEL, "-o", tmp_path / "m.gguf", "--size", "4bpw"),
    ):
        code, _, err = run(*verb, *given)
        assert code == 2 and message in err and "hint: name one" in err


@pytest.mark.parametrize("weights", ["prose", "prose=0", "prose=-1", "prose=inf", "prose=x", "=2", "prose=1,prose=2", {"prose": 0.0}])
def test_weights_that_are_none_are_refused(weights: Any) -> None:
    with pytest.raises(InputError, match="--weights"):
        mixed(weights)


@pytest.mark.parametrize("length", ["1", "x", "code=1", "code=x", "512,256", "code=64,code=32", {"code": 1}])
def test_lengths_that_are_none_are_refused(length: Any) -> None:
    with pytest.raises(InputError, match="--length"):
        mixed(None, length)


def test_weights_and_lengths_may_be_mappings() -> None:
    assert mixed({"a": 2}, {"b": 64}) == (Mix({"a": 2.0}, {"b": 64}), None) == mixed("a=2", "b=64")
    assert mixed(None, "data") == (Mix(), "data") and mixed("", 64) == (Mix(), 64) == mixed(None, "64")


def test_statistics_that_are_there_cannot_be_weighed(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="`--weights` weighs the text that is calibrated with"):
        Request(model="m", out=tmp_path / "m.gguf", size="4bpw", stats=tmp_path / "stats", weights="a=1")


def test_chats_to_judge_on_are_written_by_the_models_template(tmp_path: Path) -> None:
    from types import SimpleNamespace

    tokenizer = load_tokenizer(embedded.MODEL)
    tokenizer.chat_template = TEMPLATE
    source: Any = SimpleNamespace(tokenizer=tokenizer, config=SimpleNamespace(max_position_embeddings=512, vocab_size=2048))
    turns = [{"role": "user", "content": "What is a list? " * 5}, {"role": "assistant", "content": "A sequence of values. " * 5}]
    chat = write(tmp_path / "chat.jsonl", json.dumps({"messages": turns}) + "\n")
    judged = tokenizer.apply_chat_template(turns, tokenize=True, return_dict=False)
    assert judged[0] == tokenizer.bos_token_id
    text = split.held_out_text(source, [chat], len(judged), 1000)
    assert text.windows == [judged]  # the token that begins a window is there once
    tokenizer.chat_template = None
    with pytest.raises(InputError, match=r"chat.jsonl:1: chat messages, but the model has no chat template"):
        split.held_out_text(source, [chat], 16, 1000)
