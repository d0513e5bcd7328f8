"""onnxruntime-genai on the CPU, with the threads that torch uses: its own generator, KV cache and greedy search."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits.checkpoints.folder import read_json
from fewbits.errors import InputError
from fewbits.runtimes import Runtime, Session
from fewbits.targets.onnx import versions

if TYPE_CHECKING:
    from torch import Tensor

_CONFIG = "genai_config.json"
_OLDEST = "0.11"  # the oldest that was tried
_GREEDY = {"do_sample": False, "num_beams": 1, "repetition_penalty": 1.0}


def _package() -> Any:
    import onnxruntime_genai

    return onnxruntime_genai


class _Generated(Session):
    def __init__(self, model: Any, vocabulary: int, context: int) -> None:
        self._model, self.vocabulary, self.context = model, vocabulary, context

    def logits(self, tokens: list[int]) -> Tensor:
        """One prompt as genai runs it; `get_output` has the graph's whole output, where `get_logits` has the last position alone."""
        import torch

        generator = self._fed(tokens, len(tokens))
        return torch.from_numpy(generator.get_output("logits")[0].copy()).float()

    def generate(self, tokens: list[int], count: int) -> list[int]:
        """Greedy, by genai's own search: the prompt at once, then one token at a time with the cache."""
        import numpy as np

        generator = self._fed(tokens, len(tokens) + count)
        made: list[int] = []
        while len(made) < count:
            generator.generate_next_token()
            made.append(int(generator.get_next_tokens()[0]))
            if generator.is_done() and len(made) < count:  # it ends with the text; runtimes are compared beyond that
                generator.append_tokens(np.array([made[-1:]], np.int32))
        return made

    def close(self) -> None:
        self._model = None

    def _fed(self, tokens: list[int], length: int) -> Any:
        import numpy as np

        if not tokens:
            raise InputError("there are no tokens to run", "give some text")
        if length > self.context:
            raise InputError(f"{length} tokens do not fit the context of {self.context}", "use a longer context or a shorter text")
        if not 0 <= min(tokens) <= max(tokens) < self.vocabulary:
            raise InputError(f"token {max(tokens)} is outside the vocabulary of {self.vocabulary}", "is it the tokenizer of another model?")
        genai = _package()
        parameters = genai.GeneratorParams(self._model)
        parameters.set_search_options(max_length=length, **_GREEDY)
        generator = genai.Generator(self._model, parameters)
        generator.append_tokens(np.array([tokens], np.int32))
        return generator


class OnnxRuntimeGenai(Runtime):
    name = "onnxruntime-genai"
    extra = "genai"

    def missing(self) -> str | None:
        found = versions.installed("onnxruntime-genai")
        if found is None:
            return "the package `onnxruntime-genai` is not installed"
        return f"onnxruntime-genai is {found}, but {_OLDEST} is needed" if versions.older(found, _OLDEST) else None

    def version(self) -> str:
        from importlib.metadata import version

        return f"onnxruntime-genai {version('onnxruntime-genai')}, onnxruntime {version('onnxruntime')}"

    def takes(self, path: Path) -> bool:
        return (path / _CONFIG).is_file()

    def open(self, path: Path, context: int) -> Session:
        import torch

        hint = "give a folder that `fewbits export --to onnx-genai` wrote"
        about = read_json(path / _CONFIG, hint)
        try:
            vocabulary, longest = int(about["model"]["vocab_size"]), int(about["model"]["context_length"])
            own: dict[str, Any] = {"decoder": {"session_options": {"intra_op_num_threads": torch.get_num_threads()}}}
            genai = _package()
            config = genai.Config(str(path))
            config.overlay(json.dumps({"model": own}))
            model = genai.Model(config)
        except Exception as failure:
            reason = str(failure).strip().splitlines()[0] if str(failure).strip() else repr(failure)
            raise InputError(f"onnxruntime-genai cannot load `{path}`: {reason}", hint) from failure
        return _Generated(model, vocabulary, min(context, longest))


RUNTIME = OnnxRuntimeGenai()
