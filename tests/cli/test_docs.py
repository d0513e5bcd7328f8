"""The pages that are made from the code say what the code does."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

from fewbits import formats

ROOT = Path(__file__).resolve().parents[2]


def tool(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_page_of_formats_is_what_the_code_packs() -> None:
    assert (ROOT / "docs" / "formats.md").read_text() == tool("draw_formats").page(), "run `python tools/draw_formats.py`"


def test_a_drawn_layout_is_the_published_one() -> None:
    """Q4_K by hand, from the layout that llama.cpp documents."""
    lines = "\n".join(tool("draw_formats").drawn(formats.get("q4_k")))
    assert "bytes 0-1       d[0]" in lines and "bytes 2-3       dmin[0]" in lines
    assert "bytes 16-47     bits 0-3: q[0..31]   bits 4-7: q[32..63]" in lines


def test_the_results_in_the_readme_were_made_by_the_demo() -> None:
    table = (ROOT / "README.md").read_text().partition("<!-- results")[2].partition("<!-- end of results -->")[0]
    rows = re.findall(r"^\| (\w+) \| ([\w.]+) \|", table, re.M)
    assert {"float", "q8_0", "int8_channel", "q4_k", "int4_g32", "q3_k"} <= {name for name, _ in rows}
