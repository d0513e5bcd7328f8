"""The rooms of the house and who imports whom, from the real import graph: docs/rooms.svg. `--check` says whether it is up to date.

A row imports the columns that are marked in it. Rooms are in the order of the layers in pyproject.toml, so a mark right of the diagonal
would be an import of a higher room.
"""

from __future__ import annotations

import sys
import tomllib
from html import escape
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "rooms.svg"
CELL, LEFT, TOP = 22, 120, 110


def rooms() -> list[str]:
    """From the lowest to the highest."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    return [room.strip() for layer in reversed(layers) for room in layer.split("|")]


def imports() -> set[tuple[str, str]]:
    """Which room imports which."""
    graph = grimp.build_graph("fewbits", exclude_type_checking_imports=True, cache_dir=None)
    pairs = set()
    for importer in graph.modules:
        for imported in graph.find_modules_directly_imported_by(importer):
            a, b = (module.partition(".")[2].partition(".")[0] for module in (importer, imported))
            if a and b and a != b:
                pairs.add((a, b))
    return pairs


def draw(names: list[str], pairs: set[tuple[str, str]]) -> str:
    size = CELL * len(names)
    width, height = LEFT + size + 8, TOP + size + 8
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for row, importer in enumerate(names):
        y = TOP + CELL * row
        parts.append(f'<text x="{LEFT - 8}" y="{y + 15}" text-anchor="end">{escape(importer)}</text>')
        x = LEFT + CELL * row
        parts.append(f'<text transform="translate({x + 15} {TOP - 8}) rotate(-60)">{escape(importer)}</text>')
        parts.append(f'<rect x="{x}" y="{y}" width="{CELL}" height="{CELL}" fill="#ddd"/>')
        for column, imported in enumerate(names):
            if (importer, imported) in pairs:
                shade = "#b00" if column > row else "#1450a0"
                place = f'x="{LEFT + CELL * column}" y="{y}" width="{CELL}" height="{CELL}"'
                parts.append(f'<rect {place} fill="{shade}"><title>{importer} imports {imported}</title></rect>')
    lines = "".join(
        f'<path d="M{LEFT} {TOP + CELL * i}h{size}M{LEFT + CELL * i} {TOP}v{size}" stroke="#eee"/>' for i in range(len(names) + 1)
    )
    return "\n".join([*parts[:2], lines, *parts[2:], "</svg>", ""])


def main() -> None:
    picture = draw(rooms(), imports())
    if "--check" in sys.argv[1:]:
        if not PICTURE.is_file() or PICTURE.read_text() != picture:
            sys.exit("docs/rooms.svg is not of these imports: run `python tools/draw_rooms.py`")
        return
    PICTURE.write_text(picture)
    print(f"wrote {PICTURE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
