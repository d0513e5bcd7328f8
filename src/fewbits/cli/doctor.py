"""`fewbits doctor`: what runs on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fewbits.cli.options import Json
from fewbits.cli.output import show

if TYPE_CHECKING:
    from fewbits.diagnosis import Diagnosis


def doctor(as_json: Json = False) -> None:
    """What runs here: instruction sets, kernels, runtimes, versions; what is missing and how to get it."""
    from fewbits.diagnosis import diagnose

    show(diagnose(), _table, as_json)


def _table(diagnosis: Diagnosis) -> None:
    from fewbits.reporting.terminal import console, new_table, size

    memory = f", {size(diagnosis.memory)} of memory" if diagnosis.memory else ""
    system = f"{diagnosis.system}, {diagnosis.processors} processors{memory}"
    console.print(f"[bold]fewbits {diagnosis.fewbits}[/] on Python {diagnosis.python}, {system}")
    if diagnosis.forced:
        console.print(f"FEWBITS_KERNEL forces [bold]{diagnosis.forced}[/]")
    kernels = new_table("kernels, fastest first", ("backend", "formats", "multiplies packed", "why not"))
    for backend in diagnosis.backends:
        kernels.add_row(backend.name, str(backend.formats), str(backend.multiplies), backend.missing or "")
    console.print(kernels)
    packages = new_table("packages", ("name", "version", "for", "how to get it"))
    for package in diagnosis.packages:
        missing = package.version is None
        packages.add_row(package.name, "[red]missing[/]" if missing else package.version, package.purpose, package.get if missing else "")
    console.print(packages)
