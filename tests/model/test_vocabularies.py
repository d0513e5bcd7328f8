"""llama.cpp's own tokenizer gives the ids of the transformers tokenizer that the file was made from."""

from __future__ import annotations

import json
import pydoc_data.topics
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from bert_models import save_bert, word_pieces
from gguf_models import MODELS, needs_llama_cpp, save_random, write
from greedy import tokenize
from tokenizers import models, pre_tokenizers, trainers

from fewbits import embedded, model
from fewbits.errors import InputError
from fewbits.model.gguf import vocabularies
from fewbits.model.tokenizer import load_tokenizer
from fewbits.verification import runtimes

TEXTS = [
    *[
        "Hello world",
        " leading space",
        "   three",
        "trailing ",
        "",
        " ",
        "\n",
        "   \n  x",
        "\n\n\ttabs\r\nand\r\n",
        "a" * 50,
        "x\u00a0y\u3000z",
    ],
    *[
        "it's we'll I'VE DON'T he'd",
        "1234567890 12,345.67 3.14 ½ ²",
        "def f(x: int) -> str:\n    return f'{x:>10}'  # ok\n",
        "CamelCase HTTPServer",
    ],
    *[
        "naïve café — ünïcödé ✓",
        "你好、世界。日本語テキスト",
        "Привет, мир! Ελληνικά עברית العربية",
        "🙂🙃👩‍👩‍👧 flags 🇫🇷",
        "e\u0301 combining",
        "<b>&amp;</b> [x] {y} $z",
    ],
    *list(pydoc_data.topics.topics.values())[:6],
]


def train(folder: Path, **settings: Any) -> Any:
    """A small byte-level BPE in the place of the model's tokenizer."""
    backend = tokenizers.Tokenizer(models.BPE(ignore_merges=settings.get("ignore_merges", False)))
    backend.pre_tokenizer = settings["pre_tokenizer"]
    trainer = trainers.BpeTrainer(
        vocab_size=1500, special_tokens=["<bos>", "<eos>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator([*TEXTS, *list(pydoc_data.topics.topics.values())[:30]], trainer)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_tokens([tokenizers.AddedToken("<think>", normalized=False)])
    return save(backend, folder, bos_token="<bos>", eos_token="<eos>")


def save(backend: Any, folder: Path, **special: str) -> Any:
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **special)
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    tokenizer.save_pretrained(folder)
    return tokenizer


def split_by(pattern: str) -> Any:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"), byte_level])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = MODELS["llama"]()
    config.vocab_size = 2048
    return save_random(config, tmp_path / "tiny")


def check(tokenizer: Any, source: Path, place: Path, pre: str) -> None:
    """Through the file: transformers == llama.cpp == the tokenizer rebuilt from the file."""
    made, file = write(model.open(source), "fp16", [], place)
    assert vocabularies.of(made.tokenizer, made.config.vocab_size).pre == pre
    session = runtimes.get("llama.cpp").open(file, 64)
    rebuilt = load_tokenizer(file)
    for text in [*TEXTS, "so <think> it is"]:
        expected = tokenizer.encode(text)
        assert tokenize(session, text) == expected, text
        assert rebuilt.encode(text) == expected, text
        assert rebuilt.decode(expected) == tokenizer.decode(expected)
    assert rebuilt.chat_template == tokenizer.chat_template
    session.close()


BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False)
RULES = {
    "gpt-2": BYTE_LEVEL,
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), BYTE_LEVEL]),
    **{name: split_by(steps[0]) for name, (steps, _) in vocabularies.PRE.items() if name not in {"gpt-2", "smollm"}},
}


@needs_llama_cpp
@pytest.mark.parametrize("pre", vocabularies.PRE)
def test_byte_level_tokens_are_the_same_in_llama_cpp(pre: str, folder: Path, tmp_path: Path) -> None:
    tokenizer = train(folder, pre_tokenizer=RULES[pre], ignore_merges=vocabularies.PRE[pre][1])
    check(tokenizer, folder, tmp_path, pre)


@needs_llama_cpp
def test_the_embedded_tokenizer_is_the_same_in_llama_cpp(tmp_path: Path) -> None:
    check(transformers.AutoTokenizer.from_pretrained(embedded.MODEL), embedded.MODEL, tmp_path, "gpt-2")


