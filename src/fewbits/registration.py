"""fewbits' loader of artifacts, made known to transformers as soon as transformers is imported, and not before.

Importing transformers to register with it would cost every command its seconds. A finder is asked about every module that is imported:
this one waits for the name of transformers' registry, lets the usual finders find it, adds one import after its own, and is gone.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any

_REGISTRY = "transformers.quantizers.auto"
_LOADER = "fewbits.quantizer"


def when_transformers_comes() -> None:
    if _REGISTRY in sys.modules:
        importlib.import_module(_LOADER)
    elif not any(isinstance(finder, _Waiting) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Waiting())


class _Waiting:
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != _REGISTRY:
            return None
        sys.meta_path.remove(self)
        found = importlib.util.find_spec(name)
        if found is not None and found.loader is not None:
            load = found.loader.exec_module

            def load_and_register(module: Any) -> None:
                load(module)
                importlib.import_module(_LOADER)

            found.loader.exec_module = load_and_register  # type: ignore[method-assign]
        return found
