"""Tables and messages for a person at a terminal. All on stderr: stdout is for data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from fewbits.benchmarks.contest import Paired
    from fewbits.benchmarks.cost import Cost
    from fewbits.benchmarks.quality import Quality
    from fewbits.calibration import Calibrated
    from fewbits.comparison import Comparison
    from fewbits.demonstration import Demo
    from fewbits.formats import Format
    from fewbits.inspection import Inspection
    from fewbits.kv_comparison import KvComparison
    from fewbits.planning import Plan
    from fewbits.range_comparison import RangeComparison
    from fewbits.verification import Verdict

_NOTES = 8  # the first ones, and of each the first weights; the rest is in results.json

console = Console(stderr=True, highlight=False)


def size(nbytes: float) -> str:
    """Three digits at least: 950 B, 7.42 MB, 271 MB."""
    for unit in ("B", "kB", "MB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "B" or nbytes >= 100 else f"{nbytes:.2f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.2f} GB"


def error(message: str, hint: str = "") -> None:
    console.print(f"[bold red]error:[/] {escape(message)}", soft_wrap=True)
    if hint:
        console.print(f"\n[bold]hint:[/] {escape(hint)}", soft_wrap=True)


def note(message: str) -> None:
    console.print(f"[yellow]note:[/] {escape(message)}", soft_wrap=True)


def plan_summary(plan: Plan) -> None:
    counts: dict[str, list[int]] = {}
    for entry in plan.entries:
        row = counts.setdefault(entry.format, [0, 0])
        row[0], row[1] = row[0] + 1, row[1] + entry.nbytes
    table = new_table("plan", ("format", "weights", "bytes"))
    for name, (count, nbytes) in sorted(counts.items(), key=lambda item: -item[1][1]):
        table.add_row(name, str(count), size(nbytes))
    table.add_row("all", str(len(plan.entries)), f"{size(plan.nbytes)}, {plan.bits_per_weight:.3f} bits per weight", style="bold")
    console.print(table)
    reasons: dict[tuple[str, str], list[str]] = {}
    for entry in plan.fallbacks:
        reasons.setdefault((entry.format, entry.reason), []).append(entry.weight)
    for (name, reason), weights in reasons.items():
        which = weights[0] if len(weights) == 1 else f"{len(weights)} weights (the first: {weights[0]})"
        note(f"{which} stored as {name}: {reason}")


def outcomes(outcomes: Mapping[str, Mapping[str, Any]]) -> None:
    """Which method each weight got, and what choosing among them saved on the half of the samples that was held out."""
    counts: dict[str, int] = {}
    rounding = chosen = 0.0
    for row in outcomes.values():
        counts[row["method"]] = counts.get(row["method"], 0) + 1
        damage: Mapping[str, float] = row.get("damage", {})
        if "rtn" in damage:
            rounding, chosen = rounding + damage["rtn"], chosen + min(damage.values())
    if chosen:
        methods = ", ".join(f"{count} by {name}" for name, count in sorted(counts.items(), key=lambda item: -item[1]))
        console.print(f"codes: {methods}; predicted KL on held-out samples {chosen:.5f}, by plain rounding {rounding:.5f}")
        placed = [row["places"] for row in outcomes.values() if None not in row.get("places", {}).get("gptq", (None,))]
        for place, label in ((0, "position 0"), (1, "later positions")) if placed else ():
            ours, plain = (sum(float(row[name][place]) for row in placed) / len(placed) for name in ("gptq", "rtn"))
            console.print(f"  held-out output error at {label}: gptq {ours:.1e}, rounding {plain:.1e} (mean over {len(placed)} weights)")
    told: dict[str, list[str]] = {}
    for weight, row in outcomes.items():
        for text in row.get("notes", ()):
            told.setdefault(text, []).append(weight)
    for text, weights in list(told.items())[:_NOTES]:
        more = f" and {len(weights) - _NOTES} more, in results.json" if len(weights) > _NOTES else ""
        which = weights[0] if len(weights) == 1 else f"{len(weights)} weights ({', '.join(weights[:_NOTES])}{more})"
        note(f"{which}: {text}")
    if len(told) > _NOTES:
        note(f"and {len(told) - _NOTES} notes more, in results.json")


def warnings(messages: Iterable[str]) -> None:
    for message in messages:
        note(message)


def calibration(result: Calibrated) -> None:
    seen = result.coverage
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_row("samples", f"{seen.samples:,} of {seen.lengths.least} to {seen.lengths.most} tokens (median {seen.lengths.median})")
    table.add_row("tokens", f"{seen.tokens:,}")
    table.add_row("vocabulary seen", f"{seen.vocabulary_seen:.1%} of {seen.vocabulary:,}")
    if seen.missing_in_evaluation:
        missing = seen.missing_in_evaluation
        named = ", ".join(repr(token.text) for token in missing.most_frequent[:5])
        table.add_row("unseen in the held-out text", f"{missing.occurrences:.2%} of its tokens" + (f", such as {named}" if named else ""))
    if seen.overlap:
        table.add_row("shared with it", f"{seen.overlap.share:.2%} of its {seen.overlap.n}-grams")
    for source in seen.sources[:8]:
        table.add_row("from", f"{escape(source.name)}: {source.share:.0%} ({source.samples} samples)")
    for name, counts in result.statistics.about["experts"].items():
        idle = sum(count == 0 for count in counts)
        table.add_row("experts", f"{escape(name)}: {len(counts) - idle} of {len(counts)} reached, the least {min(counts)} times")
    console.print(table)
    if result.drift:
        rows = [result.drift[0], result.drift[len(result.drift) // 2], result.drift[-1]]
        table = new_table("from half of the samples to all: what more data would still change", ("weight", "importance", "Hessian"))
        for which, row in zip(("most", "middle", "least"), rows, strict=True):
            moved = "" if row.hessian is None else f"{row.hessian:.1%}"
            table.add_row(f"{which}: {escape(row.weight)}", f"{row.importance:.1%}", moved)
        console.print(table)
    warnings(seen.warnings)
    console.print(f"wrote {escape(str(result.folder))}/")


def verdict(verdict: Verdict) -> None:
    table = Table(show_header=False, box=None, pad_edge=False)
    low, high = verdict.kl_ci95
    table.add_row("runtime", f"{verdict.runtime} ({verdict.runtime_version})")
    table.add_row("size", f"{size(verdict.bytes)}, {verdict.bits_per_weight:.3f} bits per weight")
    table.add_row("tokens", f"{verdict.tokens:,}")
    table.add_row(
        "KL to float", f"{verdict.kl_mean:.5f}  (95 %: {low:.5f} .. {high:.5f}; p99 {verdict.kl_p99:.4f}, max {verdict.kl_max:.3f})"
    )
    if verdict.kl_floor is not None:
        table.add_row("  of it the runtime's own", f"{verdict.kl_floor:.2e}  (the float file in the same runtime)")
    ratio_low, ratio_high = verdict.ppl_ratio_ci95
    ratio = f"ratio {verdict.ppl_ratio:.4f} (95 %: {ratio_low:.4f} .. {ratio_high:.4f})"
    table.add_row("perplexity", f"{verdict.ppl:.4f} against {verdict.ppl_base:.4f}: {ratio}")
    table.add_row("same top token", f"{100 * verdict.top1_agreement:.2f} %")
    table.add_row("largest logit difference", f"{verdict.max_logit_diff:.3g}")
    console.print(table)
    for failure in verdict.failures:
        console.print(f"[bold red]failed:[/] {failure}")
    if verdict.passed:
        asked = any(value is not None for value in vars(verdict.thresholds).values())
        console.print("[bold green]passed[/]" if asked else "[bold green]ran[/], no threshold was asked for")


def demo(result: Demo) -> None:
    console.print(_in_words(result), soft_wrap=True)
    columns = ("format", "runtime", "bytes", "bits/w", "KL to float", "ppl ratio", "top-1", "as torch")
    table = new_table(f"the {result.model} model in each format, run by its runtime", columns)
    for row in result.rows:
        v = row.verdict
        half = (v.kl_ci95[1] - v.kl_ci95[0]) / 2
        kl = f"{v.kl_mean:.4f}±{half:.4f}" if v.kl_mean > 1e-3 else f"{v.kl_mean:.1e}"
        agrees = "[green]yes[/]" if row.crosscheck.agrees else "[bold red]NO[/]"
        figures = (size(v.bytes), f"{v.bits_per_weight:.2f}", kl, f"{v.ppl_ratio:.4f}", f"{100 * v.top1_agreement:.1f}%")
        table.add_row(row.format, v.runtime, *figures, agrees)
    console.print(table)
    tokens = result.rows[0].verdict.tokens
    console.print(
        f"measured on {tokens:,} held-out tokens by running each file in its runtime; files and results.json are in {result.folder}/"
    )
    console.print(f"the report: {result.folder}/report.html", soft_wrap=True)
    for row in result.rows:
        if row.plan.fallbacks:
            count, first = len(row.plan.fallbacks), row.plan.fallbacks[0]
            note(f"{row.format} for {row.target}: {count} weights stored otherwise; {first.weight} as {first.format}: {first.reason}")
        if not row.crosscheck.agrees:
            c = row.crosscheck
            error(f"{row.file} in {row.verdict.runtime} is {c.kl:.2e} (KL) from the same weights in torch; {c.limit:.2e} is explained")
    for reason in result.skipped:
        note(f"skipped {reason}")


def _in_words(result: Demo) -> str:
    """What came of it, for somebody who reads no further."""
    who = " and ".join(sorted({row.verdict.runtime for row in result.rows}))
    wrong = [row.file for row in result.rows if not (row.verdict.passed and row.crosscheck.agrees)]
    if wrong:
        return f"[bold red]failed:[/] {', '.join(wrong)} did not compute in {who} what torch does with the same weights."
    words = f"[bold green]passed:[/] {len(result.rows)} files, each run in {who}, and each as torch computes with the same weights."
    planned = next((row for row in result.rows if row.format.endswith("bpw") and row.target == "gguf"), None)
    if planned is None:
        return words
    others = {row.format: row.verdict for row in result.rows if row.target == planned.target and not row.format.endswith("bpw")}
    best, whole = planned.verdict, others.pop("float")
    peer = min(others, key=lambda name: (round(abs(others[name].bytes / best.bytes - 1), 2), others[name].kl_mean))  # the best as large
    return (
        f"{words}\nPlanned weight by weight, {size(best.bytes)} of {size(whole.bytes)} keep the float model's choice of the next token in "
        f"{100 * best.top1_agreement:.1f} % of places (KL {best.kl_mean:.4f}); {peer} for all, as large, in "
        f"{100 * others[peer].top1_agreement:.1f} % (KL {others[peer].kl_mean:.4f})."
    )


def formats(rows: Iterable[tuple[Format, float, str, str]]) -> None:
    table = new_table("formats", ("name", "bits/w", "per", "targets", "kernel", "what it is"))
    for fmt, bits, targets, kernel in rows:
        run = "-" if fmt.levels is None else str(fmt.run) if fmt.run else "tensor" if fmt.tensor_wide else "row"
        table.add_row(fmt.name, f"{bits:.4g}", run, targets or "none yet", _short(kernel), fmt.about)
    console.print(table)


def inspection(found: Inspection) -> None:
    tensors = f"{len(found.tensors)} tensors of {size(found.tensor_bytes)}"
    console.print(f"[bold]{escape(found.path)}[/]: {found.kind}, {size(found.nbytes)} on disk, {tensors}")
    for key, value in found.metadata.items():
        text = str(value).replace("\n", " ")
        console.print(f"  {escape(key)}: {escape(text if len(text) <= 96 else text[:93] + '...')}", soft_wrap=True)
    table = new_table(None, ("tensor", "type", "shape", "std", "peak", "-4 .. 4 std"))
    for t in found.tensors:
        shape = "x".join(map(str, t.shape)) or "scalar"
        v = t.values
        seen = (f"{v.std:.2g}", f"{v.peak:.1f}", v.picture) if v else ("", "", "")
        table.add_row(escape(t.name.removesuffix(".weight")), t.type, shape, *seen)
    console.print(table)
    for t in found.tensors:
        if t.values and t.values.nonfinite:
            values = "a value that is" if t.values.nonfinite == 1 else f"{t.values.nonfinite:,} values that are"
            note(f"`{t.name}` holds {values} not finite: quantizing will refuse it")


def comparison(result: Comparison) -> None:
    title = f"relative RMS error, {result.bits} bits, max scaling; x less: than per tensor"
    table = new_table(title, ("weight", "per tensor", "per channel", "x less", "per 64", "x less"))
    for g in result.weights:
        group = (f"{g.per_group:.4f}", f"{g.group_ratio:.2f}") if g.per_group and g.group_ratio else ("does not divide", "")
        table.add_row(escape(g.weight), f"{g.per_tensor:.4f}", f"{g.per_channel:.4f}", f"{g.channel_ratio:.2f}", *group)
    console.print(table)
    base = next((row.error for row in result.formats if row.format == "q4_0"), None)
    columns = ("format", "bits/w", "error max", "search", "to q4_0", "decode Gw/s", "kernel", "left out")
    table = new_table("the same weights by format: relative RMS error, decode speed", columns)
    for row in result.formats:
        errors = [f"{e:.5f}" if e is not None else "fits none" for e in (row.error_max, row.error)]
        ratio = f"{row.error / base:.2f}x" if base and row.error is not None else ""
        speed = f"{row.gigaweights_per_second:.2f}"
        table.add_row(row.format, f"{row.bits_per_weight:.4g}", *errors, ratio, speed, _short(row.kernel), str(row.left_out or ""))
    console.print(table)


def range_comparison(result: RangeComparison) -> None:
    best, by_input = result.best(), result.by_input()
    methods = [row.method for row in next(iter(by_input.values()))]
    short = [method.removeprefix("percentile_").replace("moving_", "") for method in methods]
    table = new_table(f"squared error of {result.levels} over the mean square, by estimator; * the least", ("input", *short))
    for name, rows in by_input.items():
        cells = [f"[bold]{row.error:.1e}*[/]" if row.method == best[name] else f"{row.error:.1e}" for row in rows]
        table.add_row(escape(".".join(name.split(".")[-3:])), *cells)
    console.print(table)
    table = new_table("mean over inputs", ("estimator", "least error on", "error", "clipped share", "KL of histograms"))
    for method in methods:
        rows = [row for row in result.rows if row.method == method]
        means = [sum(getattr(row, field) for row in rows) / len(rows) for field in ("error", "clipped", "kl")]
        table.add_row(method, str(list(best.values()).count(method)), *(f"{mean:.1e}" for mean in means))
    console.print(table)


def kv_comparison(result: KvComparison) -> None:
    table = new_table("KV cache in torch, against the float cache", ("format", "context", "bits/value", "KL", "perplexity ratio", "95 %"))
    for row in result.rows:
        low, high = row.ppl_ratio_ci95
        bits = f"{row.bits_per_value:.2f}"
        table.add_row(row.format, str(row.length), bits, f"{row.kl:.2e}", f"{row.ppl_ratio:.5f}", f"{low:.5f} .. {high:.5f}")
    console.print(table)


def quality(result: Quality) -> None:
    for judged in result.texts:
        where = f"[bold]{escape(result.model)}[/] in llama.cpp on {judged.tokens:,} tokens of {escape(judged.text)}"
        console.print(f"{where}; KL floor {judged.kl_floor:.1e} (float file), {judged.kl_q8_0:.1e} (q8_0)")
        table = new_table(None, ("format", "bits/w", "made by", "KL", "KL ratio", "95 %", "top-1", "perplexity ratio"))
        for row in judged.rows:
            table.add_row(row.format, f"{row.bits_per_weight:.3g}", row.maker, *paired(row.found))
        console.print(table)


def paired(found: Paired) -> tuple[str, ...]:
    low, high = found.kl_ratio_ci95
    return f"{found.kl:.4f}", f"{found.kl_ratio:.3f}", f"{low:.3f} .. {high:.3f}", f"{found.top1:.2%}", f"{found.ppl_ratio:.4f}"


def cost(result: Cost) -> None:
    title = f"{escape(result.model)}: {result.tokens:,} tokens, {result.threads} threads"
    table = new_table(title, ("step", "seconds", "x forward", "CPU x forward", "peak memory"))
    for step in result.steps:
        memory = "" if step.peak_memory is None else size(step.peak_memory)
        table.add_row(step.name, f"{step.seconds:.1f}", f"{step.multiple:.2f}", f"{step.cpu_multiple:.2f}", memory)
    console.print(table)


def _short(backend: str) -> str:
    return backend.removeprefix("native-")


def new_table(title: str | None, columns: Iterable[str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 1, 0, 0), header_style="dim")
    for number, column in enumerate(columns):
        right = number > 0 and any(
            word in column for word in ("bytes", "bits", "KL", "ratio", "top-1", "error", "search", "per ", "less", "Gw/s", "std", "peak")
        )
        table.add_column(column, justify="right" if right else "left", overflow="fold")
    return table
