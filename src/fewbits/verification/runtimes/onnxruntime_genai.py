"""onnxruntime-genai on the CPU, with the threads that torch uses: its own generator, KV cache and greedy search."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits.errors import InputError
from fewbits.inference import genai_folder
from fewbits.store.untrusted import first_line, read_json
from fewbits.verification.runtimes import Runtime
from fewbits.verification.session import Session

if TYPE_CHECKING:
    from torch import Tensor

_GREEDY = {"do_sample": False, "num_beams": 1, "repetition_penalty": 1.0}


def _package() -> Any:
    import onnxruntime_genai

    return onnxruntime_genai


class _Generated(Session):
    timed = True

    def __init__(self, model: Any, vocabulary: int, context: int) -> None:
        self._model, self.vocabulary, self.context = model, vocabulary, context

    def logits(self, tokens: list[int]) -> Tensor:
        """`get_output` has the graph's whole output; `get_logits` would have the last position alone."""
        import torch

        generator = self._fed(tokens, len(tokens))
        return torch.from_numpy(generator.get_output("logits")[0].copy()).float()

    def following(self, tokens: list[int], count: int) -> Iterator[int]:
        """By genai's own greedy search, which ends at the end of a text."""
        generator = self._fed(tokens, len(tokens) + count)
        for _ in range(count):
            if generator.is_done():
                return
            generator.generate_next_token()
            yield int(generator.get_next_tokens()[0])

    def close(self) -> None:
        self._model = None

    def _fed(self, tokens: list[int], length: int) -> Any:
        import numpy as np

        self.check(tokens, length)
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
        return genai_folder.missing()

    def version(self) -> str:
        from importlib.metadata import version

        return f"onnxruntime-genai {version('onnxruntime-genai')}, onnxruntime {version('onnxruntime')}"

    def takes(self, path: Path) -> bool:
        return genai_folder.takes(path)

    def open(self, path: Path, context: int) -> Session:

        hint = "give a folder that `fewbits export --to onnx-genai` wrote"
        about = read_json(path / genai_folder.CONFIG, hint)
        try:
            vocabulary, longest = int(about["model"]["vocab_size"]), int(about["model"]["context_length"])
            model = genai_folder.loaded(path)
        except Exception as failure:
            raise InputError(f"onnxruntime-genai cannot load `{path}`: {first_line(failure)}", hint) from failure
        return _Generated(model, vocabulary, min(context, longest))


RUNTIME = OnnxRuntimeGenai()
