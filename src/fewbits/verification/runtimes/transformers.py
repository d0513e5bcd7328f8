"""transformers itself, with compressed-tensors if the folder needs it: in float32 on the CPU, weights decoded while loading.

A well-formed folder that transformers' own loader cannot take (targets/compressed_tensors/loading.py says which) is decoded layer by layer
by compressed-tensors and run in transformers' float module; the verdict says so.
"""

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
from fewbits.targets.compressed_tensors import contents, loading, schemes
from fewbits.verification.runtimes import Runtime
from fewbits.verification.runtimes.torch import greedy
from fewbits.verification.session import Session

if TYPE_CHECKING:
    from torch import Tensor

_LEAST = (0, 16)  # the first compressed-tensors that decodes mxfp4
_HINT = "write the folder anew with `fewbits export --to safetensors`"


class _Loaded(Session):
    def __init__(self, module: Any) -> None:
        self._module = module
        self.vocabulary = int(module.config.get_text_config().vocab_size)

    def logits(self, tokens: list[int]) -> Tensor:
        import torch

        with torch.inference_mode():
            logits: Tensor = self._module(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float()
        return logits

    def following(self, tokens: list[int], count: int) -> Iterator[int]:
        return greedy(self._module, tokens, count)

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

    def remark(self, path: Path) -> str:
        why = _obstacle(path)
        return f"; decoded layer by layer by compressed-tensors, since {why}" if why else ""

    def open(self, path: Path, context: int) -> Session:
        if not path.is_dir():
            raise InputError(f"there is no folder `{path}`", "give one that `fewbits export --to safetensors` wrote")
        quantization = read_json(path / "config.json", _HINT).get("quantization_config")
        if not quantization:
            return _Loaded(_loaded(path))
        if quantization.get("quant_method") == METHOD:
            raise InputError(f"`{path}` has weights of fewbits, but no {NAME} that says what they are", HINT)
        for group in quantization.get("config_groups", {}).values():
            weights = group.get("weights") or {}
            if why_not := schemes.unread(weights.get("type"), weights.get("num_bits")):
                raise MissingError(f"`{path}` cannot be loaded: {why_not}", "pip install --upgrade compressed-tensors")
        if _obstacle(path):
            contents.types(path)  # what contradicts itself is an error
            with _quiet():
                return _Loaded(loading.decoded_module(_config(path), quantization, contents.files_of(path)).float())
        from transformers import CompressedTensorsConfig

        return _Loaded(_loaded(path, quantization_config=CompressedTensorsConfig(dequantize=True)))


def _config(path: Path) -> Any:
    from fewbits.model.checkpoints.folder import Folder

    config = Folder(path).config
    if hasattr(config, "quantization_config"):  # the module is built in float
        del config.quantization_config
    return config


def _obstacle(path: Path) -> str | None:
    """Why transformers' own loader cannot take this folder. What else is wrong with it comes to light when it is opened."""
    if not path.is_dir() or not contents.is_compressed(path):
        return None
    try:
        groups = contents.groups_of(path)
    except InputError:  # another writer's words
        return None
    with _quiet():
        return loading.obstacle(_config(path), groups)


def _loaded(path: Path, **how: Any) -> Any:
    """By transformers' own loader; missing, unexpected and misshapen tensors are errors."""
    import torch
    import transformers

    how |= {"dtype": torch.float32, "local_files_only": True, "trust_remote_code": False}
    how |= {"use_safetensors": True, "output_loading_info": True}  # never a pickle
    try:
        with _quiet():
            config = transformers.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
            pictures = transformers.models.auto.modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
            reads_pictures = (config.architectures or [None])[0] == pictures.get(config.model_type)
            auto = transformers.AutoModelForImageTextToText if reads_pictures else transformers.AutoModelForCausalLM
            module, info = auto.from_pretrained(path, **how)
    except Exception as failure:
        raise InputError(f"transformers cannot load `{path}`: {first_line(failure)}", _HINT) from failure
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if names := sorted(map(str, info.get(what) or ())):  # transformers fills in random weights, and only warns
            kind = what.removesuffix("_keys")
            raise InputError(f"`{path}` does not fit its config.json: `{names[0]}` is {kind} ({len(names)} in all)", _HINT)
    return module.float().eval()  # 4-bit floats are decoded to bfloat16, exactly


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
