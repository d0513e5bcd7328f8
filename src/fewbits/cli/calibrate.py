"""`fewbits calibrate`: statistics of a model's inputs and gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fewbits.cli import options
from fewbits.cli.output import note_default_text, progress_for, show


def calibrate(
    model: options.ModelArg,
    out: Annotated[Path, typer.Option("-o", "--out", metavar="STATS", help="Folder for the statistics.")],
    data: options.Calibration = None,
    imatrix: Annotated[
        Path | None, typer.Option("--imatrix", metavar="FILE", help="Also write llama.cpp's importance matrix here, .gguf or .dat.")
    ] = None,
    weights: options.Weights = None,
    samples: options.Samples = 512,
    length: Annotated[
        str | None, typer.Option("--length", help="Tokens in a sample, of one kind too (books=4096), or `data`: as each document.")
    ] = None,
    seed: options.Seed = 0,
    held_out: Annotated[list[Path] | None, typer.Option("--held-out", help="The text that results will be judged on.")] = None,
    no_hessians: Annotated[bool, typer.Option("--no-hessians", help="No second moments between columns: gptq needs them.")] = False,
    no_gradients: Annotated[
        bool, typer.Option("--no-gradients", help="No backward pass: nothing is known of what moves the loss.")
    ] = False,
    memory: options.Memory = "1GB",
    merge: Annotated[list[Path] | None, typer.Option("--merge", help="Add these to statistics of other texts, taken before.")] = None,
    device: options.Device = "auto",
    executor: options.Executor = "local",
    store: options.Store = None,
    shards: options.Shards = 1,
    offline: options.Offline = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Statistics of a model on a text (and llama.cpp's imatrix), and how well that text represents use."""
    from fewbits.calibration import calibrate as run
    from fewbits.reporting.terminal import calibration

    if not data and not (as_json or quiet):
        note_default_text(model, "calibrated")
    result = run(
        model, out, data=data or (), samples=samples, weights=weights, length=length, seed=seed, held_out=held_out or (),
        no_hessians=no_hessians, no_gradients=no_gradients, memory=options.bytes_of(memory), merge=merge or (), imatrix=imatrix,
        device=device, executor=executor, store=store, shards=shards, offline=offline,
        progress=progress_for(as_json, quiet),
    )  # fmt: skip
    show(result, calibration.show, as_json, quiet)
    if imatrix is not None and not (as_json or quiet):
        calibration.wrote_importance(imatrix)
