"""`fewbits run`: text from an artifact."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fewbits.cli.options import Json, Quiet, tokens_of
from fewbits.cli.output import progress_for, show_json


def run(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A .gguf, an output of quantize, its .work folder or artifact.")],
    prompt: Annotated[str, typer.Argument(help="What to continue, or to answer where the model has a chat template.")],
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", min=1, help="New tokens, at most.")] = 128,
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
    """Generate text with fewbits' own kernels."""
    from fewbits.inference.engine import Choice
    from fewbits.inference.engine import run as generate
    from fewbits.reporting.terminal import generation

    shown = None if as_json or quiet else generation.stream
    generated = generate(
        out, prompt, max_tokens=max_tokens, choice=Choice(temperature, top_p, seed), raw=raw, context=context, kv=kv, on_text=shown,
        progress=progress_for(as_json, quiet),
    )  # fmt: skip
    if as_json:
        show_json(generated.to_dict())
        return
    generation.ended(generated, quiet)
    if stats:
        generation.stats(generated.stats)
