"""A tokenizer as llama.cpp stores it (tokens, their types, and merges or scores), from a transformers tokenizer and back.

Three of llama.cpp's kinds are supported. `gpt2`: BPE over bytes, after cutting the text into words by rules that are built into
llama.cpp and only named in the file (`pre`). `llama`: BPE over characters with `▁` for a space, unknown characters as bytes, merged in
the order of scores. `bert`: the longest word pieces of words cut at spaces and punctuation; `▁` marks pieces that begin a word.
Rules are recognised by their content, never by a model's name. Rules that are not in `PRE` are refused, because llama.cpp would
silently cut by others.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fewbits.errors import InputError, UnknownKindError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
_SPACE = "\u2581"
_HINT = "choose another target, or a checkpoint with a byte-level BPE, SentencePiece BPE or WordPiece tokenizer"

# Steps that cut a text into words. GPT-2's pattern is the one built into tokenizers' ByteLevel.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGIT = r"\p{N}"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%(end)s"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%(end)s"
    r"|%(digits)s| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PRE: dict[str, tuple[tuple[str, ...], bool]] = {  # name -> (steps, whether a word that is a token as a whole skips the merges)
    "gpt-2": ((_GPT2,), False),
    "smollm": ((_DIGIT, _GPT2), False),
    "llama-bpe": ((_WORDS % r"\p{N}{1,3}",), True),
    "smaug-bpe": ((_WORDS % r"\p{N}{1,3}",), False),
    "qwen2": ((_WORDS % r"\p{N}",), False),
    "tekken": ((_CASED % {"end": "", "digits": r"\p{N}"},), True),
    "gpt-4o": ((_CASED % {"end": "(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "digits": r"\p{N}{1,3}"},), False),
}
_SAME = {  # other names that llama.cpp has for the same rules
    "gpt-2": ("phi-2", "mpt", "olmo", "jais", "trillion", "gigachat", "exaone4"),
    "smollm": ("starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
    "llama-bpe": ("llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
    "smaug-bpe": ("dbrx",),
    "qwen2": ("deepseek-r1-qwen", "kormo", "megrez", "stablelm2", "hunyuan"),
    "gpt-4o": ("llama4", "kanana2"),
}


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    model: str  # `gpt2`, `llama` or `bert`
    pre: str
    tokens: list[str]
    types: list[int]
    merges: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    special: dict[str, int] = field(default_factory=dict)  # by role, as `_ROLES` names them
    add_bos: bool
    add_eos: bool
    add_space_prefix: bool
    lowercase: bool = False  # this and the next are used by `bert` only
    strip_accents: bool = False
    chat_template: str | dict[str, str] | None = None


# llama.cpp's name of a role (`seperator` is its spelling) -> transformers'
_ROLES = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad", "cls": "cls", "seperator": "sep", "mask": "mask"}


def of(tokenizer: Any, size: int) -> Vocabulary:
    """`size`: rows of the embedding. Tokens beyond it cannot be embedded and are left out; ids without a token are marked unused."""
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise InputError("the tokenizer has no fast form (tokenizer.json)", _HINT)
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    model, added = content["model"], {row["id"]: row for row in content["added_tokens"]}
    if model["type"] not in {"BPE", "WordPiece"} or model.get("dropout"):
        raise InputError(f"the tokenizer is of type {model['type']}, which this writer does not know", _HINT)
    steps = _flat(content.get("pre_tokenizer"), "pretokenizers")
    normalizers = _flat(content.get("normalizer"), "normalizers")
    byte_level = any(step["type"] == "ByteLevel" for step in steps)
    texts = {token_id: text for text, token_id in model["vocab"].items()} | {token_id: row["content"] for token_id, row in added.items()}
    tokens, types = _texts_and_types(texts, added, size, bytes_as_tokens=not byte_level)
    special = {
        role: token_id
        for role, name in _ROLES.items()
        if (token_id := getattr(tokenizer, f"{name}_token_id", None)) is not None and token_id < size
    }
    if model["type"] == "WordPiece":
        return _word_pieces(tokenizer, content, texts, added, size, special)
    special = {role: token_id for role, token_id in special.items() if role in {"bos", "eos", "unknown", "padding"}}
    add_bos, add_eos = _ends(tokenizer, special)
    common: dict[str, Any] = {"tokens": tokens, "special": special, "add_bos": add_bos, "add_eos": add_eos}
    common["chat_template"] = tokenizer.chat_template or None
    merges = [tuple(merge.split(" ", 1)) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]]
    if byte_level:
        pre = _recognise(steps, normalizers, bool(model.get("ignore_merges")))
        return Vocabulary(model="gpt2", pre=pre, types=types, merges=[" ".join(pair) for pair in merges], add_space_prefix=False, **common)
    if not model.get("byte_fallback"):
        raise InputError("the tokenizer is BPE over characters without bytes to fall back on, which llama.cpp does not know", _HINT)
    if "unknown" in special:
        types[special["unknown"]] = UNKNOWN
    prefix = _space_prefix(steps, normalizers)
    return Vocabulary(model="llama", pre="default", types=types, scores=_scores(tokens, merges), add_space_prefix=prefix, **common)


def _word_pieces(
    tokenizer: Any, content: Any, texts: Mapping[int, str], added: Mapping[int, Any], size: int, special: dict[str, int]
) -> Vocabulary:
    """llama.cpp differs from transformers in rare cases only: it has no limit on the length of a word, and strips spacing marks too."""
    rules, model = content.get("normalizer") or {}, content["model"]
    cleans = rules.get("type") == "BertNormalizer" and rules.get("clean_text") and rules.get("handle_chinese_chars")
    if not cleans or (content.get("pre_tokenizer") or {}).get("type") != "BertPreTokenizer" or model["continuing_subword_prefix"] != "##":
        raise InputError("the tokenizer prepares text otherwise than BERT's, which is all that llama.cpp knows for word pieces", _HINT)
    plain, full = tokenizer.encode("a", add_special_tokens=False), tokenizer.encode("a")
    if "cls" not in special or "seperator" not in special or full != [special["cls"], *plain, special["seperator"]]:
        raise InputError("the tokenizer does not put a text between [CLS] and [SEP], as llama.cpp does for word pieces", _HINT)

    def marked(token_id: int, text: str) -> str:
        return text if token_id in added else text.removeprefix("##") if text.startswith("##") else _SPACE + text

    tokens, types = _texts_and_types({i: marked(i, text) for i, text in texts.items()}, added, size, bytes_as_tokens=False)
    if "unknown" in special:
        types[special["unknown"]] = UNKNOWN
    lowercase, accents = bool(rules["lowercase"]), rules["strip_accents"]
    return Vocabulary(
        model="bert",
        pre="default",
        tokens=tokens,
        types=types,
        special={"bos": special["cls"], **special},  # llama.cpp begins every text with `bos`
        add_bos=True,
        add_eos=True,
        add_space_prefix=False,
        lowercase=lowercase,
        strip_accents=lowercase if accents is None else bool(accents),
        chat_template=tokenizer.chat_template or None,
    )


def _texts_and_types(texts: Mapping[int, str], added: Mapping[int, Any], size: int, bytes_as_tokens: bool) -> tuple[list[str], list[int]]:
    tokens, types = [], []
    for token_id in range(size):
        text, row = texts.get(token_id), added.get(token_id)
        if text is None:
            text, kind = f"[PAD{token_id}]", UNUSED
        elif row is not None:
            kind = CONTROL if row["special"] else USER_DEFINED
            text = text if row["special"] else text.replace(_SPACE, " ")  # llama.cpp searches for these in the unprepared text
        else:
            kind = BYTE if bytes_as_tokens and re.fullmatch(r"<0x[0-9A-F]{2}>", text) else NORMAL
        tokens.append(text)
        types.append(kind)
    if len(set(tokens)) < size:  # llama.cpp aborts the whole process on these
        twice = Counter(tokens).most_common(1)[0][0]
        raise InputError(f"the tokenizer has two ids for `{twice}`, which llama.cpp does not allow", _HINT)
    return tokens, types


def _ends(tokenizer: Any, special: Mapping[str, int]) -> tuple[bool, bool]:
    """(add_bos, add_eos) by trial: the settings are spread over three files that may disagree."""
    plain, full = tokenizer.encode("a", add_special_tokens=False), tokenizer.encode("a")
    bos, eos = [special.get("bos")], [special.get("eos")]
    for add_bos, add_eos in ((False, False), (True, False), (False, True), (True, True)):
        if full == bos * add_bos + plain + eos * add_eos:
            return add_bos, add_eos
    raise InputError("the tokenizer puts more around a text than one token at each end, which llama.cpp cannot do", _HINT)


def _flat(step: Any, inner: str) -> list[Any]:
    if step is None:
        return []
    return [part for nested in step[inner] for part in _flat(nested, inner)] if step["type"] == "Sequence" else [step]


def _recognise(steps: list[Any], normalizers: list[Any], ignore_merges: bool) -> str:
    """The name in `PRE` of these rules. NFC is accepted although llama.cpp leaves it out: almost all text is in that form already."""
    if other := next((step["type"] for step in normalizers if step["type"] != "NFC"), None):
        raise InputError(f"the tokenizer normalizes text by {other}, which llama.cpp does not", _HINT)
    cuts = []
    for step in steps:
        match step:
            case {"type": "ByteLevel", "add_prefix_space": True}:
                raise InputError("the tokenizer puts a space before every text, which llama.cpp does not for byte-level BPE", _HINT)
            case {"type": "ByteLevel"}:
                cuts += [_GPT2] if step.get("use_regex", True) else []
            case {"type": "Digits", "individual_digits": True}:
                cuts.append(_DIGIT)
            case {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}:
                cuts.append(pattern)
            case {"type": kind}:
                cuts.append(kind)
    same = {name: skips for name, (known, skips) in PRE.items() if known == tuple(cuts)}
    if not same:
        raise InputError(f"the tokenizer cuts text by rules that are not known here: {' then '.join(cuts) or 'none'}", _HINT)
    return next((name for name, skips in same.items() if skips == ignore_merges), next(iter(same)))


def _space_prefix(steps: list[Any], normalizers: list[Any]) -> bool:
    prefix = replaced = False
    for step in normalizers + steps:
        match step:
            case {"type": "Prepend", "prepend": "\u2581"}:
                prefix = True
            case {"type": "Metaspace", "replacement": "\u2581"}:
                prefix = prefix or step.get("prepend_scheme", "always") != "never"
            case {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}:
                replaced = True
            case {"type": "Split", "pattern": {"String": " "}} if replaced:
                pass  # there is no space left to split at
            case {"type": kind}:
                raise InputError(f"the tokenizer prepares text by {kind}, which llama.cpp does not", _HINT)
    return prefix


def _scores(tokens: list[str], merges: list[tuple[str, ...]]) -> list[float]:
    """Scores that give the order of merges: llama.cpp joins the pair whose token has the highest score, transformers the earliest merge."""
    rank: dict[str, int] = {}
    for left, right in merges:
        rank.setdefault(left + right, len(rank))
    return [-float(rank.get(token, len(rank))) for token in tokens]


def add_to(writer: Any, vocabulary: Vocabulary) -> None:
    writer.add_tokenizer_model(vocabulary.model)
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(vocabulary.tokens)
    if vocabulary.model == "llama":
        writer.add_token_scores(vocabulary.scores)
    writer.add_token_types(vocabulary.types)
    if vocabulary.model == "gpt2":
        writer.add_token_merges(vocabulary.merges)
    for role, token_id in vocabulary.special.items():
        writer.add_uint32(f"tokenizer.ggml.{role}_token_id", token_id)
    writer.add_add_bos_token(vocabulary.add_bos)
    writer.add_add_eos_token(vocabulary.add_eos)
    writer.add_add_space_prefix(vocabulary.add_space_prefix)
    if vocabulary.model == "bert":
        writer.add_bool("tokenizer.ggml.normalizer.lowercase", vocabulary.lowercase)
        writer.add_bool("tokenizer.ggml.normalizer.strip_accents", vocabulary.strip_accents)
    match vocabulary.chat_template:
        case str(template):
            writer.add_chat_template(template)
        case dict(templates):
            writer.add_chat_template([{"name": name, "template": text} for name, text in templates.items()])


_BERT = {"bos": 101, "unknown": 100, "seperator": 102, "padding": 0, "mask": 103}  # ids that llama.cpp assumes where a file says nothing


def of_fields(fields: Mapping[str, Any]) -> Vocabulary:
    """From a GGUF's metadata, with llama.cpp's own defaults for what a file leaves out."""
    stored = {key.removeprefix("tokenizer.ggml."): value for key, value in fields.items() if key.startswith("tokenizer.ggml.")}
    model, pre = stored.get("model"), stored.get("pre", "default")
    if model not in {"gpt2", "llama", "bert"} or "tokens" not in stored:
        raise UnknownKindError(
            f"the file's tokenizer is of type `{model}`, which is not known here", "open the original checkpoint instead"
        )
    pre = next((name for name, others in _SAME.items() if pre in others), pre)
    if model == "gpt2" and pre not in PRE:
        hint = f"known: {', '.join(PRE)}; open the original checkpoint instead"
        raise UnknownKindError(f"the file's tokenizer cuts text by rules named `{pre}`, which are not known here", hint)
    templates = {key.rpartition(".")[2]: text for key, text in fields.items() if key.startswith("tokenizer.chat_template.")}
    default = fields.get("tokenizer.chat_template")
    return Vocabulary(
        model=model,
        pre=pre,
        tokens=stored["tokens"],
        types=stored.get("token_type") or [NORMAL] * len(stored["tokens"]),
        merges=stored.get("merges", []),
        scores=stored.get("scores", []),
        special=(_BERT if model == "bert" else {}) | {role: stored[f"{role}_token_id"] for role in _ROLES if f"{role}_token_id" in stored},
        add_bos=bool(stored.get("add_bos_token", model in {"llama", "bert"} or pre in {"llama-bpe", "tekken"})),
        add_eos=bool(stored.get("add_eos_token", model == "bert")),
        add_space_prefix=bool(stored.get("add_space_prefix", model == "llama")),
        lowercase=(lowercase := bool(stored.get("normalizer.lowercase", True))),
        strip_accents=bool(stored.get("normalizer.strip_accents", lowercase)),
        chat_template=({"default": default, **templates} if templates and default else default),
    )


def to_tokenizer(vocabulary: Vocabulary) -> Any:
    """A transformers tokenizer that gives the same ids as llama.cpp."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    tokens, types, special = vocabulary.tokens, vocabulary.types, vocabulary.special
    content = {"gpt2": _byte_level, "llama": _sentencepiece, "bert": _wordpiece}[vocabulary.model](vocabulary)
    content |= {"version": "1.0", "truncation": None, "padding": None, "post_processor": _template(vocabulary)}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    content["added_tokens"] = [
        {"id": i, "content": tokens[i], "special": kind != USER_DEFINED, **flags}
        for i, kind in enumerate(types)
        if kind in {CONTROL, USER_DEFINED, UNKNOWN}
    ]
    special = {"cls": special["bos"], **special} if vocabulary.model == "bert" else special
    roles = {f"{_ROLES[role]}_token": tokens[token_id] for role, token_id in special.items()}
    backend = Tokenizer.from_str(json.dumps(content))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **roles)
    tokenizer.chat_template = vocabulary.chat_template
    return tokenizer


