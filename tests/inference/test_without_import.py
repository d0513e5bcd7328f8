"""transformers must not take an artifact for a float model: without fewbits it would go on with random weights, and exit code 0."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from fewbits import embedded, quantize

SCRIPT = """
import sys
from transformers import AutoModel, AutoModelForCausalLM
for kind in (AutoModel, AutoModelForCausalLM):
    try:
        kind.from_pretrained(sys.argv[1])
    except RuntimeError as refused:
        print("refused", "mismatched" in str(refused), "fewbits" in sys.modules)
import fewbits
loaded = AutoModelForCausalLM.from_pretrained(sys.argv[1])
print("loaded", type(loaded.model.layers[0].mlp.down_proj.weight).__name__)
"""


def test_transformers_refuses_an_artifact_until_fewbits_is_imported(tmp_path: Path) -> None:
    made = quantize(embedded.MODEL, tmp_path / "m", to="fewbits", format="int4_g32", method="rtn", no_verify=True)
    spoken = {name: value for name, value in os.environ.items() if name != "TRANSFORMERS_VERBOSITY"}  # the command line makes it quiet
    ended = subprocess.run([sys.executable, "-c", SCRIPT, str(made.path)], capture_output=True, text=True, check=True, env=spoken)
    assert ended.stdout.splitlines() == ["refused True False"] * 2 + ["loaded PackedWeight"]
    before, _, after = ended.stderr.rpartition("MISMATCH:")
    assert "then_import_fewbits" in before, "the report of the refusal says what to do"
    assert "UNEXPECTED" not in after and "MISSING" not in after
