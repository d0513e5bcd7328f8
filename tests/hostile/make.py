"""Every hostile file, and which commands read its kind. `python make.py FOLDER` writes them all and says what each attacks."""

from __future__ import annotations

import sys
from pathlib import Path

import artifact_cases
import benign
import compressed_cases
import config_cases
import data_cases
import folder_cases
import gguf_cases
import onnx_cases
import plan_cases
import published_cases
import statistics_cases
import vast_cases
from benign import Benign
from cases import CASES, Case

MODULES = (  # importing them fills CASES
    artifact_cases, compressed_cases, config_cases, data_cases, folder_cases, gguf_cases, onnx_cases, plan_cases, published_cases,
    statistics_cases, vast_cases,
)  # fmt: skip

# kind -> verb -> its words. {x}: the hostile file; {model}, {gguf} ...: honest ones; {out}: a place to write to
_MODEL = {
    "inspect": "inspect {x}",
    "quantize": "quantize {x} -o {out}/q.gguf --format q4_0 --method rtn --no-verify --offline",
    "calibrate": "calibrate {x} -o {out}/stats --data {text} --samples 2 --length 32 --offline",
    "verify against": "verify {model} --against {x} --data {text} --tokens 64 --length 32 --runtime transformers --no-floor --offline",
    "verify": "verify {x} --against {model} --data {text} --tokens 64 --length 32 --no-floor --offline",
}
VERBS: dict[str, dict[str, str]] = {
    "gguf": {
        **_MODEL,
        "verify against": "verify {gguf} --against {x} --data {text} --tokens 64 --length 32 --no-floor",
        "quantize by importance": "quantize {model} -o {out}/q.gguf --format q4_0 --stats {x} --no-verify",
    },
    "folder": _MODEL,
    "tokenizer": {verb: _MODEL[verb] for verb in ("quantize", "calibrate")},
    "importance": {"quantize": "quantize {model} -o {out}/q.gguf --format q4_0 --stats {x} --no-verify"},
    "onnx": {
        "inspect": "inspect {x}",
        "quantize": "quantize {x} -o {out}/q.onnx --format int8_channel --method rtn",
        "verify": "verify {x} --against {graph}",
        "verify against": "verify {graph} --against {x}",
        "verify as a language model": "verify {x} --against {model} --data {text} --tokens 64 --length 32 --no-floor",
    },
    "plan": {
        "quantize": "quantize {model} -o {out}/q.gguf --plan {x} --no-verify",
        "plan": "plan {model} --sensitivity {sensitivity} --plan {x}",
    },
    "sensitivity": {"plan": "plan {model} --sensitivity {x} --size 5bpw"},
    "statistics": {
        "quantize": "quantize {model} -o {out}/q.gguf --format q4_0 --method gptq --stats {x} --no-verify",
        "measure": "measure {model} --stats {x} -o {out}/s.json --formats q4_0 --method rtn",
    },
    "merged statistics": {"calibrate": "calibrate {model} -o {out}/s --data {text} --samples 4 --length 32 --merge {x}"},
    "artifact": {
        "inspect": "inspect {x}",
        "export": "export {x} -o {out}/e.gguf",
        "verify": "verify {x} --against {model} --data {text} --tokens 64 --length 32",
        "run": "run {x} hello -n 2",
    },
    "compressed": {"inspect": "inspect {x}"},
    "data": {"calibrate": "calibrate {model} -o {out}/s --data {x} --samples 4 --length 32 --no-gradients"},
    "arrays": {"verify": "verify {graph} --against {graph} --data {x}"},
}

# `make test` opens each file by the verb that reads most of it, `make test-all` by every other one
FIRST = {kind: next(verb for verb in ("quantize", "verify", *verbs) if verb in verbs) for kind, verbs in VERBS.items()}
OTHERS = {kind: verbs.keys() - {FIRST[kind]} for kind, verbs in VERBS.items() if len(verbs) > 1}


def words(verb: str, kind: str, hostile: Path, honest: Benign, out: Path) -> list[str]:
    places = {name: getattr(honest, name) for name in ("model", "gguf", "graph", "text", "sensitivity", "plan")}
    return [word.format(x=hostile, out=out, **places) for word in VERBS[kind][verb].split()]


def _main(folder: Path) -> None:
    honest = benign.make(folder / "benign")
    for each in CASES:
        path = each.write(folder / each.kind / each.name, honest)
        size = path.stat().st_size if path.is_file() else sum(p.stat().st_size for p in path.rglob("*") if p.is_file())
        sys.stdout.write(f"{each.kind:12} {each.name:32} {size:>9,} bytes  {each.attacks}\n")


def unlike() -> list[Case]:
    """Two cases of one name would be one folder."""
    seen: set[tuple[str, str]] = set()
    return [each for each in CASES if (each.kind, each.name) in seen or seen.add((each.kind, each.name))]


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
