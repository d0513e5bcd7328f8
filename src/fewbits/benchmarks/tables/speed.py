"""What `fewbits bench kernels`, `quantize`, `dequantize` and `decode` show."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

from fewbits.reporting.terminal import console, note, size

if TYPE_CHECKING:
    from fewbits.benchmarks.speed.decode import Phase, TokenBench
    from fewbits.benchmarks.speed.dequantize import DequantizeBench
    from fewbits.benchmarks.speed.kernels import Case, KernelBench, Result
    from fewbits.benchmarks.speed.quantize import QuantizeBench
    from fewbits.benchmarks.speed.roofline import Limit, Limits
    from fewbits.benchmarks.timing import Spread

FAMILIES = ("ggml", "onnxruntime", "torch")
_FIGURES = ("time", "GB/s", "GOP/s", "of limit", "")
_FEW = 8  # cases, for which all contenders are listed


def kernels(result: KernelBench) -> None:
    machine = result.machine
    cache = f", {size(machine.last_cache)} of last cache" if machine.last_cache else ""
    console.print(f"[bold]{escape(machine.processor)}[/], {machine.cores} cores{cache}; {_threads(result.limits.threads)}")
    limits(result.limits)
    single = [case for case in result.cases if case.rows == 1]
    many = [case for case in result.cases if case.rows > 1]
    if single:
        products(single, "one row: latency of a single call")
    if many:
        products(many, "many rows: throughput")
    if len(result.cases) <= _FEW and any(len(case.results) > 1 for case in result.cases):
        for case in result.cases:
            contenders(case)
    settings = dict.fromkeys(f"{r.name}: {r.setting}" for case in result.cases for r in case.results)
    ours = sorted({r.setting for case in result.cases for r in case.results[:1]})
    console.print(f"fewbits: {'; '.join(ours)}")
    for setting in settings:
        if not setting.startswith("fewbits"):
            console.print(escape(setting), soft_wrap=True)
    console.print(
        f"weights lie in as many copies as make {size(machine.cold)}, so that every call reads them from memory; every output was checked "
        "against float64. x: how many times as fast as the fastest of that library; ± is half of what lies between the quartiles"
        + (". On one thread, time is processor time" if result.limits.threads == 1 else ""),
        soft_wrap=True,
    )
    for reason in result.skipped:
        note(f"left out {reason}")
    _warn_unless_alike(ours, " ".join(setting for setting in settings if setting.startswith("ggml")))
    quiet = [limit.quiet_rounds for limit in result.limits.all] + [each.quiet_rounds for case in result.cases for each in case.results]
    if not all(quiet):
        note("?: other programs had the processors whenever it ran, so it is faster than that; `--threads 1` counts processor time")


def limits(measured: Limits) -> None:
    table = _table(("what", "by", "per second", ""))
    for limit in measured.all:
        unit = "GB/s" if limit.kind == "read" else "GOP/s"
        per = limit.per_second
        what = {"read": "reading", "int8": "int8 products", "fp32": "float32 products"}[limit.kind]
        table.add_row(what, limit.setting, f"{per.median / 1e9:.1f} {unit}", _doubtful(_percent(per), limit))
    _show("limits of this machine, measured", table)


def products(cases: Sequence[Case], title: str) -> None:
    families = [family for family in FAMILIES if any(case.best(family) for case in cases)]
    table = _table(("format", "K x N", "rows", *_FIGURES, *(f"x {family}" for family in families), "error"))
    for case in cases:
        which = (case.format, f"{case.k}x{case.n}", str(case.rows))
        table.add_row(*which, *_figures(case, case.ours), *(_speedup(case, family) for family in families), f"{case.ours.error:.1e}")
    _show(title, table)


def contenders(case: Case) -> None:
    """All contenders of one case: for a few cases, not for a hundred."""
    table = _table(("contender", *_FIGURES, "error"))
    for each in case.results:
        table.add_row(each.name, *_figures(case, each), f"{each.error:.1e}")
    _show(f"{case.format}, {case.k}x{case.n}, rows: {case.rows}", table)


def _figures(case: Case, each: Result) -> tuple[str, ...]:
    """One row is a matter of latency, as a caller sees it; many of throughput."""
    time = each.latency if case.rows == 1 else each.seconds
    rates = (f"{each.gigabytes_per_second:.1f}", f"{each.gigaoperations_per_second:.0f}")
    return _doubtful(f"{duration(time.median)} {_percent(time)}", each), *rates, f"{each.share_of_limit.median:.0%}", each.bound


def quantizers(result: QuantizeBench) -> None:
    title = f"quantizing {result.k} x {result.n}, {_threads(result.threads)}: million weights per second"
    table = _table(("format", "importance", "kernel", "fewbits", "ggml", "x ggml", "squared error", "to ggml's"))
    for row in result.rows:
        ours, peer = row.million_weights_per_second, row.ggml_million_weights_per_second
        cells = [row.format, "yes" if row.importance else "no", _kernel(row.kernel), f"{ours.median:.1f} {_percent(ours)}"]
        cells += [f"{peer.median:.1f}" if peer else "", _times(row.speedup), f"{row.error:.2e}"]
        table.add_row(*cells, f"{row.error_ratio:.3f}" if row.error_ratio is not None else "")
    _show(title, table)
    if result.peer:
        console.print(escape(f"{result.peer}; ggml_quantize_chunk, rows split among {_threads(result.threads)}"))
        _warn_unless_alike([row.kernel for row in result.rows], result.peer)


def decoders(result: DequantizeBench) -> None:
    title = f"decoding {result.k} x {result.n} to float32, {_threads(result.threads)}: billion weights per second"
    table = _table(("format", "kernel", "fewbits", "ggml", "x ggml"))
    for row in result.rows:
        ours, peer = row.billion_weights_per_second, row.ggml_billion_weights_per_second
        cells = [row.format, _kernel(row.kernel), f"{ours.median:.2f} {_percent(ours)}"]
        table.add_row(*cells, f"{peer.median:.2f}" if peer else "", _times(row.speedup))
    _show(title, table)
    if result.peer:
        console.print(escape(f"{result.peer}; dequantize_row, rows split among {_threads(result.threads)}"))
        _warn_unless_alike([row.kernel for row in result.rows], result.peer)


def tokens(result: TokenBench) -> None:
    console.print(
        f"[bold]{result.model}, {result.format}, {_threads(result.threads)}[/]: {size(result.weight_bytes)} of weights for a token, "
        f"memory is read at {result.read_bytes_per_second / 1e9:.1f} GB/s; text of {result.prompt} tokens"
    )
    table = Table(box=None, header_style="dim")
    for column in ("", "by", "tokens/s", "of the memory's speed", "fewbits is"):
        table.add_column(column, justify="left" if column in ("", "by") else "right")
    for phase in result.phases:
        share = "" if phase.share_of_bandwidth is None else f"{phase.share_of_bandwidth:.0%}"
        times = "" if phase.speedup is None else f"{phase.speedup.median:.2f} times as fast"
        table.add_row(phase.name, phase.contender, _doubtful(f"{phase.tokens_per_second:.1f}", phase), share, times)
    console.print(table)
    console.print(f"fewbits: {_kernel(result.kernel)}" + (f"; llama.cpp: {result.peer}" if result.peer else ""), soft_wrap=True)
    if result.peer:
        _warn_unless_alike([f"{result.kernel}, tiles"], result.peer)


def duration(seconds: float) -> str:
    """Three digits: 8.21 us, 1.35 ms, 0.482 s."""
    for unit, factor in (("us", 1e6), ("ms", 1e3)):
        if seconds * factor < 1000:
            value = seconds * factor
            return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f} {unit}"
    return f"{seconds:.3f} s"


def _speedup(case: Case, family: str) -> str:
    best = case.best(family)
    return _doubtful(_times(best.speedup), best, case.ours) if best else ""


def _doubtful(text: str, *each: Result | Limit | Phase) -> str:
    """With a question mark where other programs used the processors in every round."""
    return text if all(one.quiet_rounds for one in each) else f"{text} ?"


def _times(ratio: Spread | None) -> str:
    return f"{ratio.median:.2f} ±{(ratio.high - ratio.low) / 2:.2f}" if ratio else ""


def _percent(spread: Spread) -> str:
    """Half of what lies between the quartiles, relative to the median."""
    return f"±{(spread.high - spread.low) / 2 / spread.median:3.0%}"


def _warn_unless_alike(ours: Iterable[str], peer: str) -> None:
    """Where the peer was built for less than this processor has, a ratio says more of the build than of the code. Only products are
    written for AVX-VNNI: what rounds and decodes with it is AVX2."""
    for isa, feature, name in (("avx512", "avx512_vnni", "AVX-512 VNNI"), ("avxvnni, tiles", "avx_vnni", "AVX-VNNI")):
        if peer and feature not in peer.split() and any(isa in each for each in ours):
            note(f"this build of ggml has no {name} kernels; FEWBITS_KERNEL=avx2 compares like with like")


def _kernel(backend: str) -> str:
    return backend.removeprefix("native-")


def _threads(count: int) -> str:
    return "1 thread" if count == 1 else f"{count} threads"


def _table(columns: Sequence[str]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    left = {"format", "kernel", "contender", "what", "by", "", "importance"}
    for column in columns:
        table.add_column(column, justify="left" if column in left else "right", no_wrap=True)
    return table


def _show(title: str, table: Table) -> None:
    """Whole lines however narrow the terminal: a figure cut short is worse than a line that wraps."""
    console.print(f"[bold]{escape(title)}[/]", soft_wrap=True)
    needed = Measurement.get(console, console.options.update(max_width=1000), table).maximum
    wide = Console(stderr=console.stderr, highlight=False, width=max(console.width, needed))
    wide.print(table, crop=False, soft_wrap=needed > console.width)
