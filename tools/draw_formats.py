"""Draw every format's layout, bit by bit, into docs/formats.md.

Nothing is described by hand: each bit of a packed block is flipped in turn and `unpack` is asked what changed. The page can
therefore not say anything else than the code does; a test makes it anew and compares.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fewbits import formats, targets
from fewbits.formats import Format
from fewbits.formats.storage.codebooks import Points, bits_of
from fewbits.model.weights import Weight

if TYPE_CHECKING:
    from fewbits.formats import Parts

PAGE = Path(__file__).resolve().parent.parent / "docs" / "formats.md"
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # to compare floats bit by bit
_INTEGERS = {"q", "point", "negative", "down", "sub", "sub_min", "zeros"}  # entries that are integers, not bits of floats


@dataclass(frozen=True)
class Field:
    """Some bits of one byte: which bits of which entry they hold. Of a byte that mixes several codes, `index` is all of them."""

    low: int
    high: int
    name: str
    index: int | tuple[int, ...]
    bit: int  # of the entry, at `low`
    step: int = 0  # of the index from byte to byte


def changes(fmt: Format, parts: Parts, base: dict[str, Tensor]) -> list[tuple[str, int, int]]:
    """(entry's name, index, bit) of everything that differs from the unpacked zeros; bit -1: more than one bit differs."""
    changed = []
    for name, values in entries(fmt, parts).items():
        for index in (values != base[name]).nonzero().flatten().tolist():
            now, before = int(values[index]), int(base[name][index])
            size = abs(now - before) if name in _INTEGERS else (now ^ before) & ((1 << 8 * values.element_size()) - 1)
            changed.append((name, index, size.bit_length() - 1 if size & (size - 1) == 0 else -1))
    return changed


def entries(fmt: Format, parts: Parts) -> dict[str, Tensor]:
    """Codes (as `q`) and grid as flat integers: integers by value, floats by their bits."""
    codes, grid = fmt.unpack(parts)
    if isinstance(fmt.codebook, Points):
        down = {"down": (grid["shift"] < 0).int().flatten()} if "shift" in grid else {}
        return {**_of_points(fmt.codebook, codes), "sub": grid["sub"].flatten(), **down, "d": grid["d"].view(torch.int16).flatten()}
    return {name: (v.view(_WORDS[v.element_size()]) if v.is_floating_point() else v).flatten() for name, v in {"q": codes, **grid}.items()}


def _of_points(book: Points, codes: Tensor) -> dict[str, Tensor]:
    """Numbers of points, the signs that are stored, and shifts, each as a list over the row."""
    mask, above = (1 << book.index_bits) - 1, codes >> (book.points * book.index_bits)
    points = torch.stack([(codes >> (i * book.index_bits)) & mask for i in range(book.points)], -1).flatten()
    if book.signs == "in the points":
        return {"point": points} | ({"down": above.flatten()} if book.shifts else {})
    signs = bits_of(above, book.dimension)
    if book.signs == "even":
        signs[..., -1] = 0  # it follows from the others
    return {"point": points, "negative": signs.flatten()}


def bytes_of_part(fmt: Format, columns: int, part: str) -> list[list[Field]]:
    """What each byte of this part holds, for one row of `columns`."""
    specs = fmt.parts((1, columns))
    zeros = {k: torch.zeros(s.shape, dtype=getattr(torch, s.dtype)) for k, s in specs.items()}
    base = entries(fmt, zeros)
    layout = []
    for byte in range(specs[part].nbytes):
        bits = []
        for bit in range(8):
            flipped = {k: v.clone() for k, v in zeros.items()}
            flipped[part].view(torch.uint8).view(-1)[byte] = 1 << bit
            bits.append(changes(fmt, flipped, base))
        layout.append(fields(bits))
    return layout


def fields(bits: list[list[tuple[str, int, int]]]) -> list[Field]:
    """Neighbouring bits of one entry as one field."""
    if any(len(changed) > 1 or any(bit < 0 for _, _, bit in changed) for changed in bits):
        mixed = sorted({(name, index) for changed in bits for name, index, _ in changed})
        return [Field(0, 7, mixed[0][0], tuple(index for _, index in mixed), -1)]
    made: list[Field] = []
    for place, changed in enumerate(bits):
        name, index, bit = changed[0] if changed else ("unused", 0, 0)
        last = made[-1] if made else None
        joins = last and (last.name, last.index) == (name, index) and (name == "unused" or last.bit + place - last.low == bit)
        if last and joins:
            made[-1] = replace(last, high=place)
        else:
            made.append(Field(place, place, name, index, bit))
    return made


@dataclass(frozen=True)
class Run:
    """`repeats` groups of neighbouring bytes, alike but for indices that grow evenly."""

    first: int
    repeats: int
    group: list[list[Field]]  # of the first group, with their steps

    @property
    def last(self) -> int:
        return self.first + self.repeats * len(self.group) - 1


def merged(layout: list[list[Field]]) -> list[Run]:
    """From each place on, the longest run of single bytes; where there is none of four, the grouping that covers most."""
    runs: list[Run] = []
    while (at := runs[-1].last + 1 if runs else 0) < len(layout):
        single = _run(layout, at, 1)
        groups = [_run(layout, at, period) for period in range(2, 8) if at + period <= len(layout)] if single.repeats < 4 else []
        runs.append(max([single, *(g for g in groups if g.repeats > 2)], key=lambda run: (run.last, -len(run.group))))
    return runs


def _run(layout: list[list[Field]], at: int, period: int) -> Run:
    group, repeats = layout[at : at + period], 1
    while at + (repeats + 1) * period <= len(layout):
        following = layout[at + repeats * period : at + (repeats + 1) * period]
        stepped = [_stepped(a, b, repeats) for a, b in zip(group, following, strict=True)]
        if any(fields is None for fields in stepped):
            break
        group, repeats = [fields for fields in stepped if fields is not None], repeats + 1
    return Run(at, repeats, group)


def _stepped(start: list[Field], later: list[Field], steps: int) -> list[Field] | None:
    """`start` with the step that makes it `later` after so many steps; None if no step does."""
    if [(f.low, f.high, f.name) for f in start] != [(f.low, f.high, f.name) for f in later]:
        return None
    grown = []
    for a, b in zip(start, later, strict=True):
        first, second = (f.index if isinstance(f.index, tuple) else (f.index,) for f in (a, b))
        moved = {y - x for x, y in zip(first, second, strict=False)}
        next_byte_of_entry = a.high - a.low == 7 and moved == {0} and b.bit == a.bit + 8 * steps
        if len(first) != len(second) or len(moved) != 1 or not (a.bit == b.bit or next_byte_of_entry):
            return None
        step = moved.pop()
        if step != steps * (step // steps) or (steps > 1 and step // steps != a.step):
            return None
        grown.append(replace(a, step=step // steps))
    return grown


def drawn(fmt: Format) -> list[str]:
    columns = max(fmt.block, fmt.group or 8, 8)
    lines = []
    for part, spec in fmt.parts((1, columns)).items():
        lines.append(
            f"{part}: {spec.dtype}, {spec.nbytes} bytes" + (" for the whole weight" if fmt.tensor_wide and spec.shape == (1, 1) else "")
        )
        for run in merged(bytes_of_part(fmt, columns, part)):
            where = f"byte {run.first}" if run.first == run.last else f"bytes {run.first}-{run.last}"
            if len(run.group) > 1:
                lines.append(f"  {where}, in groups of {len(run.group)}")
            for place, held in enumerate(run.group):
                label = where if len(run.group) == 1 else f"  + {place}"
                texts = [_text(f, run.repeats - 1) for f in held]
                rows = ["   ".join(texts[start : start + 4]) for start in range(0, len(texts), 4)]
                lines += [f"  {'' if number else label:<14}  {row}" for number, row in enumerate(rows)]
    return lines


def _text(field: Field, steps: int) -> str:
    if field.name == "unused":
        return f"bits {field.low}-{field.high}: unused"
    if isinstance(field.index, tuple):
        indices = ", ".join(str(i) for i in field.index)
        return f"{field.name}[{indices}] together" + (f", then {field.step:+d} each byte" if steps else "")
    last = field.index + field.step * steps
    which = (
        f"[{field.index}..{last}]"
        if abs(field.step) == 1
        else f"[{field.index}]"
        if not field.step
        else f"[{field.index}..{last} by {field.step}]"
    )
    place = (
        "" if (field.low, field.high) == (0, 7) else f"bits {field.low}-{field.high}: " if field.low < field.high else f"bit {field.low}: "
    )
    width = field.high - field.low
    of_entry = f" bits {field.bit}-{field.bit + width}" if width and field.bit else f" bit {field.bit}" if not width else ""
    return f"{place}{field.name}{which}{of_entry}"


INTRODUCTION = """# Formats

Made by `python tools/draw_formats.py`, which flips every bit of a packed block and asks the code what it changed.

Every quantized format decodes to `scale * level[q] + offset`. `q` are the codes of one row in column order; other names are
entries of the format's grid (`d`, `scales`, `sub` ...), from which the scale and the offset of each column follow. Layouts
are shown for one block of one row, bit 0 the lowest. Bits per weight are those of a 4096 x 4096 weight.

Where a code stands for several columns it is drawn as what it is made of: the numbers of `point`s in the codebook, which columns are
`negative`, which vectors or groups are shifted `down`. There the integers `sub` are odd: their lowest bit is not stored.

The K of `q4_k` and its kin stands for super-blocks of 256 columns, whose sub-block scales are small integers under one
float16. There is no k-means in it.
"""


def page() -> str:
    weight = Weight("any", (4096, 4096), "mlp", "fp16")
    out = [INTRODUCTION]
    for fmt in formats.all().values():
        kinds = [replace(weight, dtype=dtype) for dtype in ("fp16", "bf16")]  # MLX has scales in the type of the model
        carriers = [
            name
            for name, target in targets.all().items()
            if target.runtime != "torch" and any(target.accepts(each, fmt) is None for each in kinds)
        ]
        where = ", ".join(carriers) or "fewbits artifacts only"
        out.append(f"## {fmt.name}\n")
        head = f"{fmt.about}. {fmt.bits_per_weight(weight.shape):.4g} bits per weight. Carried by: {where}."
        if fmt.is_cast:
            out.append(f"{head} Values as they are, no codes.\n")
            continue
        shared = f"{fmt.group} columns" if fmt.group else "the whole weight" if fmt.tensor_wide else "a row"
        out.append(f"{head} One scale for {shared}. {_codes(fmt)}.\n")
        out.append("```text\n" + "\n".join(drawn(fmt)) + "\n```\n")
    return "\n".join(out)


def _codes(fmt: Format) -> str:
    """What a code stands for."""
    if fmt.levels is not None:
        return f"Levels: {_levels(fmt.levels)}"
    book = fmt.codebook
    assert isinstance(book, Points)
    count, width = book.table.grid.shape
    together = f"{book.points} of them" if book.points > 1 else "one of them"
    shifts = f", and a shift of {' or '.join(f'{shift:+g}' for shift in book.shifts)}" if book.shifts else ""
    signs = {"free": ", and a sign for each", "even": ", and signs of which an even number is negative", "in the points": ""}[book.signs]
    values = ", ".join(f"{level:g}" for level in book.table.levels)
    return f"A code stands for {fmt.dimension} columns: {together} out of {count} points of {width} values ({values}){signs}{shifts}"


def _levels(levels: tuple[float, ...]) -> str:
    finite = [x for x in levels if math.isfinite(x)]
    return ", ".join(f"{x:g}" for x in levels) if len(levels) <= 16 else f"{len(set(finite))} from {min(finite):g} to {max(finite):g}"


if __name__ == "__main__":
    PAGE.write_text(page())
