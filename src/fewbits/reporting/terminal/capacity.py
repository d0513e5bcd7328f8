"""What `fewbits fit` shows: a table, a picture of the memory, and what would make the rest fit. No line is wider than 80 columns."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from fewbits.reporting.terminal import console, note, size
from fewbits.reporting.terminal.tables import Column, fitted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fewbits.devices.catalogue import Device
    from fewbits.inspection.capacity.estimate import Fit, FormatFit
    from fewbits.inspection.capacity.speed import Range
    from fewbits.planning.footprint import Memory

_WIDTH = 80
_BAR = 60  # characters, if there is room
_COLOURS = {"fits": "green", "tight": "yellow", "offloads": "yellow", "does not fit": "red"}
_PARTS = (("weights", "#", "cyan"), ("kv_cache", "=", "magenta"), ("activations", "+", "yellow"), ("overhead", "o", "blue"))


def show(fit: Fit) -> None:
    _say(f"[bold]{escape(fit.model)}[/]: {_count(fit.parameters)} parameters, made for {fit.longest:,} tokens")
    _say(_place(fit))
    _say(_running(fit))
    if ram := fit.device.behind:
        _say(f"behind it {ram.name}: {size(ram.usable)} usable, {ram.source if ram.name.endswith('memory') else f'{ram.bandwidth:g} GB/s'}")
    console.print(_table(fit))
    console.print()
    for line in pictures(fit):
        console.print(line, highlight=False)
    _advise(fit)
    _speed(fit)
    if "slowest" in fit.device.source:
        _note(f"which Mac is not said: counted with {fit.device.source.partition(': ')[2]}")
    if fit.assumed:
        _note(f"assumed: {fit.assumed}")
    if not fit.exact:
        _note("the tensors of this architecture are not known here: weights are near, not exact")
    if fit.context > fit.longest:
        _note(f"the model was made for {fit.longest:,} tokens: beyond that its text may fall apart")
    if others := [row for row in fit.rows if row.others]:
        told = "; ".join(f"{row.label}: {row.others}" for row in others[:3])
        _note(f"weights whose columns do not divide get the next format: {told}{' ...' if len(others) > 3 else ''}")


def devices(every: Sequence[Device]) -> None:
    columns = (
        Column("device"), Column("kind", 4), Column("memory", right=True), Column("usable", right=True), Column("GB/s", right=True),
        Column("fp16", 1, right=True), Column("int8", 2, right=True), Column("multiplies in", 3),
    )  # fmt: skip
    cells = []
    for each in every:
        rates = (f"{rate:g}" if rate else "" for rate in (each.bandwidth, each.half, each.int8))
        memory = (f"{nbytes / 2**30:.3g}" for nbytes in (each.memory, each.usable))
        cells.append((each.name, each.kind, *memory, *rates, " ".join(each.fast)))
    console.print(fitted(None, columns, cells, console.width))
    _say("memory in GiB, fp16 in TFLOP/s and int8 in TOP/s (dense); `--json` has the source of each figure")


def pictures(fit: Fit) -> list[str]:
    """A bar for each format, as wide as the usable memory; `>` marks a format that needs more."""
    shown = " ".join(f"[{colour}]{mark}[/] {name.replace('_', ' ').replace('kv', 'KV')}" for name, mark, colour in _PARTS)
    lines = [f"[dim]{size(fit.device.usable)} of memory:[/] {shown}  . free"]
    wide = max(9, *(len(row.label) for row in fit.rows))
    length = min(_BAR, console.width - wide - 3)
    return lines + [f"{row.label:>{wide}} |{_bar(row.memory, fit.device.usable, length)}" for row in fit.rows]


def _bar(memory: Memory, usable: int, length: int) -> str:
    """Each part ends at a rounded place, so that the lengths add up to the total. The last cell marks a total beyond the memory."""
    text, total, drawn = "", 0, 0
    room = length if memory.fits(usable) else length - 1
    for name, mark, colour in _PARTS:
        total += getattr(memory, name)
        end = min(room, round(length * total / usable))
        text += f"[{colour}]{mark * (end - drawn)}[/]" if end > drawn else ""
        drawn = max(drawn, end)
    return text + "." * (length - drawn) + "|" if memory.fits(usable) else f"{text}[red]>[/]|"


def _table(fit: Fit) -> Table:
    unit, name = (1e9, "GB") if max(row.memory.total for row in fit.rows) >= 1e9 else (1e6, "MB")
    columns = (
        Column("format"), Column("bits", 3, right=True), Column("weights", 2, right=True), Column("KV", 4, right=True),
        Column("activ.", 5, right=True), Column("other", 6, right=True), Column("total", right=True), Column("left", 1, right=True),
        Column(""), Column("context", right=True), Column("tokens/s", right=True),
    )  # fmt: skip
    cells = []
    for row in fit.rows:
        m = row.memory
        parts = (_figure(nbytes / unit) for nbytes in (m.weights, m.kv_cache, m.activations, m.overhead, m.total, row.margin))
        word = f"{row.offload.layers}/{row.offload.of}" if row.offload else "no" if not row.fits else row.verdict
        verdict = f"[{_COLOURS[row.verdict]}]{word}[/]"
        context = f"{row.largest_context:,}" if row.largest_context else "-"
        cells.append((row.label, f"{row.bits_per_weight:.2f}", *parts, verdict, context, _range(row.decode)))
    table = fitted(f"{name} of memory", columns, cells, console.width)
    table.title_style = "dim"
    return table


def _place(fit: Fit) -> str:
    device, usable = fit.device, size(fit.device.usable)
    if device.kind == "memory":
        return f"in {usable}"
    if device.kind == "here":
        return f"on this machine (no `--device` given): {usable} are free now of {size(device.memory)}"
    reads = f"{device.bandwidth:g} GB/s" if device.bandwidth else "of unknown speed"
    held = f"{usable} usable of {size(device.memory)} ({device.reserved or 'all of it'})"
    shared = f"; {len(device.parts)} devices share the layers, one computes after the other" if device.parts else ""
    return f"on {device.name}: {held}; {reads}, multiplies in {', '.join(device.fast) or 'floats'}{shared}"


def _running(fit: Fit) -> str:
    several = f", {fit.batch} sequences at once" if fit.batch > 1 else ""
    cache = "16 bits" if fit.kv == "float" else fit.kv
    return f"in {fit.runtime} at a context of {fit.context:,} tokens{several}, KV cache in {cache}"


def _advise(fit: Fit) -> None:
    fitting = [row for row in fit.rows if row.fits and not row.offload]
    offloaded = [row for row in fit.rows if row.offload]
    if fitting:
        best = max(fitting, key=lambda row: row.memory.weights)
        left = f"{size(best.margin)} left" + (", less than the 10 % that the estimate may be off" if best.verdict == "tight" else "")
        _say(f"[bold green]{best.label} {best.verdict}[/]: {left}; context up to {best.largest_context:,}")
    elif not offloaded:
        _say("[bold red]nothing fits[/]")
    for row in [*offloaded[:1], *offloaded[1:][-1:]]:
        _say(_offloaded(row, fit.device))
    missed = [row for row in fit.rows if not row.fits and row.changes]
    ordered = sorted(missed, key=lambda row: row.margin)
    for row in [*ordered[:1], *ordered[1:][-1:]]:  # the largest, and the one that misses by least
        _say(f"{row.label} is {size(-row.margin)} too large; would fit: {'; or '.join(row.changes)}")
    if not fitting and not missed and not offloaded:
        smallest = min(fit.rows, key=lambda row: row.memory.total)
        _say(f"{smallest.label} is {size(-smallest.margin)} too large at any context: a smaller model, or more memory")


def _offloaded(row: FormatFit, device: Device) -> str:
    split = row.offload
    assert split is not None and device.behind is not None, "asked only of what is divided"
    rate = f", {_range(split.decode)} tokens/s" if split.decode else ""
    return (
        f"[bold yellow]{row.label}: {split.layers} of {split.of} layers on {device.name}[/] (`-ngl {split.layers}`), the others in "
        f"{device.behind.name}: {size(split.gpu_bytes)} and {size(split.ram_bytes)}{rate}"
    )


def _speed(fit: Fit) -> None:
    if all(row.decode is None for row in fit.rows):
        _say("[dim]tokens/s: not known without a device[/]")
        return
    rates = sorted({(row.prefill.low, row.prefill.high) for row in fit.rows if row.prefill})
    prompt = f"; prompts at {_plain(rates[0][0])} to {_plain(rates[-1][1])} tokens/s" if rates else ""
    _say(f"[dim]tokens/s are estimates, not measured: {fit.how}{prompt}[/]")


def _range(rate: Range | None) -> str:
    return f"{_plain(rate.low)}-{_plain(rate.high)}" if rate else ""


def _plain(rate: float) -> str:
    if rate >= 9950:
        return f"{rate / 1000:.0f}k"
    return f"{rate:.0f}" if rate >= 10 else f"{rate:.2g}"


def _figure(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.1f}" if abs(value) >= 100 else f"{value:.2f}"


def _count(numbers: int) -> str:
    return f"{numbers / 1e9:.3g}B" if numbers >= 1e9 else f"{numbers / 1e6:.3g}M"


def _say(text: str) -> None:
    console.print(text, soft_wrap=False, width=min(_WIDTH, console.width))


def _note(text: str) -> None:
    note("\n      ".join(textwrap.wrap(text, _WIDTH - 6)))