def _byte_level(vocabulary: Vocabulary) -> dict[str, Any]:
    cuts, ignore_merges = PRE[vocabulary.pre]
    steps: list[dict[str, Any]] = [{"type": "Digits", "individual_digits": True} for cut in cuts if cut == _DIGIT]
    steps += [
        {"type": "Split", "pattern": {"Regex": cut}, "behavior": "Isolated", "invert": False} for cut in cuts if cut not in {_DIGIT, _GPT2}
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    steps.append({**byte_level, "use_regex": _GPT2 in cuts})
    return {
        "normalizer": None,
        "pre_tokenizer": steps[0] if len(steps) == 1 else {"type": "Sequence", "pretokenizers": steps},
        "decoder": {**byte_level, "use_regex": True},
        "model": _bpe(vocabulary, [merge.split(" ", 1) for merge in vocabulary.merges], ignore_merges=ignore_merges),
    }


def _sentencepiece(vocabulary: Vocabulary) -> dict[str, Any]:
    """The file has no merges: every way to split a token into two others becomes one, in the order of scores."""
    score = dict(zip(vocabulary.tokens, vocabulary.scores, strict=True))
    joined = [text for text, kind in zip(vocabulary.tokens, vocabulary.types, strict=True) if kind == NORMAL and len(text) > 1]
    merges = [
        [text[:i], text[i:]]
        for text in sorted(joined, key=lambda text: -score[text])
        for i in range(1, len(text))
        if text[:i] in score and text[i:] in score
    ]
    space = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    back = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    decoders = [back, {"type": "ByteFallback"}, {"type": "Fuse"}]
    normalizers: list[dict[str, Any]] = [space]
    if vocabulary.add_space_prefix:
        normalizers.insert(0, {"type": "Prepend", "prepend": _SPACE})
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _bpe(vocabulary, merges, byte_fallback=True, fuse_unk=True),
    }


