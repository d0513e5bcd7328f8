"""fewbits: give a transformer a budget, get back the best mixed-precision model it buys, verified where it will run.

The verbs of the command line, as functions. Importing this loads no torch: each verb loads what it needs.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from fewbits.inference import registration

if TYPE_CHECKING:
    from fewbits import formats
    from fewbits.calibration import calibrate
    from fewbits.demonstration import demo
    from fewbits.inference.engine import run
    from fewbits.inspection.capacity.estimate import fit
    from fewbits.inspection.contents import inspect
    from fewbits.inspection.formats import compare
    from fewbits.pipeline import quantize
    from fewbits.reporting.page import report
    from fewbits.targets.export import export
    from fewbits.targets.plan import plan
    from fewbits.verification.files import verify
    from fewbits.verification.forecast.measurement import measure
    from fewbits.workbench import Workbench

_HOME = {
    "Workbench": "workbench",
    "calibrate": "calibration",
    "compare": "inspection.formats",
    "demo": "demonstration",
    "export": "targets.export",
    "fit": "inspection.capacity.estimate",
    "inspect": "inspection.contents",
    "measure": "verification.forecast.measurement",
    "plan": "targets.plan",
    "quantize": "pipeline",
    "report": "reporting.page",
    "run": "inference.engine",
    "verify": "verification.files",
}

__all__ = [
    "Workbench",
    "calibrate",
    "compare",
    "demo",
    "export",
    "fit",
    "formats",
    "inspect",
    "measure",
    "plan",
    "quantize",
    "report",
    "run",
    "verify",
]


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("fewbits")
    if name == "formats":
        return importlib.import_module("fewbits.formats")
    if name in _HOME:
        return getattr(importlib.import_module(f"fewbits.{_HOME[name]}"), name)
    raise AttributeError(f"module 'fewbits' has no attribute '{name}'")


# onnxruntime and onnxruntime-genai report their use to their maker unless told otherwise before they are loaded; nothing here calls home
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
registration.register_when_imported()
