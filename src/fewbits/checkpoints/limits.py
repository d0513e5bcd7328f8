"""What a file may say of itself before anything is built of it: sizes that would take days or terabytes are refused by name.

A config is a page of numbers, and from them transformers makes lists, modules and tensors. None of that has to be tried to know that
a billion blocks are not in a file of three hundred tensors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fewbits.errors import InputError

VALUES = 3_000_000  # of a JSON file: one takes some 64 bytes in memory, however few it has in the file
CONFIG = 300_000  # of a config.json, which is parsed again by transformers; the names of every layer of a large mixture are 50,000
TOKENIZER = 4_000_000  # 262,144 tokens and half a million merges, each a list of two, are 2.6 million
TABLES = 30_000_000  # of what has a row for every weight: a mixture of 70,000 experts in two dozen formats
TEXT = 64 << 20  # bytes of a JSON file: the tokenizer of the largest vocabulary (262,144 tokens) has 33 MB
TABLE = 512 << 20  # of a table of sensitivities, which has a row for every weight and format
_DECODED = 160 << 20  # bytes of such a text in memory
TENSORS = 1 << 16  # of a GGUF, and keys: either takes a kilobyte
ITEMS = 1_600_000  # in all its arrays: 262,144 tokens, their scores and types, and half a million merges are 1.3 million
HEADER = 32 << 20  # bytes before its tensors: these are 16 MB of texts
_BLOCKS = 1000  # that a module is built of within a second, whether their tensors are there or not
_PIECES = 50_000  # modules and parameters: a thousand blocks have 21,000
_PIECES_EACH = 16  # for every tensor of the file
_GAP = 1 << 16  # ids that a vocabulary may leave out beside as many again as it has
_EXPERTS = 1 << 14  # Doge has as many in a block
_COUNT = 1 << 16  # of whatever else: heads, labels
_LARGEST = 1 << 31  # of all sizes: a dimension beyond overflows somewhere
_ID = re.compile(r"_ids?$|_idx$|token_index$|^label2id\.|\.label2id\.")
_LAYERS = re.compile(r"^(?!vocab).*layer|block_count|block_sizes|(^|_)depths?$|attention_types")
_FROM_BEHIND = re.compile("feature|select|vision_layer")  # which layer's output is taken: -1 is the last
_COUNTS = re.compile(r"heads|head_count|n_head|image|patch|kernel|grid")
_SIZES = re.compile(
    r"size|dim|head|vocab|channel|embd|embed|length|position|rank|width|inner|ctx|factor|hidden|model|ffn"
    r"|theta|base|freq|seed|window|param|token|max|total|seq|chunk|scal|step|time|version|pixel|rate|sample"
)  # the second line: numbers that are no sizes, and may be as large
_ROOM = {",": 1, ":": 1, "[": 2, "{": 3}  # in values of 64 bytes, as Python 3.11 has them
_HINT = "no honest file says so: do not trust it"


def values_in(text: str | bytes) -> int:
    """How many values a JSON text holds, at most; one that holds others counts for the room that it takes."""
    return sum(room * (text.count(sign) if isinstance(text, str) else text.count(sign.encode())) for sign, room in _ROOM.items())


def check_decoded(content: bytes | bytearray, path: Path) -> None:
    """Of a text of the ordinary size: Python gives every letter four bytes if one needs them."""
    each = 1 if content.isascii() else 4 if content.translate(None, bytes(range(0xF0))) else 2
    if (room := each * len(content)) > max(_DECODED, len(content)):
        raise InputError(f"`{path}` is a text that takes {room:,} bytes in memory", _HINT)


def check(config: Mapping[str, Any], tensors: int, path: Path) -> None:
    """Of a model's config, beside `tensors` tensors."""
    for name, value in _numbers(config):
        if isinstance(value, float):
            if math.isnan(value):
                raise InputError(f"`{path}` says that {name} is NaN", _HINT)
            continue
        if _ID.search(name):
            continue
        least, most = _range(name.rpartition(".")[2], tensors)
        if not least <= value <= most:
            raise InputError(f"`{path}` says that {name} is {_short(value)}, which is not between {least:,} and {most:,}", _HINT)


def _range(key: str, tensors: int) -> tuple[int, int]:
    """What may be repeated so often is bounded, unless it is known to be no count: transformers makes lists of most."""
    if _LAYERS.search(key):
        return -_BLOCKS if _FROM_BEHIND.search(key) else 0, max(_BLOCKS, tensors)
    if "expert" in key and not re.search("size|dim|width", key):
        return -_LARGEST, _EXPERTS
    if _COUNTS.search(key):
        return -_LARGEST, _COUNT
    return -_LARGEST, _LARGEST if _SIZES.search(key) else _COUNT


@contextmanager
def building(tensors: int) -> Iterator[None]:
    """While a module is made for a file of `tensors` tensors: ends it with ValueError when it has become too many pieces for them.
    Counts multiply, experts by blocks, and each may be sound."""
    from torch.nn.modules import module

    most, found = max(_PIECES, _PIECES_EACH * tensors), 0

    def count(*_: object) -> None:
        nonlocal found
        found += 1
        if found > most:
            raise ValueError(f"more than {most:,} modules and parameters for {tensors:,} tensors")

    hooks = [module.register_module_module_registration_hook(count), module.register_module_parameter_registration_hook(count)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def check_vocabulary(content: Any, path: Path) -> None:
    """Of a tokenizer.json: ids without large gaps, because whoever lists tokens by id makes room for every one below the largest."""
    model = content.get("model") if isinstance(content, Mapping) else None
    vocab = model.get("vocab") if isinstance(model, Mapping) else None
    ids = list(vocab.values()) if isinstance(vocab, Mapping) else []
    added = content.get("added_tokens") if isinstance(content, Mapping) else None
    ids += [row.get("id") for row in added if isinstance(row, Mapping)] if isinstance(added, list) else []
    count = len(ids) + (len(vocab) if isinstance(vocab, list) else 0)
    most = 2 * count + _GAP
    if wrong := [number for number in ids if not isinstance(number, int) or not 0 <= number <= most]:
        raise InputError(f"`{path}` gives a token the id {wrong[0]!r}, of {count:,} tokens", _HINT)


def _numbers(content: Any) -> Iterator[tuple[str, int | float]]:
    """Every number, by the path of keys to it, of many in a list the least and the largest; without recursion, since depth is the
    file's choice."""
    pending: list[tuple[str, Any]] = [("", content)]
    while pending:
        name, value = pending.pop()
        if isinstance(value, Mapping):
            pending += [(f"{name}.{key}" if name else str(key), entry) for key, entry in value.items()]
        elif isinstance(value, list | tuple):
            whole = [entry for entry in value if type(entry) is int]
            pending += [(name, min(whole)), (name, max(whole))] if whole else []
            pending += [(name, entry) for entry in value if type(entry) is float and entry != entry]
            pending += [(name, entry) for entry in value if isinstance(entry, Mapping | list | tuple)]
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield name, value


def _short(value: int) -> str:
    return f"{value:,}" if abs(value) < 10**15 else f"{value:.3g}"
