"""What `fewbits bench cost` and `bench scale` show; of the latter also a picture of memory and time against the number of weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from fewbits.reporting.terminal import console, new_table, size

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fewbits.benchmarks.scale.busy import Busy
    from fewbits.benchmarks.scale.cost import Cost
    from fewbits.benchmarks.scale.sizes import Point, Scaling

_COLUMNS = (
    "weights",
    "blocks",
    "a block in float32",
    "model",
    "anonymous memory",
    "in step",
    "mapped files",
    "disk",
    "time",
    "per billion",
)
_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 370, 300, 56, 40, 250  # of one of the two panels
_APART = 26.0  # labels of the axis, at least: they are some 18 wide


def cost(result: Cost) -> None:
    title = f"{escape(result.model)}: {result.tokens:,} tokens, {result.threads} threads"
    table = new_table(title, ("step", "seconds", "x forward", "CPU x forward", "peak memory"))
    for step in result.steps:
        memory = "" if step.peak_memory is None else size(step.peak_memory)
        table.add_row(step.name, f"{step.seconds:.1f}", f"{step.multiple:.2f}", f"{step.cpu_multiple:.2f}", memory)
    console.print(table)


def busy(result: Busy) -> None:
    table = new_table("fewbits quantize --size 4.5bpw", ("machine", "seconds", "x quiet"))
    table.add_row("quiet", f"{result.quiet:.1f}", "1.00")
    table.add_row(f"with {result.competitors} others computing", f"{result.busy:.1f}", f"{result.ratio:.2f}")
    console.print(table)


def table(result: Scaling) -> None:
    run = result.run
    console.print(
        f"[bold]fewbits quantize --size {run.size} --formats {run.formats} --method {run.method}[/], {run.samples} samples of {run.length} "
        f"tokens, judged on {run.tokens}, {result.threads} threads; memory and disk at the most"
    )
    shown = Table(box=None, header_style="dim")
    for column in _COLUMNS:
        shown.add_column(column, justify="left" if column == "in step" else "right")
    for points in (result.deeper, result.wider, result.mixtures):
        for point in points:
            shown.add_row(*_cells(point))
        shown.add_section()
    console.print(shown)


def _cells(point: Point) -> tuple[str, ...]:
    usage = point.watched
    blocks = f"{point.shape.blocks} of {point.shape.hidden}" + (f", {point.shape.experts} experts" if point.shape.experts else "")
    return (
        f"{point.weights / 1e9:.2f} B", blocks, size(point.block_bytes), size(point.model_bytes),
        size(usage.anonymous), usage.largest.name, size(usage.mapped), size(usage.disk), f"{usage.seconds:.0f} s",
        f"{usage.seconds / point.weights * 1e9:.0f} s",
    )  # fmt: skip


def picture(result: Scaling) -> str:
    """Both axes from zero: flat is flat, and a line through the origin is linear."""
    points = result.deeper
    most = max([point.weights / 1e9 for point in points], default=1.0)
    memory = _panel(
        points, most, 0, "peak memory, GB", [("anonymous", _anonymous, "#0b6e4f"), ("the model itself, 16 bits", _model, "#8a8f98")]
    )
    time = _panel(points, most, _WIDTH, "time, minutes", [("whole run", _minutes, "#0b6e4f")])
    font = 'font-family="system-ui, sans-serif" font-size="12"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * _WIDTH} {_HEIGHT}" {font} role="img">',
        "<title>Peak anonymous memory and time of a whole run against the number of weights</title>",
        f'<rect width="{2 * _WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>',
    ]
    return "\n".join([*lines, *memory, *time, "</svg>", ""])


def _panel(
    points: Sequence[Point], most: float, left: int, title: str, series: list[tuple[str, Callable[[Point], float], str]]
) -> list[str]:
    highest = max([value(point) for point in points for _, value, _ in series], default=1.0) or 1.0
    step = next(each for each in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if highest / each <= 6 or each == 1000)
    top = step * -(-highest // step)

    def x(billions: float) -> float:
        return left + _LEFT + billions / most * (_WIDTH - _LEFT - 30)

    def y(value: float) -> float:
        return _BOTTOM - value / top * (_BOTTOM - _TOP)

    lines = [f'<text x="{left + 14}" y="18" fill="#444">{title}</text>']
    for tick in range(round(top / step) + 1):
        at = y(tick * step)
        lines.append(f'<line x1="{x(0):.1f}" x2="{x(most):.1f}" y1="{at:.1f}" y2="{at:.1f}" stroke="#ddd"/>')
        lines.append(f'<text x="{x(0) - 6:.1f}" y="{at + 4:.1f}" text-anchor="end" fill="#666">{tick * step:g}</text>')
    labelled = -_APART  # where the last one is
    for billions in sorted(point.weights / 1e9 for point in points):
        if x(billions) - labelled < _APART:
            continue
        labelled = x(billions)
        lines.append(f'<text x="{labelled:.1f}" y="{_BOTTOM + 18}" text-anchor="middle" fill="#666">{billions:.1f}</text>')
    lines.append(f'<text x="{x(most / 2):.1f}" y="{_BOTTOM + 38}" text-anchor="middle" fill="#444">billion weights</text>')
    for number, (name, value, colour) in enumerate(series):
        path = " ".join(f"{x(point.weights / 1e9):.1f},{y(value(point)):.1f}" for point in points)
        lines.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        lines += [f'<circle cx="{x(p.weights / 1e9):.1f}" cy="{y(value(p)):.1f}" r="4" fill="{colour}"/>' for p in points]
        lines.append(f'<text x="{x(0) + 8:.1f}" y="{_TOP + 14 + 16 * number}" fill="{colour}">{name}</text>')
    return lines


def _anonymous(point: Point) -> float:
    return point.watched.anonymous / 1e9


def _model(point: Point) -> float:
    return point.model_bytes / 1e9


def _minutes(point: Point) -> float:
    return point.watched.seconds / 60
