"""One artifact, exported to every target that accepts it and verified in each runtime: the loop of the README, and its table there.

    python tools/readme_deployment.py [MODEL [TEXT]]      the embedded model, or another one judged on this text

Each line of the table is one `fewbits export` and one `fewbits verify`; a second model is added to the table.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from fewbits import embedded, targets

README = Path(__file__).parent.parent / "README.md"
START, END = "<!-- deployment: made by `tools/readme_deployment.py` -->\n", "<!-- end of deployment -->\n"
HEAD = "| model | file | run by | size | bits per weight | KL to float | same top token |\n|---|---|---|---|---|---|---|\n"
TARGETS = ("fewbits", "gguf", "onnx", "onnx-genai", "safetensors")
MIX = ("--format", "int4_g32", "--override", "down_proj=int8_g32", "--override", "embed=fp16")


def fewbits(*words: object) -> dict[str, object]:
    done = subprocess.run([sys.executable, "-m", "fewbits.cli", *map(str, words), "--json"], capture_output=True, text=True)
    if done.returncode not in (0, 1):
        sys.exit(done.stderr)
    result: dict[str, object] = json.loads(done.stdout)
    return result


def rows(model: Path, data: list[str]) -> list[str]:
    name = "embedded" if model == embedded.MODEL else model.name
    lines = []
    with tempfile.TemporaryDirectory() as scratch:
        made = fewbits("quantize", model, "-o", scratch, "--to", "fewbits", *MIX, "--method", "rtn", "--no-verify")
        for target in TARGETS:
            path = Path(scratch) / targets.get(target).file_name
            if target != "fewbits":
                fewbits("export", made["artifact"], "-o", path, "--to", target)
            verdict = fewbits("verify", path, "--against", model, *data, "--tokens", "8192", "--no-floor")
            figures = (f"{verdict['bytes'] / 1e6:.2f} MB", f"{verdict['bits_per_weight']:.2f}", f"{verdict['kl_mean']:.4f}")
            columns = (name, target, verdict["runtime_version"], *figures, f"{verdict['top1_agreement']:.1%}")
            lines.append(f"| {' | '.join(map(str, columns))} |\n")
            print(lines[-1], end="")
    return lines


def main() -> None:
    model = Path(sys.argv[1]) if len(sys.argv) > 1 else embedded.MODEL
    data = ["--data", sys.argv[2]] if len(sys.argv) > 2 else []
    page = README.read_text()
    before, _, rest = page.partition(START)
    table, _, after = rest.partition(END)
    name = "embedded" if model == embedded.MODEL else model.name
    others = [line + "\n" for line in table.splitlines() if line.startswith("| ") and not line.startswith((f"| {name} ", "| model "))]
    mine = rows(model, data)
    README.write_text(before + START + HEAD + "".join([*mine, *others] if name == "embedded" else [*others, *mine]) + END + after)


if __name__ == "__main__":
    main()
