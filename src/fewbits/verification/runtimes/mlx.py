"""mlx-lm: its own loader and model. On the GPU of a Mac the folder runs as it is.

On a CPU, where MLX multiplies packed weights far more slowly than floats, it computes in float32, and the first few tokens show that its
packed layers give what its decoded ones do: the text is then run with the weights as MLX itself decodes them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits.errors import InputError
from fewbits.store.untrusted import first_line
from fewbits.targets.mlx import contents, package
from fewbits.targets.mlx.arrays import to_torch
from fewbits.verification.runtimes import Runtime
from fewbits.verification.session import Session

if TYPE_CHECKING:
    from torch import Tensor


_TRIED = 8  # tokens that packed layers multiply on a CPU
_SAME = 1e-3  # of the spread of logits: float32 in another order, through all layers, is a hundredth of this


class _Loaded(Session):
    def __init__(self, model: Any, vocabulary: int, context: int) -> None:
        self._model, self.vocabulary, self.context = model, vocabulary, context
        self.timed = _on_a_gpu()  # elsewhere it runs with decoded weights

    def logits(self, tokens: list[int]) -> Tensor:
        import mlx.core as mx

        self.check(tokens, len(tokens))
        logits = self._model(mx.array([tokens]))[0].astype(mx.float32)
        return to_torch(logits)[:, : self.vocabulary]

    def following(self, tokens: list[int], count: int) -> Iterator[int]:
        import mlx.core as mx
        from mlx_lm.models.cache import make_prompt_cache

        self.check(tokens, len(tokens) + count)
        cache, new = make_prompt_cache(self._model), tokens
        for _ in range(count):
            logits = self._model(mx.array([new]), cache=cache)[0, -1, : self.vocabulary]
            new = [int(to_torch(mx.argmax(logits, keepdims=True))[0])]
            yield new[0]

    def close(self) -> None:
        import mlx.core as mx

        self._model = None
        mx.clear_cache()


class Mlx(Runtime):
    name = "mlx"
    extra = "mlx"

    def missing(self) -> str | None:
        return package.missing()

    def version(self) -> str:
        from importlib.metadata import version

        return f"mlx {version('mlx')}, mlx-lm {version('mlx-lm')}"

    def remark(self, path: Path) -> str:
        return "" if _on_a_gpu() else "; on the CPU, in float32"

    def takes(self, path: Path) -> bool:
        return path.is_dir() and contents.is_mlx(path)

    def open(self, path: Path, context: int) -> Session:
        if not path.is_dir():
            raise InputError(f"there is no folder `{path}`", "give one that `fewbits export --to mlx` or `mlx_lm.convert` wrote")
        contents.contents(path)  # what contradicts itself is an error here, where MLX might read beyond a tensor
        hint = "write the folder anew with `fewbits export --to mlx`, or try a newer mlx-lm"
        try:
            model, settings = package.loaded(path)
            text = settings.get("text_config")
            vocabulary = int((text.get("vocab_size") if isinstance(text, dict) else None) or settings["vocab_size"])
        except Exception as failure:
            raise InputError(f"mlx-lm cannot load `{path}`: {first_line(failure)}", hint) from failure
        if not _on_a_gpu():
            model = _decoded(model, path, min(vocabulary, _TRIED))
        return _Loaded(model, vocabulary, context)


def _on_a_gpu() -> bool:
    import mlx.core as mx

    return bool(mx.default_device() == mx.gpu)


def _decoded(model: Any, path: Path, count: int) -> Any:
    """The same model with decoded weights, all in float32. An error: its packed layers compute something else."""
    import mlx.core as mx
    from mlx_lm.utils import dequantize_model

    model.set_dtype(mx.float32)  # scales too, so that decoding rounds nothing
    tokens = mx.array([list(range(count))])
    packed = to_torch(model(tokens).astype(mx.float32))
    model = dequantize_model(model)
    model.set_dtype(mx.float32)  # small floats are decoded to bfloat16, exactly
    decoded = to_torch(model(tokens).astype(mx.float32))
    if not (packed - decoded).abs().max() <= _SAME * decoded.std():
        far = float((packed - decoded).abs().max() / decoded.std())
        raise InputError(
            f"MLX's packed layers and its decoded ones give logits of `{path}` that are {far:.2g} of their spread apart",
            "this is a fault of MLX, or the folder is damaged: try a newer mlx",
        )
    return model


RUNTIME = Mlx()
