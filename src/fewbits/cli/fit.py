"""`fewbits fit`: will it run."""

from __future__ import annotations

from typing import Annotated

import typer

from fewbits.cli.options import Json, Offline, Quiet, names_of, tokens_of
from fewbits.cli.output import show_data, show_json


def fit(
    model: Annotated[str | None, typer.Argument(metavar="[MODEL]", help="A folder with config.json, a GGUF file, or a hub id.")] = None,
    params: Annotated[str | None, typer.Option("--params", help="Instead of a model: its size, such as 7B or 30B-A3B.")] = None,
    device: Annotated[
        str | None, typer.Option("--device", help="Such as rtx4090, 2x3090, 'm3 max 64gb' or 'rtx 3060 + 32GB'. Default: this machine.")
    ] = None,
    ram: Annotated[
        str | None, typer.Option("--ram", help="System memory behind a GPU, for layers that do not fit: 64GB, '64GB ddr5'.")
    ] = None,
    memory: Annotated[str | None, typer.Option("--memory", help="Instead of a device: so much memory, such as 12GB.")] = None,
    context: Annotated[
        int | None,
        typer.Option(
            "--context", metavar="TOKENS", parser=tokens_of, help="Tokens of a text: 8192 or 8k. Default: 4096, or what it takes."
        ),
    ] = None,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Sequences decoded at the same time, each with its own KV cache.")] = 1,
    kv: Annotated[str, typer.Option("--kv", help="KV cache: float, llama.cpp's q8_0, q5_0, q4_0 ..., or fp8, int8, int4.")] = "float",
    formats: Annotated[str | None, typer.Option("--formats", help="Formats or mixes such as q4_k_m, with commas.")] = None,
    runtime: Annotated[
        str, typer.Option("--runtime", help="Whose memory to count: llama.cpp or fewbits (its own, on CPUs).")
    ] = "llama.cpp",
    devices: Annotated[bool, typer.Option("--devices", help="List the devices that are known.")] = False,
    offline: Offline = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Will it run: memory of each format, whether that fits, and how fast it would be; from the config alone."""
    from fewbits.devices import catalogue
    from fewbits.inspection.capacity.estimate import fit as run
    from fewbits.reporting.terminal import capacity, console

    if devices:
        if as_json:
            show_json([each.to_dict() for each in catalogue.all()])
        else:
            with console.on_stdout():
                capacity.devices(catalogue.all())
        return
    estimate = run(
        model, params=params, device=device, memory=memory, context=context, batch=batch, kv=kv, formats=names_of(formats), runtime=runtime,
        offline=offline, ram=ram,
    )  # fmt: skip
    show_data(estimate, capacity.show, as_json, quiet)
    raise typer.Exit(0 if estimate.passed else 1)
