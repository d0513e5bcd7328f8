"""Put what `fewbits bench workers -o FOLDER` measured into docs/scale.md: two tables and a picture. The argument is that folder."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

from fewbits.benchmarks.scale.projection import Projection, project

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE, PICTURE = DOCS / "scale.md", DOCS / "workers.svg"


def measured(bench: dict[str, Any]) -> str:
    shape = bench["shape"]
    rows = ["| workers | start | calibrate | measure | quantize | speed-up |", "|---|---|---|---|---|---|"]
    for point in bench["points"]:
        seconds = " | ".join(f"{value:.1f} s" for value in point["seconds"].values())
        ratio = f"{bench['speedup'][str(point['workers'])]['all']:.2f}" if point["workers"] else ""
        rows.append(f"| {point['workers'] or 'none: one process, one thread'} | {seconds} | {ratio} |")
    about = (
        f"{shape['blocks']} blocks of width {shape['hidden']}, {bench['tokens']:,} tokens in {bench['shards']} shards, formats "
        f"{' and '.join(bench['formats'])}, {bench['processors']} processors. Speed-up is of the three steps without the start."
    )
    return "\n".join([about, "", *rows, "", "![Speed-up against workers](workers.svg)"])


def counted(paper: Projection) -> str:
    rows = [
        "| workers | shards | calibrate | measure | quantize | write, verify | in all | memory of a worker | shared storage | network |"
    ]
    rows.append("|---|---|---|---|---|---|---|---|---|---|")
    for row in paper.rows:
        hours = " | ".join(f"{value / 3600:,.1f} h" for value in (row.calibrate, row.measure, row.quantize, row.alone, row.seconds))
        sizes = f"{row.memory / 1e9:.0f} GB | {row.storage / 1e12:.0f} TB | {row.network / 1e12:.0f} TB"
        rows.append(f"| {row.workers} | {row.shards} | {hours} | {sizes} |")
    return "\n".join([*rows, "", f"The units of the bench lie within a factor of {paper.speed.misfit:.1f} of the formula."])


def page(text: str, folder: Path) -> str:
    for mark, made in (
        ("workers", measured(json.loads((folder / "workers.json").read_text()))),
        ("paper", counted(project(folder / "workers.json"))),
    ):
        pattern = rf"(<!-- {mark}: from bench-workers -->\n).*?(<!-- end of {mark} -->)"
        text = re.sub(pattern, lambda match, made=made: f"{match[1]}\n{made}\n\n{match[2]}", text, flags=re.S)
    return text


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    PAGE.write_text(page(PAGE.read_text(), folder))
    shutil.copyfile(folder / "workers.svg", PICTURE)