def _wordpiece(vocabulary: Vocabulary) -> dict[str, Any]:
    taken = {CONTROL, USER_DEFINED, UNKNOWN}
    pairs = zip(vocabulary.tokens, vocabulary.types, strict=True)
    pieces = [text if kind in taken else text.removeprefix(_SPACE) if text.startswith(_SPACE) else f"##{text}" for text, kind in pairs]
    cleaning = {"clean_text": True, "handle_chinese_chars": True}
    casing = {"strip_accents": vocabulary.strip_accents, "lowercase": vocabulary.lowercase}
    vocab = {text: i for i, (text, kind) in enumerate(zip(pieces, vocabulary.types, strict=True)) if kind != UNUSED}
    limits = {"continuing_subword_prefix": "##", "max_input_chars_per_word": 100}
    return {
        "normalizer": {"type": "BertNormalizer", **cleaning, **casing},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {"type": "WordPiece", "unk_token": vocabulary.tokens[vocabulary.special["unknown"]], "vocab": vocab, **limits},
    }


def _bpe(vocabulary: Vocabulary, merges: list[list[str]], **settings: bool) -> dict[str, Any]:
    tokens = zip(vocabulary.tokens, vocabulary.types, strict=True)
    vocab = {text: i for i, (text, kind) in enumerate(tokens) if kind != UNUSED}
    off = {"byte_fallback": False, "fuse_unk": False, "ignore_merges": False}
    none = {"dropout": None, "continuing_subword_prefix": None, "end_of_word_suffix": None}
    unknown = vocabulary.special.get("unknown") if vocabulary.model == "llama" else None
    unk_token = None if unknown is None else vocabulary.tokens[unknown]
    return {"type": "BPE", "unk_token": unk_token, "vocab": vocab, "merges": merges, **none, **off, **settings}


def _template(vocabulary: Vocabulary) -> dict[str, Any]:
    ends = (vocabulary.add_bos, "bos"), (vocabulary.add_eos, "seperator" if vocabulary.model == "bert" else "eos")
    first, last = ([vocabulary.special[role]] if add and role in vocabulary.special else [] for add, role in ends)
    named = {i: vocabulary.tokens[i] for i in [*first, *last]}

    def piece(token_id: int) -> dict[str, Any]:
        return {"SpecialToken": {"id": named[token_id], "type_id": 0}}

    def around(*texts: str) -> list[dict[str, Any]]:
        inner = [part for text in texts for part in [*map(piece, first), {"Sequence": {"id": text, "type_id": 0}}]]
        return [*inner, *map(piece, last)]

    tokens = {text: {"id": text, "ids": [token_id], "tokens": [text]} for token_id, text in named.items()}
    return {"type": "TemplateProcessing", "single": around("A"), "pair": around("A", "B"), "special_tokens": tokens}
