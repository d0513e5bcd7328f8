"""PyTorch itself: the reference. Float32, every weight decoded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits.runtimes import Runtime, Session

if TYPE_CHECKING:
    from torch import Tensor


class _Module(Session):
    def __init__(self, module: Any) -> None:
        self._module = module.float().eval()
        self.vocabulary = int(module.config.vocab_size)

    def logits(self, tokens: list[int]) -> Tensor:
        import torch

        with torch.inference_mode():
            out = self._module(input_ids=torch.tensor([tokens]), use_cache=False, return_dict=False)
        logits: Tensor = out[0][0].float()
        return logits


def of_module(module: Any) -> Session:
    """A session over a transformers module that is loaded already."""
    return _Module(module)


class Torch(Runtime):
    name = "torch"
    extra = ""

    def missing(self) -> str | None:
        return None

    def version(self) -> str:
        from importlib.metadata import version

        return f"torch {version('torch')}"

    def takes(self, path: Path) -> bool:
        return (path / "fewbits.json").is_file()

    def open(self, path: Path, context: int) -> Session:
        from fewbits.artifact import Artifact

        return of_module(Artifact(path).module())


RUNTIME = Torch()
