"""`fewbits report`: one results.json in, one page out that opens from disk, with nothing to fetch.

contents.py, reading.py   what a results.json holds, checked           markup.py, words.py   text that cannot become HTML; figures in words
verdict.py                the top of the page                          template.py           one file out of all parts
files.py frontier.py mapping.py budget.py values.py coverage.py memory.py kernels.py reproduction.py   a section each
assets/                   style, our scripts, and the plotting library (README.md there says where it comes from)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fewbits.checkpoints.folder import read_json
from fewbits.errors import InputError
from fewbits.files import Staged
from fewbits.reporting.page import reading
from fewbits.reporting.page.contents import Mark, Results
from fewbits.reporting.page.template import render

RESULTS = "results.json"


def report(work: str | Path, out: str | Path = "report.html", *, bench: str | Path | Sequence[str | Path] = ()) -> Path:
    """`work`: a results.json, the folder that holds one, or the file that was made with OUT.work beside it. `bench`: results of
    `fewbits bench kernels` or `fewbits bench plans`, to show beside it."""
    source = _find(Path(work))
    found = reading.read(source)
    for path in map(Path, [bench] if isinstance(bench, str | Path) else bench):
        found = _with_bench(found, path / RESULTS if path.is_dir() else path)
    text = reading.guarded(source, lambda: render(found))
    with Staged(Path(out)) as staged:
        staged.write_text(text, encoding="utf-8")
    return Path(out)


def _find(work: Path) -> Path:
    for candidate in (work / RESULTS, work.with_name(f"{work.name}.work") / RESULTS):
        if candidate.is_file():
            return candidate
    if work.is_dir():
        raise InputError(f"`{work}` holds no {RESULTS}", "give the folder OUT.work that `fewbits quantize` left, or a results.json")
    return work


def _with_bench(found: Results, path: Path) -> Results:
    content: Any = read_json(path, "`fewbits bench kernels -o DIR` writes one")
    return reading.guarded(path, lambda: _added(found, content))


def _added(found: Results, content: Any) -> Results:
    if "cases" in content:
        return replace(found, bench=content)
    marks = [
        Mark(f"{reading.text(row['mix'])} by {reading.text(row['maker'])}", reading.number(row["bits_per_weight"]),
             reading.number(row["found"]["kl"]), reading.whole(row["bytes"]))
        for row in content["texts"][0]["rows"]
    ]  # fmt: skip
    return replace(found, peers=(*found.peers, *marks))
