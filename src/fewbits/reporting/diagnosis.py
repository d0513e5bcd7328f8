"""`fewbits doctor` on the screen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fewbits.reporting.terminal import console, new_table, size

if TYPE_CHECKING:
    from fewbits.diagnosis import Diagnosis


def show(found: Diagnosis) -> None:
    memory = f", {size(found.memory)} of memory" if found.memory else ""
    console.print(f"[bold]fewbits {found.fewbits}[/] on Python {found.python}, {found.system}, {found.processors} processors{memory}")
    if found.forced:
        console.print(f"FEWBITS_KERNEL forces [bold]{found.forced}[/]")
    kernels = new_table("kernels, fastest first", ("backend", "formats", "multiplies packed", "why not"))
    for backend in found.backends:
        kernels.add_row(backend.name, str(backend.formats), str(backend.multiplies), backend.missing or "")
    console.print(kernels)
    packages = new_table("packages", ("name", "version", "for", "how to get it"))
    for package in found.packages:
        missing = package.version is None
        packages.add_row(package.name, "[red]missing[/]" if missing else package.version, package.purpose, package.get if missing else "")
    console.print(packages)
