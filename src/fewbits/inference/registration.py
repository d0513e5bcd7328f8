"""Registers fewbits' loader of artifacts with transformers as soon as transformers is imported, and not before.

Importing transformers here, to register with it, would cost every command seconds. Instead a finder is put before Python's own: it waits
for the import of transformers' registry, has the usual finders load it, imports our loader after it, and removes itself.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any

_REGISTRY = "transformers.quantizers.auto"
_LOADER = "fewbits.inference.transformers_loader"


def register_when_imported() -> None:
    if _REGISTRY in sys.modules:
        importlib.import_module(_LOADER)
    elif not any(isinstance(finder, _Waiting) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Waiting())


class _Waiting:
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != _REGISTRY:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_register(module: Any) -> None:
                load(module)
                importlib.import_module(_LOADER)

            spec.loader.exec_module = load_and_register  # type: ignore[method-assign]
        return spec
