"""fewbits: give a transformer a budget, get back the best mixed-precision model it buys, verified where it will run.

The verbs of the command line, as functions. Importing this loads no torch: each verb loads what it needs.
"""

from __future__ import annotations

import functools
import importlib
import inspect as _inspect
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fewbits.inference import registration

if TYPE_CHECKING:
    from fewbits import formats
    from fewbits.calibration import calibrate
    from fewbits.demonstration import demo
    from fewbits.inference.engine import run
    from fewbits.inference.serving.server import serve
    from fewbits.inspection.capacity.estimate import fit
    from fewbits.inspection.contents import inspect
    from fewbits.inspection.formats import compare
    from fewbits.pipeline import quantize
    from fewbits.reporting.page import report
    from fewbits.reporting.results.compared import compare_files
    from fewbits.targets.export import export
    from fewbits.targets.plan import plan
    from fewbits.targets.publishing import publish
    from fewbits.verification.files import verify
    from fewbits.verification.forecast.measurement import measure
    from fewbits.workbench import Workbench

_HOME = {
    "Workbench": "workbench",
    "calibrate": "calibration",
    "compare": "inspection.formats",
    "compare_files": "reporting.results.compared",
    "demo": "demonstration",
    "export": "targets.export",
    "fit": "inspection.capacity.estimate",
    "inspect": "inspection.contents",
    "measure": "verification.forecast.measurement",
    "plan": "targets.plan",
    "publish": "targets.publishing",
    "quantize": "pipeline",
    "report": "reporting.page",
    "run": "inference.engine",
    "serve": "inference.serving.server",
    "verify": "verification.files",
}

__all__ = [
    "Workbench",
    "calibrate",
    "compare",
    "compare_files",
    "demo",
    "export",
    "fit",
    "formats",
    "inspect",
    "measure",
    "plan",
    "publish",
    "quantize",
    "report",
    "run",
    "serve",
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
        found = getattr(importlib.import_module(f"fewbits.{_HOME[name]}"), name)
        return found if isinstance(found, type) else _for_callers(found)
    raise AttributeError(f"module 'fewbits' has no attribute '{name}'")


@functools.cache
def _for_callers(verb: Callable[..., Any]) -> Callable[..., Any]:
    """A verb for who calls it from Python: errors name arguments in the place of options, and `progress` takes tqdm, True or False."""
    from fewbits.errors import naming_arguments

    signature = _inspect.signature(verb)

    @functools.wraps(verb)
    def called(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        with naming_arguments():
            if "progress" in given.arguments:
                from fewbits.reporting.meanwhile import shown_by

                given.arguments["progress"] = shown_by(given.arguments["progress"])
            return verb(*given.args, **given.kwargs)

    return called


# onnxruntime and onnxruntime-genai report their use to their maker unless told otherwise before they are loaded; nothing here calls home
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
registration.register_when_imported()
