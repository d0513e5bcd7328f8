"""Options that several verbs take, and how their texts are read."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Annotated

import typer

from fewbits.errors import InputError

Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, nothing else there.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No tables and no progress.")]
ModelArg = Annotated[
    str, typer.Argument(metavar="MODEL", help="A folder, a GGUF file, or a hub id: owner/name, owner/name@revision, its address.")
]
Data = Annotated[list[Path] | None, typer.Option("--data", help="Held-out text, as PATH or KIND=PATH. Default: the embedded text.")]
Calibration = Annotated[
    list[str] | None,
    typer.Option("--data", help="Text to calibrate with, as PATH or KIND=PATH: text, JSONL, Parquet, a folder, - (stdin)."),
]
Stats = Annotated[Path | None, typer.Option("--stats", help="Statistics that `fewbits calibrate` wrote, instead of new ones.")]
Like = Annotated[
    Path | None, typer.Option("--like", metavar="FLOAT.gguf", help="A float GGUF of the same model: any architecture, laid out like it.")
]
Converter = Annotated[
    str | None, typer.Option("--converter", metavar="PATH", help="llama.cpp's checkout, which makes that file; or pip, which fetches one.")
]
Imatrix = Annotated[
    Path | None, typer.Option("--imatrix", metavar="FILE", help="llama.cpp's importance matrix, .gguf or .dat, in place of calibrating.")
]
HeldOut = Annotated[
    list[Path] | None, typer.Option("--held-out", help="Text to judge on, as PATH or KIND=PATH. Default: a part of --data.")
]
Weights = Annotated[
    str | None, typer.Option("--weights", help="Tokens of each kind of text (a file's stem, or KIND) in proportion: prose=1,code=2.")
]
Samples = Annotated[int, typer.Option("--samples", min=1, help="Samples to calibrate with, at most.")]
Memory = Annotated[
    str, typer.Option("--memory", help="For hidden states; what is beyond goes to disk. Experts that exceed it are read one by one.")
]
Device = Annotated[
    str, typer.Option("--device", help="Where the float model runs: cpu, cuda, cuda:1, mps, xpu; auto: a GPU if there is one.")
]
_WHO = "Who works: local (this process), local:4 (so many), ray, ray://HOST:PORT"
Executor = Annotated[str, typer.Option("--executor", help=f"{_WHO}.")]
ExecutorOrAuto = Annotated[str, typer.Option("--executor", help=f"{_WHO}; auto: as many as pay.")]
Store = Annotated[
    str | None, typer.Option("--store", help="Where workers that share no folder leave results: s3://bucket/folder, or what fsspec knows.")
]
Shards = Annotated[int, typer.Option("--shards", min=1, help="Parts of the samples to calibrate apart, each by one worker, and add up.")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Start anew, without what an earlier run of this output had finished.")]
Seed = Annotated[int, typer.Option("--seed", help="Which samples are drawn.")]
MaxKl = Annotated[float | None, typer.Option("--max-kl", help="Fail above this mean KL divergence.")]
MinAgreement = Annotated[float | None, typer.Option("--min-agreement", help="Fail below this share of equal top tokens.")]
MaxPplRatio = Annotated[float | None, typer.Option("--max-ppl-ratio", help="Fail above this perplexity ratio.")]
MinCosine = Annotated[float | None, typer.Option("--min-cosine", help="Of encoders and .onnx files: fail below this mean cosine.")]
MaxError = Annotated[float | None, typer.Option("--max-error", help="Of .onnx files: fail above this relative error of an output.")]
Size = Annotated[str | None, typer.Option("--size", help="4.5bpw (all weights), 3.2GB (the file), or q4_k_m: llama.cpp's mix so named.")]
To = Annotated[
    str | None, typer.Option("--to", help="gguf, onnx, onnx-genai, safetensors, mlx or fewbits. Default: by the output's name, or gguf.")
]
SplitSize = Annotated[str | None, typer.Option("--split-size", help="GGUF in a folder of files of at most so much, such as 2GB.")]
Fits = Annotated[
    str | None,
    typer.Option("--fits", metavar="DEVICE", help="Memory that weights and KV cache must fit: 8GB, or devices such as rtx4090, 2x3090."),
]


def tokens_of(text: str | int) -> int:
    from fewbits.devices.units import parse_tokens

    return parse_tokens(text)


Context = Annotated[
    int | None,
    typer.Option("--context", metavar="TOKENS", parser=tokens_of, help="Tokens that --fits leaves room for, such as 8k. Default: 4096."),
]
Formats = Annotated[str | None, typer.Option("--formats", help="Formats to choose from, separated by commas.")]
Override = Annotated[
    list[str] | None,
    typer.Option("--override", help="REGEX=FORMAT (or keep) for the weights it matches; >= FORMAT: no fewer bits, <= FORMAT: no more."),
]
Strategy = Annotated[str, typer.Option("--strategy", help="solve (the best plan), or threshold (4, 8 or 16 bits), to compare.")]
Together = Annotated[
    list[str] | None, typer.Option("--together", help="REGEX: weights it matches with the same text in its groups share a format.")
]
MinSpeed = Annotated[float | None, typer.Option("--min-speed", min=0, help="Tokens per second that the plan must be predicted to reach.")]
Bandwidth = Annotated[str, typer.Option("--bandwidth", help="What the memory reads, for the forecast of speed.")]
Length = Annotated[
    str | None, typer.Option("--length", help="Tokens in a window: 512 (or what the model takes), of one kind of text too: books=4096.")
]
Tokens = Annotated[int, typer.Option("--tokens", min=1, help="About how many tokens to judge on (whole windows).")]
Within = Annotated[
    str | None,
    typer.Option("--within", metavar="TIME", help="Be done in 2h, 20min ...: samples, formats and tuning that there is time for."),
]
BEGAN = time.monotonic()  # before torch is loaded, which takes seconds of the time that a command may take
Offline = Annotated[bool, typer.Option("--offline", help="Never download.")]


def names_of(text: str | None) -> list[str]:
    return [name.strip() for name in (text or "").split(",") if name.strip()]


def lengths_of(text: str) -> list[int]:
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise InputError(f"`--lengths {text}` is not a list of lengths", "for example 128,512")
    return [int(number) for number in text.split(",")]


def bytes_of(text: str, option: str = "--memory") -> int:
    from fewbits.devices.units import parse_memory

    return parse_memory(text, option)
