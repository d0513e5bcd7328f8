"""`fewbits run` with a folder for mlx-lm, by mlx-lm's own generator: with its packed kernels, its KV cache, its sampling."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fewbits.errors import InputError, MissingError
from fewbits.inference.generated import Choice
from fewbits.inference.text_model import Footprint
from fewbits.model.tokenizer import load_tokenizer
from fewbits.store.untrusted import first_line
from fewbits.targets.mlx import contents, package


def takes(folder: Path) -> bool:
    return not (folder / "fewbits.json").is_file() and contents.is_mlx(folder)


def opened(folder: Path, context: int | None, kv: str | None) -> MlxModel:
    """`kv`: refused, as mlx-lm's generator is run as it is."""
    if reason := package.missing():
        raise MissingError(f"mlx cannot run here: {reason}", package.HINT)
    if kv not in (None, "float"):
        raise InputError(f"the KV cache cannot be {kv} here: mlx-lm's generator is run as it is", "leave `--kv` out")
    return MlxModel(folder, context)


class MlxModel:
    def __init__(self, folder: Path, context: int | None) -> None:
        self.context = context
        self._model, self._wrapper, settings = _loaded(folder)
        longest = settings.get("max_position_embeddings")
        self.longest = longest if isinstance(longest, int) and longest > 0 else None
        self.tokenizer = load_tokenizer(folder)
        self._cache: Any = ()
        self._prompt_read = 0

    @property
    def engine(self) -> str:
        import mlx.core as mx

        return f"mlx-lm on the {'GPU' if mx.default_device() == mx.gpu else 'CPU'}"

    def tokens(self, prompt: list[int], count: int, choice: Choice, stopped: Callable[[], bool]) -> Iterator[int]:
        import mlx.core as mx
        from mlx_lm import stream_generate
        from mlx_lm.models.cache import make_prompt_cache
        from mlx_lm.sample_utils import make_sampler

        mx.random.seed(choice.seed)
        self._prompt_read = len(prompt)
        sampler, self._cache = make_sampler(choice.temperature, choice.top_p), make_prompt_cache(self._model)
        for last in stream_generate(self._model, self._wrapper, prompt, max_tokens=count, sampler=sampler, prompt_cache=self._cache):
            if last.finish_reason == "stop" or stopped():
                return
            yield int(last.token)

    def footprint(self) -> Footprint:
        from mlx.utils import tree_flatten

        weights = sum(array.nbytes for _, array in tree_flatten(self._model.parameters()))
        return Footprint(weights, sum(int(layer.nbytes) for layer in self._cache), 1, ("mlx",), self._prompt_read)


def _loaded(folder: Path) -> tuple[Any, Any, dict[str, Any]]:
    from mlx_lm.utils import load_tokenizer as wrapped

    contents.contents(folder)  # what contradicts itself is an error here
    try:
        model, settings = package.loaded(folder)
        return model, wrapped(folder, {"trust_remote_code": False}, eos_token_ids=settings.get("eos_token_id")), settings
    except Exception as failure:
        raise InputError(
            f"mlx-lm cannot load `{folder}`: {first_line(failure)}", "write the folder anew, or try a newer mlx-lm"
        ) from failure
