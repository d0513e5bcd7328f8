"""transformers itself, with compressed-tensors if the folder needs it: in float32 on the CPU, weights decoded while loading."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits.artifact.manifest import HINT, METHOD, NAME
from fewbits.errors import InputError, MissingError
from fewbits.store.untrusted import first_line, read_json
from fewbits.targets.compressed_tensors import schemes
from fewbits.verification.runtimes import Runtime
from fewbits.verification.session import Session

if TYPE_CHECKING:
    from torch import Tensor

_LEAST = (0, 16)  # the first compressed-tensors that decodes mxfp4
_HINT = "write the folder anew with `fewbits export --to safetensors`"


class _Loaded(Session):
    def __init__(self, module: Any) -> None:
        self._module = module
        self.vocabulary = int(module.config.vocab_size)

    def logits(self, tokens: list[int]) -> Tensor:
        import torch

        with torch.inference_mode():
            logits: Tensor = self._module(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float()
        return logits

    def close(self) -> None:
        self._module = None


class Transformers(Runtime):
    name = "transformers"
    extra = "ct"

    def missing(self) -> str | None:
        installed = schemes.installed()
        if installed is None:
            return "the package `compressed-tensors` is not installed"
        least, shown = (".".join(map(str, version)) for version in (_LEAST, installed))
        return None if installed >= _LEAST else f"compressed-tensors is {shown}, and {least} is needed"

    def version(self) -> str:
        from importlib.metadata import version

        return f"transformers {version('transformers')}, compressed-tensors {version('compressed-tensors')}"

    def takes(self, path: Path) -> bool:
        ours = (path / NAME).is_file()  # an artifact: the torch runtime runs it
        return not ours and (path / "config.json").is_file() and any(path.glob("*.safetensors"))

    def open(self, path: Path, context: int) -> Session:
        import torch
        from transformers import AutoModelForCausalLM

        if not path.is_dir():
            raise InputError(f"there is no folder `{path}`", "give one that `fewbits export --to safetensors` wrote")
        how: dict[str, Any] = {"dtype": torch.float32, "local_files_only": True, "trust_remote_code": False}
        how |= {"use_safetensors": True, "output_loading_info": True}  # never a pickle
        if quantization := read_json(path / "config.json", _HINT).get("quantization_config"):
            if quantization.get("quant_method") == METHOD:
                raise InputError(f"`{path}` has weights of fewbits, but no {NAME} that says what they are", HINT)
            from transformers import CompressedTensorsConfig

            for group in quantization.get("config_groups", {}).values():
                weights = group.get("weights") or {}
                if why_not := schemes.unread(weights.get("type"), weights.get("num_bits")):
                    raise MissingError(f"`{path}` cannot be loaded: {why_not}", "pip install --upgrade compressed-tensors")
            how["quantization_config"] = CompressedTensorsConfig(dequantize=True)
        try:
            with _quiet():
                module, info = AutoModelForCausalLM.from_pretrained(path, **how)
        except Exception as failure:
            raise InputError(f"transformers cannot load `{path}`: {first_line(failure)}", _HINT) from failure
        for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            if names := sorted(map(str, info.get(what) or ())):  # transformers fills in random weights, and only warns
                kind = what.removesuffix("_keys")
                raise InputError(f"`{path}` does not fit its config.json: `{names[0]}` is {kind} ({len(names)} in all)", _HINT)
        return _Loaded(module.float().eval())  # 4-bit floats are decoded to bfloat16, exactly


@contextmanager
def _quiet() -> Iterator[None]:
    """Hides the progress bars and warnings of both packages; errors are raised all the same."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


RUNTIME = Transformers()
