"""The engine for every other architecture: transformers' module over packed weights, with transformers' cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from fewbits.artifact import Artifact


class TransformersEngine:
    def __init__(self, artifact: Artifact) -> None:
        from transformers import AutoModelForCausalLM  # fewbits.inference.registration taught it to load artifacts

        self._module: Any = AutoModelForCausalLM.from_pretrained(artifact.path, local_files_only=True, trust_remote_code=False).eval()
        self._formats = sorted({entry.format for entry in artifact.plan.entries})
        self._past: Any = None
        self._position = 0

    def prompt(self, tokens: list[int], every: bool = True, between: Callable[[], None] | None = None) -> Tensor:
        """In one piece, as not every architecture takes a text up again."""
        if between:
            between()
        with torch.inference_mode():
            out = self._module(
                input_ids=torch.tensor([tokens]), past_key_values=self._past, use_cache=True, logits_to_keep=0 if every else 1
            )
        self._past, self._position = out.past_key_values, self._position + len(tokens)
        logits: Tensor = out.logits[0].float()
        return logits

    def step(self, token: int) -> Tensor:
        return self.prompt([token])[0]

    def rewind(self, tokens: int) -> int:
        """All or nothing: not every cache of transformers can be shortened."""
        if tokens < self._position:
            self._past, self._position = None, 0
        return self._position

    def kernels_used(self) -> list[str]:
        from fewbits import formats, kernels

        return [f"{name}: {kernels.bind(formats.get(name), (formats.get(name).block,) * 2).backend}" for name in self._formats]

    @property
    def nbytes(self) -> int:
        """Of weights, packed."""
        return sum(tensor.nbytes for tensor in (*self._module.parameters(), *self._module.buffers()))

    @property
    def cache_bytes(self) -> int:
        layers = getattr(self._past, "layers", [])
        tensors = [getattr(layer, name, None) for layer in layers for name in ("keys", "values")]
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)
