"""Limits on what a model file says about itself, checked before anything is built from it.

From the numbers of a config transformers makes lists, modules and tensors. A damaged or hostile one could ask for a billion blocks and
take days or terabytes; a file with three hundred tensors cannot hold them, so such numbers are refused by name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fewbits.errors import InputError

TENSORS = 1 << 16  # tensors in a GGUF, and keys: each takes a kilobyte of memory
ITEMS = 1_600_000  # in all arrays of a GGUF: 262,144 tokens, their scores and types, and half a million merges are 1.3 million
HEADER = 32 << 20  # bytes of a GGUF before its tensors: the arrays above take 16 MB
_BLOCKS = 1000  # a module of so many is built within a second, whether the file has their tensors or not
_PIECES = 50_000  # modules and parameters of one model: a thousand blocks have 21,000
_PIECES_EACH = 16  # modules and parameters for every tensor of the file
_GAP = 1 << 16  # the largest id of a vocabulary may be this much above twice the number of its tokens
_EXPERTS = 1 << 14  # in a block: as many as Doge has
_COUNT = 1 << 16  # of anything else that is counted: heads, labels
_LARGEST = 1 << 31  # of any size: a larger dimension overflows somewhere
_ID = re.compile(r"_ids?$|_idx$|token_index$|^label2id\.|\.label2id\.")
_LAYERS = re.compile(r"^(?!vocab).*layer|block_count|block_sizes|(^|_)depths?$|attention_types")
_FROM_BEHIND = re.compile("feature|select|vision_layer")  # which layer's output is used: -1 is the last
_COUNTS = re.compile(r"heads|head_count|n_head|image|patch|kernel|grid")
_SIZES = re.compile(
    r"size|dim|head|vocab|channel|embd|embed|length|position|rank|width|inner|ctx|factor|hidden|model|ffn"
    r"|theta|base|freq|seed|window|param|token|max|total|seq|chunk|scal|step|time|version|pixel|rate|sample"
)  # the second line: numbers that are not sizes and may be as large
_HINT = "no honest file says so: do not trust it"


def check(config: Mapping[str, Any], tensors: int, path: Path) -> None:
    """Checks every number of a model's config; the file beside it has `tensors` tensors."""
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
    """Least and largest value for a key. A key that is not known to be a size is taken for a count, since transformers makes a list
    of most counts."""
    if _LAYERS.search(key):
        return -_BLOCKS if _FROM_BEHIND.search(key) else 0, max(_BLOCKS, tensors)
    if "expert" in key and not re.search("size|dim|width", key):
        return -_LARGEST, _EXPERTS
    if _COUNTS.search(key):
        return -_LARGEST, _COUNT
    return -_LARGEST, _LARGEST if _SIZES.search(key) else _COUNT


@contextmanager
def building(tensors: int) -> Iterator[None]:
    """While entered, building a module for a file of `tensors` tensors ends with a ValueError when it has too many modules and parameters.
    Counts multiply (experts by blocks), so each may be within its limit and the product far beyond."""
    from torch.nn.modules import module

    most, pieces = max(_PIECES, _PIECES_EACH * tensors), 0

    def count(*_: object) -> None:
        nonlocal pieces
        pieces += 1
        if pieces > most:
            raise ValueError(f"more than {most:,} modules and parameters for {tensors:,} tensors")

    hooks = [module.register_module_module_registration_hook(count), module.register_module_parameter_registration_hook(count)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def check_vocabulary(content: Any, path: Path) -> None:
    """Checks that the ids in a tokenizer.json have no large gaps: a list of tokens by id has an entry for every id below the largest."""
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
    """(path of keys, number) for every number; of a list of integers only the least and the largest. Without recursion, because a
    hostile file may nest as deep as it likes."""
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
