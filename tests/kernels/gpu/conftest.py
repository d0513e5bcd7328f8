"""The interpreter must be chosen before Triton is imported, and cannot share a process with the compiler."""

from __future__ import annotations

import importlib.util
import os
import sys

import pytest

collect_ignore_glob: list[str] = []
if importlib.util.find_spec("triton") is None:
    collect_ignore_glob.append("test_*.py")
elif "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
    raise pytest.UsageError("something has imported triton already: run tests/gpu by itself, or set TRITON_INTERPRET=1")
else:
    os.environ["TRITON_INTERPRET"] = "1"
    import mended_interpreter

    mended_interpreter.mend()