@needs_llama_cpp
@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_tokens_are_the_same_in_llama_cpp(prefix: bool, folder: Path, tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    ascii_only = [text for text in pydoc_data.topics.topics.values() if text.isascii()][:30]
    backend.train_from_iterator(
        ascii_only, trainers.BpeTrainer(vocab_size=900, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    )
    learned = json.loads(backend.to_str())["model"]["vocab"]
    order = sorted(learned, key=learned.__getitem__)
    tokens = [*order[:3], *(f"<0x{byte:02X}>" for byte in range(256)), *order[3:]]
    kinds = [vocabularies.UNKNOWN, *[vocabularies.CONTROL] * 2, *[vocabularies.BYTE] * 256, *[vocabularies.NORMAL] * (len(order) - 3)]
    vocabulary = vocabularies.Vocabulary(
        model="llama",
        pre="default",
        tokens=tokens,
        types=kinds,
        scores=[-float(i) for i in range(len(tokens))],
        special={"unknown": 0, "bos": 1, "eos": 2},
        add_bos=True,
        add_eos=False,
        add_space_prefix=prefix,
        chat_template="{{ messages }}",
    )
    backend = vocabularies.to_tokenizer(vocabulary).backend_tokenizer
    if not prefix:  # as Gemma's, which has no spaces left to split at
        backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    backend.add_tokens([tokenizers.AddedToken("<think>", normalized=False)])
    tokenizer = save(backend, folder, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("the é"))[:1] == ["<s>"]
    assert "<0xC3>" in tokenizer.convert_ids_to_tokens(tokenizer.encode("the é")), "an unknown character must fall back on its bytes"
    check(tokenizer, folder, tmp_path, "default")


@needs_llama_cpp
@pytest.mark.parametrize("casing", [{"lowercase": True}, {"lowercase": False}, {"lowercase": True, "strip_accents": False}])
def test_word_pieces_are_the_same_in_llama_cpp(casing: dict[str, bool], tmp_path: Path) -> None:
    source = save_bert(tmp_path / "tiny")
    tokenizer = word_pieces(**casing)
    tokenizer.add_tokens([tokenizers.AddedToken("<think>", normalized=False)])
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.save_pretrained(source)
    strips = casing.get("strip_accents", casing["lowercase"])
    assert (tokenizer.unk_token_id in tokenizer.encode("café")) != strips  # it was trained on text without accents
    check(tokenizer, source, tmp_path, "default")


def test_word_pieces_that_are_prepared_otherwise_are_refused(tmp_path: Path) -> None:
    source = save_bert(tmp_path / "tiny")
    for part, step in (("normalizer", tokenizers.normalizers.Lowercase()), ("pre_tokenizer", pre_tokenizers.Whitespace())):
        tokenizer = transformers.AutoTokenizer.from_pretrained(source)
        setattr(tokenizer.backend_tokenizer, part, step)
        with pytest.raises(InputError, match="otherwise than BERT's"):
            vocabularies.of(tokenizer, 400)
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    tokenizer.backend_tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single="$A", special_tokens=[])
    with pytest.raises(InputError, match=r"between \[CLS\] and \[SEP\]"):
        vocabularies.of(tokenizer, 400)


def test_what_goes_around_a_text_is_seen_not_read(folder: Path) -> None:
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    single = {"<|bos|> $A <|eos|>": (True, True), "$A <|eos|>": (False, True), "$A": (False, False)}
    for template, ends in single.items():
        backend.post_processor = tokenizers.processors.TemplateProcessing(single=template, special_tokens=[("<|bos|>", 0), ("<|eos|>", 1)])
        found = vocabularies.of(save(backend, folder, bos_token="<|bos|>", eos_token="<|eos|>"), 2048)
        assert (found.add_bos, found.add_eos) == ends


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (split_by(r"\w+|\W+"), "rules that are not known here"),
        (pre_tokenizers.ByteLevel(add_prefix_space=True), "puts a space before every text"),
        (pre_tokenizers.Sequence([pre_tokenizers.Punctuation(), BYTE_LEVEL]), "Punctuation then"),
    ],
)
def test_rules_that_llama_cpp_does_not_have_are_refused(step: Any, reason: str, folder: Path) -> None:
    with pytest.raises(InputError, match=reason):
        vocabularies.of(train(folder, pre_tokenizer=step), 2048)


def test_two_ids_for_one_text_are_refused_before_llama_cpp_aborts(folder: Path) -> None:
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.add_tokens(["[PAD2049]"])  # the name that id 2049, which has no token, would get
    with pytest.raises(InputError, match=r"two ids for `\[PAD2049\]`"):
        vocabularies.of(save(backend, folder, bos_token="<|bos|>"), 2050)
