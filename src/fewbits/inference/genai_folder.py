"""`fewbits run` with a folder for onnxruntime-genai: its generator and KV cache compute logits, tokens are chosen as everywhere here."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits.errors import InputError, MissingError
from fewbits.inference.stepped_model import SteppedModel
from fewbits.model.tokenizer import load_tokenizer
from fewbits.store.untrusted import first_line, read_json
from fewbits.targets.onnx import versions

if TYPE_CHECKING:
    from torch import Tensor

CONFIG = "genai_config.json"
_OLDEST = "0.11"  # the oldest that was tried
_HINT = "give a folder that `fewbits export --to onnx-genai` wrote"


def takes(folder: Path) -> bool:
    return (folder / CONFIG).is_file()


def missing() -> str | None:
    """Why the package cannot be used here; None if it can."""
    installed = versions.installed("onnxruntime-genai")
    if installed is None:
        return "the package `onnxruntime-genai` is not installed"
    return f"onnxruntime-genai is {installed}, but {_OLDEST} is needed" if versions.older(installed, _OLDEST) else None


def loaded(folder: Path) -> Any:
    """The package's model, with the threads that torch uses."""
    import onnxruntime_genai
    import torch

    settings = {"decoder": {"session_options": {"intra_op_num_threads": torch.get_num_threads()}}}
    config = onnxruntime_genai.Config(str(folder))
    config.overlay(json.dumps({"model": settings}))
    return onnxruntime_genai.Model(config)


def opened(folder: Path, context: int | None, kv: str | None) -> SteppedModel:
    if reason := missing():
        raise MissingError(f"onnxruntime-genai cannot run here: {reason}", "pip install 'fewbits[genai]'")
    if kv not in (None, "float"):
        raise InputError(f"the KV cache cannot be {kv} here: onnxruntime-genai keeps its own", "leave `--kv` out")
    about = read_json(folder / CONFIG, _HINT)
    try:
        longest, ends = int(about["model"]["context_length"]), about["model"]["eos_token_id"]
        shape = [int(about["model"]["decoder"][name]) for name in ("num_hidden_layers", "num_key_value_heads", "head_size")]
        model = loaded(folder)
    except Exception as failure:
        raise InputError(f"onnxruntime-genai cannot load `{folder}`: {first_line(failure)}", _HINT) from failure
    if context is not None and context > longest:
        raise InputError(f"`{folder.name}` takes {longest} tokens, not {context}", "give a smaller `--context`")
    size = sum(file.stat().st_size for file in folder.iterdir() if file.suffix in (".onnx", ".data"))
    token_bytes = 2 * 4 * math.prod(shape)  # keys and values in float32, as targets/onnx_genai writes graphs

    def engine(room: int) -> tuple[_Engine, str]:
        return _Engine(model, min(room, longest), size, token_bytes), "onnxruntime-genai"

    return SteppedModel(load_tokenizer(folder), set(ends if isinstance(ends, list) else [ends]), engine, context, longest)


class _Engine:
    def __init__(self, model: Any, context: int, nbytes: int, token_bytes: int) -> None:
        self._model, self._context, self.nbytes, self._token_bytes = model, context, nbytes, token_bytes
        self._position = 0
        self.rewind(0)

    @property
    def cache_bytes(self) -> int:
        return self._position * self._token_bytes

    def prompt(self, tokens: list[int], every: bool = True, between: Callable[[], None] | None = None) -> Tensor:
        import numpy as np
        import torch

        if self._position + len(tokens) > self._context:
            raise InputError(f"the text has outgrown the context of {self._context} tokens", "give a larger `--context`")
        if between:
            between()
        self._generator.append_tokens(np.array([tokens], np.int32))
        self._position += len(tokens)
        logits = self._generator.get_output("logits")[0] if every else self._generator.get_logits().reshape(1, -1)
        return torch.from_numpy(logits.copy()).float()

    def step(self, token: int) -> Tensor:
        return self.prompt([token], every=False)[-1]

    def rewind(self, tokens: int) -> int:
        """All or nothing: a new generator."""
        import onnxruntime_genai

        if tokens < self._position or tokens == 0:
            parameters = onnxruntime_genai.GeneratorParams(self._model)
            parameters.set_search_options(max_length=self._context, do_sample=False, num_beams=1, repetition_penalty=1.0)
            self._generator, self._position = onnxruntime_genai.Generator(self._model, parameters), 0
        return self._position

    def kernels_used(self) -> list[str]:
        return ["onnxruntime"]
