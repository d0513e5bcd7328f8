"""docs/architectures.md: every model of tests/zoo through every step of fewbits, each a result or the reason why not. `make zoo`.

A model runs in a process of its own, because a runtime may end it. Results are kept in build/zoo/NAME.json: a step whose result is there is
not run again. `python tools/zoo_table.py NAME... STEP...` runs these again, and no others.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD, PAGE = ROOT / "build" / "zoo", ROOT / "docs" / "architectures.md"
STEPS = ("calibrate", "plan", "gguf", "onnx", "genai", "compressed")
BEGIN, END = "<!-- table: made by `make zoo` -->", "<!-- end of table -->"
MINUTES = 15  # for one model, before it counts as one that does not come to an end
_REASONS = "### Why not"


def main(words: list[str]) -> None:
    sys.path[:0] = [str(ROOT / "tests")]
    from zoo.models import NAMES

    BUILD.mkdir(parents=True, exist_ok=True)
    steps = [word for word in words if word in STEPS]
    names = [word for word in words if word not in STEPS]
    for number, name in enumerate(names or NAMES, 1):
        known = _known(name)
        wanted = steps or ([*STEPS] if names else [step for step in STEPS if step not in known])
        if wanted:
            started = time.perf_counter()
            _in_its_process(name, {step: done for step, done in known.items() if step not in wanted}, wanted)
            print(f"{number:3} {name}: {time.perf_counter() - started:.0f} s", flush=True)
    _write(list(NAMES))


def _known(name: str) -> dict[str, dict[str, object]]:
    file = BUILD / f"{name}.json"
    return json.loads(file.read_text()) if file.is_file() else {}


def _in_its_process(name: str, known: dict[str, dict[str, object]], wanted: list[str]) -> None:
    file = BUILD / f"{name}.json"
    file.write_text(json.dumps(known, indent=1))
    words = [sys.executable, __file__, "--one", name, *wanted]
    try:
        ended = subprocess.run(words, capture_output=True, text=True, timeout=60 * MINUTES, env={**os.environ, "GGML_NO_BACKTRACE": "1"})
        said = f"the process ended with {ended.returncode}: {ended.stderr.strip().splitlines()[-1] if ended.stderr.strip() else ''}"
    except subprocess.TimeoutExpired:
        said = f"not done within {MINUTES} minutes"
    done = _known(name)
    missing = {step: {"made": False, "said": said} for step in wanted if step not in done}
    file.write_text(json.dumps(done | missing, indent=1))


def _one(name: str, steps: list[str]) -> None:
    sys.path[:0] = [str(ROOT / "tests")]
    import transformers
    from zoo.conversion import converter
    from zoo.models import build
    from zoo.trials import Trials

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    folder, work = BUILD / "models" / name, BUILD / "work" / name
    trials = Trials(build(name, folder), work, converter(BUILD / "converter"))
    work.mkdir(parents=True, exist_ok=True)
    for step in steps:
        done: dict[str, object] = {**_known(name), step: asdict(getattr(trials, step)())}
        (BUILD / f"{name}.json").write_text(json.dumps(done, indent=1))


def _write(names: list[str]) -> None:
    rows: list[str] = []
    reasons: list[tuple[str, str, str]] = []
    for name in names:
        file = BUILD / f"{name}.json"
        if not file.is_file():
            continue
        done = {step: {"made": False, "said": "not tried yet"} for step in STEPS} | _known(name)
        rows.append(f"| {name} | {' | '.join(_cell(step, done[step]) for step in STEPS)} |")
        reasons += [(step, _without_names(done[step]["said"], name), name) for step in STEPS if not done[step]["made"]]
    head = ["| model | calibrate | plan | gguf | onnx | genai | compressed-tensors |", "|---|---|---|---|---|---|---|"]
    text = "\n".join([BEGIN, "", *head, *rows, "", _REASONS, "", *_grouped(reasons), "", END])
    page = PAGE.read_text()
    before, after = page.partition(BEGIN)[0], page.partition(END)[2]
    PAGE.write_text(before + text + after)


def _without_names(said: str, name: str) -> str:
    """The same reason of two models is one line."""
    said = re.sub("the architecture `[^`]+`", "its architecture", said.replace(f"`{name}`", "the model"))
    return re.sub(r"(?<=the model: )\w+ (?=is no|stacks|hands|reads)", "it ", said)


def _cell(step: str, tried: dict[str, object]) -> str:
    if not tried["made"]:
        return "no"
    if step == "gguf" and isinstance(tried["kl"], float):
        floor = f", floor {tried['floor']:.0e}" if isinstance(tried["floor"], float) else ""
        if isinstance(tried["predicted"], float):
            return f"KL {tried['kl']:.2g}, {tried['kl'] / tried['predicted']:.2f} of predicted{floor}"
        return f"{tried['said'] or format(tried['kl'], '.2g')}{floor}"
    if isinstance(tried["kl"], float):
        return f"KL {tried['kl']:.2g} at {tried['bits']:.2f} bits"
    return "yes"


def _grouped(reasons: list[tuple[str, str, str]]) -> list[str]:
    """One line for each reason, with the models that it is of."""
    by_reason: dict[tuple[str, str], list[str]] = {}
    for step, said, name in reasons:
        by_reason.setdefault((step, said), []).append(name)
    return [f"- **{step}**, {', '.join(models)}: {said}" for (step, said), models in sorted(by_reason.items())]


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        _one(sys.argv[2], sys.argv[3:])
    else:
        main(sys.argv[1:])
