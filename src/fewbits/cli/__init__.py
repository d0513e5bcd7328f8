"""The command line. In: words. Out: data on stdout (`--json`), everything for people on stderr, and an exit code.

A file for each verb, which builds the options and calls one function; options.py holds what several verbs take, output.py what they print.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated, NoReturn

import typer

from fewbits.cli import (
    bench,
    calibrate,
    compare,
    demo,
    doctor,
    export,
    fit,
    formats,
    inspect,
    measure,
    plan,
    publish,
    quantize,
    report,
    run,
    serve,
    signals,
    verify,
)
from fewbits.errors import FewbitsError

app = typer.Typer(
    no_args_is_help=True, add_completion=True, pretty_exceptions_enable=False, rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)  # fmt: skip
for verb in (  # in the order of --help
    demo.demo, fit.fit, quantize.quantize, verify.verify, run.run, serve.serve, export.export, publish.publish, report.report,
    inspect.inspect, formats.formats, compare.compare, calibrate.calibrate, measure.measure, plan.plan, doctor.doctor,
):  # fmt: skip
    app.command()(verb)
app.add_typer(bench.bench, name="bench")


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        typer.echo(f"fewbits {version('fewbits')}")
        raise typer.Exit


@app.callback()
def fewbits(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="The version of fewbits.")] = False,
) -> None:
    """Quantize a transformer to a budget, into a file that a real runtime loads, with proof."""


def main() -> NoReturn:
    """Foreseeable failures end in a message, a hint and an exit code; others keep their traceback."""
    from fewbits.store.files import is_full_disk

    _quiet_libraries()
    _wait_asleep()
    signals.arm()
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
    except SystemExit as ended:
        signals.say(ended.code)
        raise
    sys.exit(0)


def _fail(message: str, hint: str, code: int) -> NoReturn:
    from fewbits.reporting.terminal import error

    error(message, hint)
    sys.exit(code)


def _quiet_libraries() -> None:
    """Keeps their progress bars and notes out of ours; their errors still come through."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def _wait_asleep() -> None:
    """Threads of OpenMP (torch's and ours) wait asleep at barriers. Spinning there takes the core from whom they wait for, where other
    programs compute too. It is read when the library is loaded, so it must be said before torch is imported."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
