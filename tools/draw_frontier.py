"""Draw the README's table of results as a picture, docs/frontier.svg: bits per weight against KL, one format for all beside planned.

Read from the table itself, which also goes into docs/verbs/demo.md, so that the three cannot differ; a test makes them anew and compares.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "frontier.svg"
PAGE = ROOT / "docs" / "verbs" / "demo.md"
_ROW = re.compile(r"^\| ([\w.]+) \| llama\.cpp \| [^|]+ \| ([\d.]+) \| ([\d.e-]+)[^|]*\|", re.M)
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 650, 34, 300
_BITS, _KL = (3.0, 9.0), (1e-4, 3e-2)


def table(readme: str) -> str:
    made = readme.partition("<!-- results")[2].partition("<!-- end of results -->")[0]
    return made[made.index("| format |") :]


def points(readme: str) -> list[tuple[str, float, float]]:
    """(format or size, bits per weight, KL) of the quantized files that llama.cpp ran."""
    return [(name, float(bits), float(kl)) for name, bits, kl in _ROW.findall(table(readme)) if name != "float"]


def page(text: str, readme: str) -> str:
    before, start, rest = text.partition("<!-- results: from the README -->\n")
    assert start, "docs/verbs/demo.md needs the marks of the table"
    return f"{before}{start}\n{table(readme)}\n<!-- end of results -->{rest.partition('<!-- end of results -->')[2]}"


def picture(rows: list[tuple[str, float, float]]) -> str:
    lines = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 740 350" font-family="system-ui, sans-serif" font-size="13" role="img">',
        "<title>KL divergence against bits per weight: planned files lie below one format for all of the same size</title>",
        '<rect width="740" height="350" fill="#ffffff"/>',
        '<text x="14" y="20" fill="#444">KL to float, embedded model, run in llama.cpp (lower is closer)</text>',
    ]
    for kl in (1e-4, 1e-3, 1e-2):
        y = _y(kl)
        lines.append(f'<line x1="{_LEFT}" x2="{_RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        lines.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end" fill="#666">{kl:g}</text>')
    lines += [f'<text x="{_x(bits):.1f}" y="{_BOTTOM + 20}" text-anchor="middle" fill="#666">{bits}</text>' for bits in range(3, 10)]
    lines.append(f'<text x="{(_LEFT + _RIGHT) / 2}" y="{_BOTTOM + 40}" text-anchor="middle" fill="#444">bits per weight</text>')
    for name, bits, kl in rows:
        planned = name.endswith("bpw")
        x, y, colour = _x(bits), _y(kl), "#0b6e4f" if planned else "#8a8f98"
        left = name.startswith("int4")  # shares its place with q4_k
        label = "planned" if planned else name
        lines.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{6 if planned else 5}" fill="{colour}"/>')
        lines.append(
            f'<text x="{x - 11 if left else x + 11:.1f}" y="{y + 4:.1f}" text-anchor="{"end" if left else "start"}" '
            f'fill="{colour}">{label} {kl:g}</text>'
        )
    return "\n".join([*lines, "</svg>", ""])


def _x(bits: float) -> float:
    return _LEFT + (bits - _BITS[0]) / (_BITS[1] - _BITS[0]) * (_RIGHT - _LEFT)


def _y(kl: float) -> float:
    low, high = (math.log(end) for end in _KL)
    return _BOTTOM - (math.log(kl) - low) / (high - low) * (_BOTTOM - _TOP)


if __name__ == "__main__":
    results = (ROOT / "README.md").read_text()
    PICTURE.write_text(picture(points(results)))
    PAGE.write_text(page(PAGE.read_text(), results))
