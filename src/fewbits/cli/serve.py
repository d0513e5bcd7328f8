"""`fewbits serve`: an OpenAI-compatible endpoint."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from fewbits.cli.options import Quiet, tokens_of
from fewbits.cli.output import progress_for

_KEY = "FEWBITS_API_KEY"


def serve(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A .gguf, an output of quantize, a folder for mlx-lm or onnxruntime-genai.")],
    host: Annotated[str, typer.Option("--host", help="Address to listen on; 0.0.0.0 is open to the network.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: a free one, which is said.")] = 8080,
    name: Annotated[str | None, typer.Option("--name", help="What clients give as `model`. Default: the file's name.")] = None,
    queue: Annotated[int, typer.Option("--queue", min=0, help="Requests that may wait; one more is answered 429 at once.")] = 16,
    context: Annotated[
        int | None,
        typer.Option(
            "--context", metavar="TOKENS", parser=tokens_of, help="Tokens of a text with its answer. Default: 4096, or what it takes."
        ),
    ] = None,
    kv: Annotated[str | None, typer.Option("--kv", help="KV cache: float, int8 or int4. Default: the plan's.")] = None,
    quiet: Quiet = False,
) -> None:
    """An OpenAI-compatible endpoint on this machine: chat, completions, streaming. FEWBITS_API_KEY: a key that clients must send."""
    from fewbits.inference.serving.server import serve as run
    from fewbits.reporting.terminal import generation

    ready = None if quiet else generation.serving
    run(
        out, host=host, port=port, name=name, queue=queue, api_key=os.environ.get(_KEY), context=context, kv=kv, on_ready=ready,
        progress=progress_for(False, quiet),
    )  # fmt: skip
