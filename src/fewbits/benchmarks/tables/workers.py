"""What `fewbits bench workers` shows: tables on the terminal, and a picture of the speed-up against the number of workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fewbits.reporting.terminal import console, new_table, size

if TYPE_CHECKING:
    from fewbits.benchmarks.scale.projection import Projection
    from fewbits.benchmarks.scale.workers import Speedup

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 560, 340, 60, 530, 50, 280
_COLOURS = {"calibrate": "#d9480f", "measure": "#2b8a3e", "quantize": "#0b6bcb", "all": "#212529"}


def table(result: Speedup) -> None:
    title = (
        f"{result.shape.weights / 1e6:.0f} million random weights, {result.tokens:,} tokens, {', '.join(result.formats)}; "
        f"workers of one thread ({result.executor}) on {result.processors} processors"
    )
    shown = new_table(title, ("workers", "start, s", "calibrate, s", "measure, s", "quantize, s", "speed-up per all", "peak of a worker"))
    for point in result.points:
        ratio = f"{result.speedup(point)['all']:.2f}" if point.workers else ""
        seconds = [f"{value:.1f}" for value in point.seconds.values()]
        shown.add_row(
            str(point.workers or "none"), *seconds, ratio, size(max(point.memory.values())) if point.memory and point.workers else ""
        )
    console.print(shown)


def projection(result: Projection) -> None:
    shown = new_table(
        f"{result.model}: {result.weights / 1e9:.0f} billion weights, {result.tokens:,} tokens; a worker has {result.cores} processors, "
        f"{result.disk / 1e9:g} GB/s of storage and {result.network / 1e9:g} GB/s of network",
        ("workers", "calibrate", "measure", "quantize", "write and verify", "in all", "memory peak", "shared disk peak", "network per run"),
    )
    for row in result.rows:
        hours = [f"{value / 3600:,.1f} h" for value in (row.calibrate, row.measure, row.quantize, row.alone, row.seconds)]
        shown.add_row(f"{row.workers} ({row.shards} shards)", *hours, size(row.memory), _terabytes(row.storage), _terabytes(row.network))
    console.print(shown)
    console.print(f"units of the bench took up to {result.speed.misfit:.1f} times what the formula says of them, or as much less")


def _terabytes(nbytes: int) -> str:
    return f"{nbytes / 1e12:.1f} TB"


def picture(result: Speedup) -> str:
    """Both axes linear: on the dashed line twice the workers are twice as fast, up to the processors that there are."""
    points = [point for point in result.points if point.workers]
    most = max(point.workers for point in points)
    about = f"{result.shape.weights / 1e6:.0f} million weights, {result.processors} processors"
    fonts = 'font-family="system-ui, sans-serif" font-size="12"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" {fonts} role="img">',
        f"<title>Speed-up against workers of one thread, on {result.processors} processors</title>",
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>',
        f'<text x="14" y="22" fill="#444">speed-up against one worker; {about}</text>',
    ]
    for value in range(most + 1):
        parts.append(f'<line x1="{_LEFT}" x2="{_RIGHT}" y1="{_y(value, most)}" y2="{_y(value, most)}" stroke="#e5e5e5"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{_y(value, most) + 4}" text-anchor="end" fill="#666">{value}</text>')
        parts.append(f'<text x="{_x(value, most)}" y="{_BOTTOM + 18}" text-anchor="middle" fill="#666">{value}</text>')
    parts.append(f'<text x="{(_LEFT + _RIGHT) / 2:g}" y="{_BOTTOM + 38}" text-anchor="middle" fill="#444">workers of one thread</text>')
    corner = min(most, result.processors)
    ideal = f"{_x(0, most)},{_y(0, most)} {_x(corner, most)},{_y(corner, most)} {_x(most, most)},{_y(corner, most)}"
    parts.append(f'<polyline points="{ideal}" fill="none" stroke="#adb5bd" stroke-dasharray="5 4"/>')
    for number, (step, colour) in enumerate(_COLOURS.items()):
        places = [(_x(point.workers, most), _y(result.speedup(point)[step], most)) for point in points]
        line = " ".join(f"{x},{y}" for x, y in places)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="{3 if step == "all" else 1.5}"/>')
        parts += [f'<circle cx="{x}" cy="{y}" r="3.5" fill="{colour}"/>' for x, y in places]
        parts.append(f'<text x="{_LEFT + 12}" y="{_TOP + 14 + 16 * number}" fill="{colour}">{step}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _x(value: float, most: int) -> float:
    return round(_LEFT + value / most * (_RIGHT - _LEFT), 1)


def _y(value: float, most: int) -> float:
    return round(_BOTTOM - value / most * (_BOTTOM - _TOP), 1)
