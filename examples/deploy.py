"""One artifact, three containers, each run by its own runtime: GGUF in llama.cpp, ONNX in ONNX Runtime, and fewbits' own kernels.

    python examples/deploy.py [MODEL]

The decoded weights are the same in every file; what differs is how each runtime rounds activations on the way.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import fewbits
from fewbits import embedded

PROMPT = "The function returns"


def main(model: str, folder: Path) -> int:
    made = fewbits.quantize(model, folder, to="fewbits", format="int4_g32", override="down_proj=int8_g32", method="rtn", no_verify=True)
    files = [made.path, *(fewbits.export(made.artifact, folder / name) for name in ("model.gguf", "model.onnx"))]

    print("file             bytes      run by        KL       same top token")
    verdicts = []
    for file in files:
        verdict = fewbits.verify(file, model, tokens=512, max_kl=0.05, no_floor=True)
        verdicts.append(verdict)
        print(f"{file.name:<15} {verdict.bytes:>9,}  {verdict.runtime:<12} {verdict.kl_mean:.5f}  {verdict.top1_agreement:.1%}")

    said = fewbits.run(made.path, PROMPT, max_tokens=16)
    print(f"\n{PROMPT}{said.text}\n({said.stats.new_tokens} tokens by {', '.join(said.stats.kernels)})")
    return 0 if all(verdict.passed for verdict in verdicts) else 1


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else str(embedded.MODEL), Path(scratch)))
