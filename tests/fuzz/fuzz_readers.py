"""The readers under atheris, by coverage: `python tests/fuzz/fuzz_readers.py [libFuzzer's options] [CORPUS]`. `make fuzz` runs it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import atheris

# an editable install loads modules by a finder of its own, which atheris cannot look into: from the sources it can
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in type(finder).__module__]
sys.path.insert(0, str(Path(__file__).parents[2] / "src"))
with atheris.instrument_imports(include=["fewbits"]):
    import readers

if __name__ == "__main__":
    with readers.scratch() as folder:
        child = os.fork()  # libFuzzer ends its process without a word: what it worked in is removed by another
        if child == 0:
            atheris.Setup(sys.argv, readers.reader(Path(folder)))
            atheris.Fuzz()
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    sys.exit(status if status >= 0 else 128 - status)
