"""The roofline as a picture, in one SVG file: what every product reached, below what memory and arithmetic allow."""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from fewbits.benchmarks.tables.speed import FAMILIES, duration
from fewbits.errors import InputError
from fewbits.store.files import Staged, to_json

if TYPE_CHECKING:
    from fewbits.benchmarks.speed.kernels import Case, KernelBench, Result

_WIDTH, _HEIGHT = 960, 600
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 24, 64, 64
_COLOURS = {"fewbits": "#0b6bcb", "ggml": "#d9480f", "onnxruntime": "#2b8a3e", "torch": "#868e96"}


def write(result: KernelBench, folder: Path) -> None:
    """results.json and roofline.svg."""
    if folder.is_file():
        raise InputError(f"`{folder}` is a file", "choose another `-o`")
    with Staged(folder / "results.json") as staged:
        staged.write_text(to_json(result.to_dict()))
    with Staged(folder / "roofline.svg") as staged:
        staged.write_text(draw(result))


def draw(result: KernelBench) -> str:
    points = [(_intensity(case, each), each.gigaoperations_per_second, case, each) for case in result.cases for each in _shown(case)]
    read, int8, fp32 = (result.limits.best(kind) for kind in ("read", "int8", "fp32"))
    roofs = [(f"{limit.kind} products, {limit.setting}", limit.per_second.median / 1e9) for limit in (int8, fp32) if limit]
    tops = [y for _, y, _, _ in points] + [height for _, height in roofs]
    across = _Axis([x for x, _, _, _ in points] or [1.0], _LEFT, _WIDTH - _RIGHT)
    up = _Axis([y for _, y, _, _ in points] + tops or [1.0], _HEIGHT - _BOTTOM, _TOP)
    parts = [*_frame(across, up, result)]
    if read:
        parts.extend(_roofs(across, up, read.per_second.median / 1e9, roofs))
    parts.extend(_mark(across, up, *point) for point in sorted(points, key=lambda point: _family(point[3]) == "fewbits"))
    parts.extend(_legend([name for name in _COLOURS if any(_family(each) == name for *_, each in points)]))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="system-ui, sans-serif" font-size="12">'
    return "\n".join([head, f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>', *parts, "</svg>", ""])


class _Axis:
    """A logarithmic axis over these values with some room around them, from one pixel to another."""

    def __init__(self, values: list[float], start: float, end: float) -> None:
        self.low, self.high = min(values) / 1.5, max(values) * 1.5
        self._start, self._end = start, end

    def at(self, value: float) -> float:
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return round(self._start + share * (self._end - self._start), 1)

    def ticks(self) -> Iterator[float]:
        for power in range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1):
            for digit in (1, 2, 5):
                if self.low <= (value := digit * 10.0**power) <= self.high:
                    yield value


def _frame(across: _Axis, up: _Axis, result: KernelBench) -> Iterator[str]:
    threads = result.limits.threads
    yield f'<text x="{_LEFT}" y="24" font-size="16" font-weight="600">Products with packed weights under the roofline</text>'
    where = f"{result.machine.processor}, {threads} thread{'' if threads == 1 else 's'}; each mark is a median, point at it for details"
    yield f'<text x="{_LEFT}" y="44" fill="#495057">{escape(where)}</text>'
    for value in up.ticks():
        y = up.at(value)
        yield f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}" stroke="#e9ecef"/>'
        yield f'<text x="{_LEFT - 8}" y="{y + 4}" text-anchor="end" fill="#495057">{value:g}</text>'
    for value in across.ticks():
        x = across.at(value)
        yield f'<line x1="{x}" x2="{x}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}" stroke="#e9ecef"/>'
        yield f'<text x="{x}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle" fill="#495057">{value:g}</text>'
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    label = "operations per byte of packed weight (grows with the rows of x)"
    yield f'<text x="{middle}" y="{_HEIGHT - 20}" text-anchor="middle">{label}</text>'
    y = (_TOP + _HEIGHT - _BOTTOM) / 2
    yield f'<text x="20" y="{y}" text-anchor="middle" transform="rotate(-90 20 {y})">GOP/s</text>'


def _roofs(across: _Axis, up: _Axis, read: float, roofs: list[tuple[str, float]]) -> Iterator[str]:
    """The slope of memory, up to the highest roof, and a flat line for each unit from where the slope meets it."""
    highest = max((height for _, height in roofs), default=read * across.high)
    start, end = max(across.low, up.low / read), min(across.high, highest / read)
    if start < end:
        x1, y1, x2, y2 = across.at(start), up.at(read * start), across.at(end), up.at(read * end)
        yield f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="#212529" stroke-width="1.5"/>'
        x, y = round(x1 + 0.75 * (x2 - x1), 1), round(y1 + 0.75 * (y2 - y1), 1)  # most products of one row lie further down
        angle = round(math.degrees(math.atan2(y2 - y1, x2 - x1)), 1)
        label = f"reading memory, {read:.1f} GB/s"
        yield f'<text x="{x}" y="{y - 7}" text-anchor="middle" fill="#212529" transform="rotate({angle} {x} {y})">{label}</text>'
    for name, height in roofs:
        x, y = across.at(max(across.low, min(height / read, across.high))), up.at(height)
        dash = "" if height == highest else ' stroke-dasharray="5 4"'
        yield f'<line x1="{x}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}" stroke="#212529" stroke-width="1.5"{dash}/>'
        yield f'<text x="{_WIDTH - _RIGHT - 6}" y="{y - 6}" text-anchor="end" fill="#212529">{escape(name)}, {height:.0f} GOP/s</text>'


def _mark(across: _Axis, up: _Axis, x: float, y: float, case: Case, each: Result) -> str:
    ours = _family(each) == "fewbits"
    what = f"{each.name}{' ' + case.format if ours else ''}, {case.k} x {case.n}, {case.rows} row{'' if case.rows == 1 else 's'}"
    reached = f"{y:.0f} GOP/s, {each.gigabytes_per_second:.1f} GB/s, {each.share_of_limit.median:.0%} of the limit"
    told = f"{what}: {duration(each.seconds.median)}, {reached}"
    colour = _COLOURS[_family(each)]
    fill = f'fill="{colour}" fill-opacity="0.75"' if ours else f'fill="white" fill-opacity="0.6" stroke="{colour}" stroke-width="1.5"'
    return f'<circle cx="{across.at(x)}" cy="{up.at(y)}" r="{5 if ours else 4}" {fill}><title>{escape(told)}</title></circle>'


def _legend(names: list[str]) -> Iterator[str]:
    for number, name in enumerate(names):
        y = _TOP + 20 + 18 * number
        look = f'fill="{_COLOURS[name]}"' if name == "fewbits" else f'fill="white" stroke="{_COLOURS[name]}" stroke-width="1.5"'
        yield f'<circle cx="{_LEFT + 18}" cy="{y}" r="5" {look}/><text x="{_LEFT + 30}" y="{y + 4}">{name}</text>'


def _shown(case: Case) -> list[Result]:
    """Ours, and the fastest contender of each other library."""
    return [case.ours, *(best for family in FAMILIES if (best := case.best(family)))]


def _family(each: Result) -> str:
    return each.name.split()[0]


def _intensity(case: Case, each: Result) -> float:
    return 2.0 * case.rows * case.k * case.n / each.bytes
