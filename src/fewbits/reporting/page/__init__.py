"""`fewbits report`: one results.json in, one page out that opens from disk, with nothing to fetch.

contents.py reads one results.json (reporting/schema.py), checked by checked_json.py. markup.py makes HTML that text cannot break out of,
words.py figures for a person. verdict.py is the top of the page, template.py the whole of it, every other file a section (model_map.py a
part of frontier.py). assets/ holds the style, our scripts and the plotting library; README.md there says where that comes from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fewbits.errors import InputError
from fewbits.reporting.page import contents
from fewbits.reporting.page.checked_json import guarded, number, text
from fewbits.reporting.page.contents import Contents, Mark
from fewbits.reporting.page.template import render
from fewbits.reporting.schema import NAME
from fewbits.store.files import Staged
from fewbits.store.untrusted import read_json


def report(work: str | Path, out: str | Path = "report.html", *, bench: str | Path | Sequence[str | Path] = ()) -> Path:
    """`work`: a results.json, the folder that holds one, or the file that was made with OUT.work beside it. `bench`: results of
    `fewbits bench kernels` or `fewbits bench plans`, to show beside it."""
    source = _find(Path(work))
    shown = contents.read(source)
    for path in map(Path, [bench] if isinstance(bench, str | Path) else bench):
        shown = _with_bench(shown, path / NAME if path.is_dir() else path)
    page = guarded(source, lambda: render(shown))
    with Staged(Path(out)) as staged:
        staged.write_text(page, encoding="utf-8")
    return Path(out)


def _find(work: Path) -> Path:
    for candidate in (work / NAME, work.with_name(f"{work.name}.work") / NAME):
        if candidate.is_file():
            return candidate
    if work.is_dir():
        raise InputError(f"`{work}` holds no {NAME}", "give the folder OUT.work that `fewbits quantize` left, or a results.json")
    return work


def _with_bench(shown: Contents, path: Path) -> Contents:
    content: Any = read_json(path, "`fewbits bench kernels -o DIR` writes one")
    return guarded(path, lambda: _added(shown, content))


def _added(shown: Contents, content: Any) -> Contents:
    if "cases" in content:
        return replace(shown, bench=content)
    marks = [
        Mark(f"{text(row['mix'])} by {text(row['maker'])}", number(row["bits_per_weight"]), number(row["found"]["kl"]))
        for row in content["texts"][0]["rows"]
    ]
    return replace(shown, peers=(*shown.peers, *marks))
