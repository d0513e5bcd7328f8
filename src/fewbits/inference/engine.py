"""`fewbits run`: generates text from a file with fewbits' kernels, or with the runtime that a folder is for.

The Llama family has a native decoder; transformers runs every other architecture, with the same kernels for its products.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits.errors import InputError
from fewbits.inference.generated import Choice, Generated, Stats
from fewbits.inference.stepped_model import Engine, SteppedModel
from fewbits.inference.text_model import ROOM, Continuation, Limits, TextModel, prompt_tokens
from fewbits.progress import Progress, silent

if TYPE_CHECKING:
    from fewbits.artifact import Artifact

__all__ = ["Choice", "Engine", "Generated", "Stats", "open_engine", "open_model", "run"]


def run(
    out: str | Path,
    prompt: str,
    *,
    max_tokens: int = 128,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    system: str | None = None,
    raw: bool = False,
    context: int | None = None,
    kv: str | None = None,
    on_text: Callable[[str], None] | None = None,
    progress: Progress[Any] = silent,
) -> Generated:
    """Continue a prompt with the packed weights of an artifact, of a GGUF of anybody, or of a folder for mlx-lm or onnxruntime-genai.

    `temperature` 0 takes the likeliest token. `system`: said before the prompt, where the model has a chat template; `raw`: the prompt
    without it. `kv`: the format of the KV cache, by default the plan's. `on_text` is called with each piece of text as it comes.
    """
    limits = Limits(max_tokens, Choice(temperature, top_p, seed))
    model = open_model(Path(out), context=context, kv=kv, progress=progress)
    continuation = Continuation(model, prompt_tokens(model.tokenizer, prompt, system, raw), limits)
    for text in continuation:
        if on_text:
            on_text(text)
    return continuation.generated()


def open_model(path: Path, *, context: int | None, kv: str | None, progress: Progress[Any]) -> TextModel:
    """`context` None: room for what the first text needs."""
    from fewbits.inference import genai_folder, mlx_folder

    if mlx_folder.takes(path):
        return mlx_folder.opened(path, context, kv)
    if genai_folder.takes(path):
        return genai_folder.opened(path, context, kv)
    artifact = _opened(path).expect_modules()
    return SteppedModel(
        artifact.tokenizer,
        _ends(artifact),
        lambda room: open_engine(artifact, kv, room, progress),
        context,
        getattr(artifact.config, "max_position_embeddings", None),
        on_infinite=lambda: artifact.check(progress),  # raises with the name of a weight that is not finite, if there is one
    )


def open_for_texts(path: Path, *, context: int | None, kv: str | None, progress: Progress[Any]) -> TextModel:
    """For any number of texts, loaded at once; by default with room for 4096 tokens, or as many as the model takes."""
    model = open_model(path, context=context, kv=kv, progress=progress)
    if model.context is None:
        model.context = min(ROOM, model.longest or ROOM)
    if isinstance(model, SteppedModel):
        model.load()
    return model


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


def _ends(artifact: Artifact) -> set[int]:
    from transformers import GenerationConfig

    settings = [artifact.config, artifact.tokenizer]
    if (artifact.path / "generation_config.json").is_file():
        settings.append(GenerationConfig.from_pretrained(artifact.path, local_files_only=True))
    ends = [getattr(each, "eos_token_id", None) for each in settings]
    return {token for end in ends for token in (end if isinstance(end, list) else [end]) if token is not None}
