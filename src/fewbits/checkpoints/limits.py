"""What a file may say of itself before anything is built of it: sizes that would take days or terabytes are refused by name.

A config is a page of numbers, and from them transformers makes lists, modules and tensors. None of that has to be tried to know that
a billion blocks are not in a file of three hundred tensors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fewbits.errors import InputError

VALUES = 3_000_000  # of a JSON file: an object takes some 64 bytes in memory, however few it has in the file
_BLOCKS = 1000  # that a module is built of within a second, whether their tensors are there or not
_GAP = 1 << 16  # ids that a vocabulary may leave out beside as many again as it has
_EXPERTS = 1 << 16
_LARGEST = 1 << 31  # of all other sizes: a dimension beyond overflows somewhere
_SIZES = re.compile(r"size|dim|head|vocab|channel|embd|embed|length|position|rank|width|inner|ctx|factor")
_HINT = "no honest file says so: do not trust it"


def values_in(text: str) -> int:
    """How many values a JSON text holds, at most."""
    return sum(text.count(sign) for sign in "[{,:")


def check(config: Mapping[str, Any], tensors: int, path: Path) -> None:
    """Of a model's config, beside `tensors` tensors."""
    for name, value in _numbers(config):
        if isinstance(value, float):
            if math.isnan(value):
                raise InputError(f"`{path}` says that {name} is NaN", _HINT)
            continue
        key = name.rpartition(".")[2]
        if key.endswith(("_id", "_ids")):
            continue
        least = -_LARGEST
        if re.search("expert", key):
            most = _EXPERTS
        elif re.search(r"layer|block_count|^depth", key):
            least, most = 0, max(_BLOCKS, tensors)
        elif re.search(_SIZES, key):
            most = _LARGEST
        else:
            continue
        if not least <= value <= most:
            raise InputError(f"`{path}` says that {name} is {_short(value)}, which is not between {least:,} and {most:,}", _HINT)


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
    """Every number, by the path of keys to it; without recursion, since depth is the file's choice."""
    pending: list[tuple[str, Any]] = [("", content)]
    while pending:
        name, value = pending.pop()
        if isinstance(value, Mapping):
            pending += [(f"{name}.{key}" if name else str(key), entry) for key, entry in value.items()]
        elif isinstance(value, list | tuple):
            pending += [(name, entry) for entry in value]
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield name, value


def _short(value: int) -> str:
    return f"{value:,}" if abs(value) < 10**15 else f"{value:.3g}"
