"""`fewbits run` with a folder for mlx-lm, by mlx-lm's own generator: with its packed kernels, its KV cache, its sampling."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fewbits.errors import InputError, MissingError
from fewbits.inference.generated import Choice, Generated, Stats, peak_memory
from fewbits.store.untrusted import first_line
from fewbits.targets.mlx import contents, package


def takes(folder: Path) -> bool:
    return not (folder / "fewbits.json").is_file() and contents.is_mlx(folder)


def run(
    folder: Path,
    prompt: str,
    max_tokens: int,
    choice: Choice,
    *,
    raw: bool,
    kv: str | None,
    on_text: Callable[[str], None] | None,
) -> Generated:
    """`kv`: refused, as mlx-lm's generator is run as it is."""
    if reason := package.missing():
        raise MissingError(f"mlx cannot run here: {reason}", package.HINT)
    if kv not in (None, "float"):
        raise InputError(f"the KV cache cannot be {kv} here: mlx-lm's generator is run as it is", "leave `--kv` out")
    from mlx_lm.models.cache import make_prompt_cache

    model, tokenizer = _loaded(folder)
    cache = make_prompt_cache(model)
    tokens = _tokens(tokenizer, prompt, raw)
    if not tokens:
        raise InputError("the prompt has no tokens", "give some text")
    text, new, last = "", list[int](), None
    for last in _responses(model, tokenizer, tokens, max_tokens, choice, cache):
        if last.finish_reason != "stop":
            new.append(int(last.token))
        if last.text and on_text:
            on_text(last.text)
        text += last.text
    stopped = "end" if last is not None and last.finish_reason == "stop" else "length"
    return Generated(text, tuple(new), stopped, _stats(model, last, new, cache))


def _loaded(folder: Path) -> tuple[Any, Any]:
    from mlx_lm.utils import load_tokenizer

    contents.contents(folder)  # what contradicts itself is an error here
    try:
        model, settings = package.loaded(folder)
        tokenizer = load_tokenizer(folder, {"trust_remote_code": False}, eos_token_ids=settings.get("eos_token_id"))
    except Exception as failure:
        raise InputError(
            f"mlx-lm cannot load `{folder}`: {first_line(failure)}", "write the folder anew, or try a newer mlx-lm"
        ) from failure
    return model, tokenizer


def _tokens(tokenizer: Any, prompt: str, raw: bool) -> list[int]:
    if raw or getattr(tokenizer, "chat_template", None) is None:
        return list(tokenizer.encode(prompt))
    message = [{"role": "user", "content": prompt}]
    return list(tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False))


def _responses(model: Any, tokenizer: Any, tokens: list[int], max_tokens: int, choice: Choice, cache: Any) -> Any:
    import mlx.core as mx
    from mlx_lm import stream_generate
    from mlx_lm.sample_utils import make_sampler

    mx.random.seed(choice.seed)
    sampler = make_sampler(choice.temperature, choice.top_p)
    return stream_generate(model, tokenizer, tokens, max_tokens=max_tokens, sampler=sampler, prompt_cache=cache)


def _stats(model: Any, last: Any, new: list[int], cache: Any) -> Stats:
    import mlx.core as mx
    from mlx.utils import tree_flatten

    device = "GPU" if mx.default_device() == mx.gpu else "CPU"
    return Stats(
        engine=f"mlx-lm on the {device}",
        prompt_tokens=last.prompt_tokens if last else 0,
        new_tokens=len(new),
        prompt_tokens_per_second=last.prompt_tps if last else 0.0,
        tokens_per_second=last.generation_tps if last else None,
        weight_bytes=sum(array.nbytes for _, array in tree_flatten(model.parameters())),
        cache_bytes=sum(int(layer.nbytes) for layer in cache),
        peak_memory_bytes=max(peak_memory(), int(mx.get_peak_memory())),
        threads=1,
        kernels=("mlx",),
    )
