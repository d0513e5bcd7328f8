"""`fewbits run`: text from an artifact; without a prompt, a chat."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from fewbits.cli.chat import chat
from fewbits.cli.options import Json, Quiet, tokens_of
from fewbits.cli.output import progress_for, show_json
from fewbits.errors import InputError
from fewbits.inference.generated import Choice
from fewbits.inference.text_model import Limits

_NO_LIMIT = 1 << 30  # tokens of an answer in a chat: its context ends it


def run(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A .gguf, an output of quantize, its .work folder or artifact.")],
    prompt: Annotated[
        str | None,
        typer.Argument(help="What to continue, or to answer where the model has a chat template; - reads stdin. Without it: a chat."),
    ] = None,
    system: Annotated[str | None, typer.Option("--system", help="What the model is told first, where it has a chat template.")] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option("--max-tokens", "-n", min=1, help="New tokens, at most. Default: 128; in a chat, what the context has room for."),
    ] = None,
    temperature: Annotated[float, typer.Option("--temperature", min=0, help="0: always the likeliest token.")] = 0.0,
    top_p: Annotated[float, typer.Option("--top-p", help="Choose among the likeliest that make up this share.")] = 1.0,
    seed: Annotated[int, typer.Option("--seed", help="Of the choice, where the temperature is above 0.")] = 0,
    raw: Annotated[bool, typer.Option("--raw", help="The prompt as it is, without the chat template.")] = False,
    context: Annotated[
        int | None,
        typer.Option("--context", metavar="TOKENS", parser=tokens_of, help="Tokens to keep room for: 4096 or 4k. Default: as needed."),
    ] = None,
    kv: Annotated[str | None, typer.Option("--kv", help="KV cache: float, int8 or int4. Default: the plan's.")] = None,
    stats: Annotated[bool, typer.Option("--stats", help="Tokens per second, memory and the kernels used, on stderr.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Generate text, or chat, with fewbits' own kernels (with mlx-lm or onnxruntime-genai where a folder is for them)."""
    from fewbits.inference.engine import run as generate
    from fewbits.reporting.terminal import generation

    progress = progress_for(as_json, quiet)
    if prompt is None:
        if as_json:
            raise InputError("`--json` needs a prompt", "give one, or `-` to read it from stdin")
        limits = Limits(max_tokens or _NO_LIMIT, Choice(temperature, top_p, seed))
        chat(out, limits, system=system, raw=raw, context=context, kv=kv, stats=stats, progress=progress)
        return
    shown = None if as_json or quiet else generation.stream
    generated = generate(
        out, sys.stdin.read() if prompt == "-" else prompt, max_tokens=max_tokens or 128, temperature=temperature, top_p=top_p, seed=seed,
        system=system, raw=raw, context=context, kv=kv, on_text=shown, progress=progress,
    )  # fmt: skip
    if as_json:
        show_json(generated.to_dict())
        return
    generation.ended(generated, quiet)
    if stats:
        generation.stats(generated.stats)
