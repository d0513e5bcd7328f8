"""`fewbits run`: generates text from an artifact with fewbits' kernels.

The Llama family has a native decoder; transformers runs every other architecture, with the same kernels for its products.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from fewbits.errors import InputError
from fewbits.inference.generated import Choice, Generated, Stats, peak_memory
from fewbits.progress import Progress, silent

if TYPE_CHECKING:
    from torch import Tensor

    from fewbits.artifact import Artifact

__all__ = ["Choice", "Engine", "Generated", "Stats", "open_engine", "run"]


class Engine(Protocol):
    """A loaded model and the KV cache of one text."""

    def prompt(self, tokens: list[int], every: bool = True) -> Tensor: ...  # -> (tokens, vocabulary); without `every`, at least the last
    def step(self, token: int) -> Tensor: ...  # -> (vocabulary,)
    def kernels_used(self) -> list[str]: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def cache_bytes(self) -> int: ...


def run(
    folder: str | Path,
    prompt: str,
    *,
    max_tokens: int = 128,
    choice: Choice | None = None,
    raw: bool = False,
    context: int | None = None,
    kv: str | None = None,
    on_text: Callable[[str], None] | None = None,
    progress: Progress[Any] = silent,
) -> Generated:
    """Continue a prompt with the packed weights of an artifact, or of a GGUF of anybody.

    `raw`: the prompt without the model's chat template. `kv`: the format of the KV cache, by default the plan's.
    """
    import torch

    from fewbits.inference import mlx_folder

    if mlx_folder.takes(Path(folder)):
        return mlx_folder.run(Path(folder), prompt, max_tokens, choice or Choice(), raw=raw, kv=kv, on_text=on_text)
    artifact = _opened(Path(folder)).expect_modules()
    tokens = _prompt_tokens(artifact.tokenizer, prompt, raw)
    if not tokens:
        raise InputError("the prompt has no tokens", "give some text")
    engine, name = open_engine(artifact, kv, context or len(tokens) + max_tokens, progress)
    stops = _stops(artifact)
    started = time.perf_counter()
    logits = engine.prompt(tokens, every=False)[-1]
    if not logits.isfinite().all():
        artifact.check(progress)  # raises with the name of a weight that is not finite, if there is one
        raise InputError("the logits are not finite", "the model overflows on this text, or the artifact is damaged")
    first = time.perf_counter()
    new, steps = list[int](), -1  # the first token comes from the logits of the prompt
    streamed = _StreamedText(artifact.tokenizer, on_text)
    for token in _sampled(engine, logits, max_tokens, choice or Choice()):
        steps += 1
        if token in stops:
            break
        new.append(token)
        streamed.add(token)
    ended = time.perf_counter()
    stats = Stats(
        engine=name,
        prompt_tokens=len(tokens),
        new_tokens=len(new),
        prompt_tokens_per_second=len(tokens) / (first - started),
        tokens_per_second=steps / (ended - first) if steps > 0 else None,
        weight_bytes=engine.nbytes,
        cache_bytes=engine.cache_bytes,
        peak_memory_bytes=peak_memory(),
        threads=torch.get_num_threads(),
        kernels=tuple(engine.kernels_used()),
    )
    return Generated(streamed.all(), tuple(new), "length" if len(new) == max_tokens else "end", stats)


def _opened(path: Path) -> Artifact:
    from fewbits.artifact import Artifact
    from fewbits.artifact.located import located
    from fewbits.artifact.packed_gguf import PackedGguf

    beside = located(path)
    if beside is None and path.suffix.lower() == ".gguf" and path.is_file():
        return PackedGguf(path)
    return Artifact(beside or path)


def open_engine(artifact: Artifact, kv: str | None, context: int, progress: Progress[Any]) -> tuple[Engine, str]:
    """The engine, and its name in `Stats`."""
    from fewbits.artifact.packed_gguf import PackedGguf
    from fewbits.inference import llama
    from fewbits.store.scratch import scratch_folder

    wanted = kv or artifact.plan.kv or "float"
    if (reason := llama.unsupported(artifact, wanted, context)) is None:
        return llama.LlamaDecoder(artifact, wanted, context, progress), "native"
    from fewbits.inference.transformers_engine import TransformersEngine

    if kv is not None and kv != (artifact.plan.kv or "float"):
        raise InputError(f"the KV cache cannot be {kv} here: {reason}", "leave `--kv` out")
    if not isinstance(artifact, PackedGguf):
        return TransformersEngine(artifact), f"transformers: {reason}"
    with scratch_folder() as scratch:  # transformers loads a folder
        return TransformersEngine(artifact.as_folder(Path(scratch) / "artifact")), f"transformers: {reason}"


def _sampled(engine: Engine, logits: Tensor, count: int, choice: Choice) -> Iterator[int]:
    import torch

    generator = torch.Generator().manual_seed(choice.seed)
    for i in range(count):
        token = _next(logits, choice, generator)
        yield token
        if i + 1 < count:
            logits = engine.step(token)


def _next(logits: Tensor, choice: Choice, generator: Any) -> int:
    import torch

    if choice.temperature == 0:
        return int(logits.argmax())
    likely, order = torch.softmax(logits.float() / choice.temperature, -1).sort(descending=True)
    before = likely.cumsum(-1) - likely
    likely = likely.where(before < choice.top_p, 0.0)  # never drops the likeliest
    return int(order[torch.multinomial(likely, 1, generator=generator)])


class _StreamedText:
    """Text as it grows. A token may end inside a character: it is shown when the character is complete."""

    def __init__(self, tokenizer: Any, on_text: Callable[[str], None] | None) -> None:
        self._tokenizer, self._on_text, self._tokens, self._length = tokenizer, on_text, list[int](), 0

    def all(self) -> str:
        return str(self._tokenizer.decode(self._tokens, skip_special_tokens=True))

    def add(self, token: int) -> None:
        self._tokens.append(token)
        if self._on_text is None:
            return
        text = self.all()
        if not text.endswith("\ufffd"):
            self._on_text(text[self._length :])
            self._length = len(text)


def _prompt_tokens(tokenizer: Any, prompt: str, raw: bool) -> list[int]:
    if raw or not getattr(tokenizer, "chat_template", None):
        return list(tokenizer(prompt)["input_ids"])
    message = [{"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _stops(artifact: Artifact) -> set[int]:
    from transformers import GenerationConfig

    settings = [artifact.config, artifact.tokenizer]
    if (artifact.path / "generation_config.json").is_file():
        settings.append(GenerationConfig.from_pretrained(artifact.path, local_files_only=True))
    ends = [getattr(each, "eos_token_id", None) for each in settings]
    return {token for end in ends for token in (end if isinstance(end, list) else [end]) if token is not None}
