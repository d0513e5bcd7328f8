"""Quantize a model to a size, see where the bits went, and judge the file in llama.cpp.

    python examples/quantize_and_verify.py [MODEL [TEXT]]

Without arguments: the small model that ships with fewbits and its texts. Exit code 1 if the file is too far from the float model.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import fewbits
from fewbits import embedded

SIZE = "4.5bpw"  # what q4_k takes
MAX_KL = 0.02
FEW = ("q3_k", "q4_k", "q5_k", "q6_k", "q8_0")


def main(model: str, text: str | None, folder: Path) -> int:
    data = text or folder / "calibration.txt"
    if text is None:
        Path(data).write_text(embedded.calibration_text(), encoding="utf-8")
    few = {} if text else {"samples": 4, "tokens": 512, "formats": FEW}  # seconds; the defaults take more of each
    made = fewbits.quantize(model, folder / "model.gguf", size=SIZE, data=data, max_kl=MAX_KL, **few)

    print(f"{'weight':<40} {'format':<8} {'bytes':>9} predicted KL")
    for entry in sorted(made.plan.entries, key=lambda entry: -(entry.kl or 0))[:6]:
        print(f"{entry.weight:<40} {entry.format:<8} {entry.nbytes:>9,} {entry.kl:.1e}")

    verdict = made.verdict
    assert verdict is not None, "it was verified"
    low, high = verdict.kl_ci95
    print(f"\n{made.path.name}: {verdict.bytes:,} bytes, {verdict.bits_per_weight:.2f} bits per weight, run by {verdict.runtime}")
    print(f"predicted KL {made.plan.kl:.4f}, measured {verdict.kl_mean:.4f} ({low:.4f} to {high:.4f}) on {verdict.tokens:,} tokens")
    print(f"same top token {verdict.top1_agreement:.1%}; " + ("passed" if verdict.passed else "; ".join(verdict.failures)))
    return 0 if verdict.passed else 1


if __name__ == "__main__":
    given = sys.argv[1:]
    with tempfile.TemporaryDirectory() as scratch:
        sys.exit(main(given[0] if given else str(embedded.MODEL), given[1] if len(given) > 1 else None, Path(scratch)))
