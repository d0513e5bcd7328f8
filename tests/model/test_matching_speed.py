"""Matching is bound by reading: a billion weights within seconds, and little memory."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fewbits import model as models
from fewbits import planning, targets
from fewbits.artifact.draft import Draft
from fewbits.benchmarks.scale.process_usage import watch
from fewbits.benchmarks.synthetic_llama import Shape, write_checkpoint
from fewbits.progress import silent

SECONDS, MEMORY = 25.0, 1 << 30
_CHILD = """
import json, sys, time
from pathlib import Path
from fewbits import model
from fewbits.model.gguf.matrices import GgufMatrices
from fewbits.model.matching.search import match

source, file = model.open(sys.argv[1]), GgufMatrices(Path(sys.argv[2]))
begun = time.perf_counter()
matching = match(source, file)
print(json.dumps({"seconds": time.perf_counter() - begun, "matches": len(matching.matches), "unmatched": len(matching.unmatched),
                  "numbers": sum(w.shape[0] * w.shape[1] for w in file.weights)}))
"""


@pytest.mark.slow
def test_a_billion_weights_are_matched_as_fast_as_they_are_read(tmp_path: Path, record_property: Callable[[str, str], None]) -> None:
    folder = tmp_path / "model"
    write_checkpoint(folder, Shape(blocks=23))
    source = models.open(folder)
    target = targets.get("gguf")
    target.write_draft(Draft(source, planning.unquantized(source.weights, target)), tmp_path / "float.gguf", silent)
    usage, result = watch([sys.executable, "-c", _CHILD, str(folder), str(tmp_path / "float.gguf")], tmp_path / "nothing")
    record_property("table", json.dumps(result | {"bytes": usage.anonymous}))
    assert result["unmatched"] == 0 and result["matches"] == len(source.weights) and result["numbers"] > 1e9
    assert result["seconds"] < SECONDS
    assert usage.anonymous < MEMORY
