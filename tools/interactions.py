"""Do the errors of two weights of a block add up? KL of pairs quantized together against the sum of each alone, and what a plan gains that
knows it.

    python tools/interactions.py MODEL --size 4.5bpw --data c4.txt --held-out wiki.txt -o FOLDER [--blocks 4]

With k the KL of a weight alone, that of two together is k_a + k_b + 2 c sqrt(k_a k_b): c is the correlation of their effects on the
output, 0 if they add up. The mean c of each kind of pair goes into a second plan, found by solving again and again with the terms that
the weights' present partners add, and both plans are priced with the interactions.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np

from fewbits import calibration, formats, methods, model, sensitivity, targets
from fewbits.calibration import split
from fewbits.calibration.folder import ABOUT, Statistics
from fewbits.model import Model
from fewbits.model.weights import Weight
from fewbits.planning import Plan
from fewbits.planning.allocation import allocator
from fewbits.planning.decision import Budget, decide
from fewbits.reporting.meanwhile import on_terminal
from fewbits.sensitivity import Sensitivity
from fewbits.store.cache import Cache, code_version
from fewbits.targets import pricing
from fewbits.verification.forecast.side_by_side import Stream, compare_streams

MEMORY = 1 << 30
ROUNDS = 20  # of solving again; the plan is the same again after five or so
PAIRS = [("v_proj", "o_proj"), ("q_proj", "k_proj"), ("up_proj", "down_proj"), ("gate_proj", "down_proj"), ("gate_proj", "up_proj"),
         ("q_proj", "v_proj"), ("o_proj", "down_proj")]  # fmt: skip


def main() -> None:
    asked = _asked()
    source, folder = model.open(asked.model), Path(asked.out)
    statistics = Statistics(folder / "statistics") if (folder / "statistics" / ABOUT).is_file() else None
    if statistics is None:
        drawn = calibration.draw(source, asked.data, asked.samples, None, 0)
        statistics = calibration.collect(source, drawn, folder / "statistics", progress=on_terminal)
    target = targets.get("gguf")
    table = sensitivity.measure(
        source, statistics, pricing.candidates_for(source, target, ()), "auto",
        cache=Cache(folder / "cache", {"code": code_version()}), progress=on_terminal,
    )  # fmt: skip
    plan = decide(table, target, Budget(size=asked.size), overhead=0).plan
    couples = list(_couples(source, asked.blocks))
    singles = sorted({weight.name: weight for couple in couples for weight in couple}.values(), key=lambda weight: weight.name)
    values = {weight.name: _rounded(source, statistics, weight, plan) for weight in singles}
    streams = {name: Stream({name: value}) for name, value in values.items()}
    streams |= {f"{a.name} {b.name}": Stream({a.name: values[a.name], b.name: values[b.name]}) for a, b in couples}
    windows = split.held_out_windows(source, asked.held_out, None, asked.tokens)
    measured = compare_streams(source, windows, streams, MEMORY, on_terminal).measured
    kl = {name: float(np.mean(logits.kl)) for name, logits in measured.items()}

    found: dict[tuple[str, str], list[float]] = {}
    for a, b in couples:
        together, alone = kl[f"{a.name} {b.name}"], (kl[a.name], kl[b.name])
        found.setdefault((_kind(a), _kind(b)), []).append((together - sum(alone)) / (2 * math.sqrt(math.prod(alone))))
    print(f"{source.name}, {plan.bits_per_weight:.2f} bits, {sum(len(window) - 1 for window in windows)} tokens")
    print("pair                      c: mean    least   most")
    for (a, b), each in found.items():
        print(f"{a + ' + ' + b:25s} {mean(each):+.3f} {min(each):+.3f} {max(each):+.3f}   {len(each)} pairs, +- {_error(each):.3f}")
    _plans(table, source, plan, {pair: mean(each) for pair, each in found.items()})


def _plans(table: Sensitivity, source: Model, plan: Plan, correlations: dict[tuple[str, str], float]) -> None:
    partners: dict[str, list[tuple[str, float]]] = {}
    for a, b in _couples(source, 0):
        c = correlations[_kind(a), _kind(b)]
        partners.setdefault(a.name, []).append((b.name, c))
        partners.setdefault(b.name, []).append((a.name, c))

    def cost(weight: str, kl: float, present: Plan, share: float) -> float:
        others = ((table.rows[other][present[other].format].kl, c) for other, c in partners.get(weight, ()))
        return kl + share * sum(2 * c * math.sqrt(kl * other) for other, c in others)

    def whole(of: Plan) -> float:
        return math.fsum(cost(weight.name, table.rows[weight.name][of[weight.name].format].kl, of, 0.5) for weight in source.weights)

    best = present = plan
    for _ in range(ROUNDS):
        rows = {
            name: {fmt: replace(cell, kl=max(0.0, cost(name, cell.kl, present, 1.0))) for fmt, cell in row.items()}
            for name, row in table.rows.items()
        }
        present = allocator(replace(table, rows=rows), targets.get("gguf")).within_bytes(plan.nbytes, "")
        if whole(present) < whole(best):
            best = present
    moved = sum(plan[weight.name].format != best[weight.name].format for weight in source.weights)
    print(f"predicted KL with interactions: {whole(plan):.5g}; without: {plan.kl:.5g}")
    print(f"of the plan that knows them: {whole(best):.5g}, {100 * (1 - whole(best) / whole(plan)):.2f} % less; {moved} formats differ")


def _couples(source: Model, blocks: int) -> Iterator[tuple[Weight, Weight]]:
    """The pairs of some blocks, spread evenly; 0: of all."""
    by_block: dict[str, dict[str, Weight]] = {}
    for weight in source.weights:
        if ".layers." in weight.name:
            by_block.setdefault(weight.name.split(".layers.")[1].split(".")[0], {})[_kind(weight)] = weight
    chosen = list(by_block.values())
    if blocks:
        chosen = [chosen[round(i * (len(chosen) - 1) / max(1, blocks - 1))] for i in range(min(blocks, len(chosen)))]
    for block in chosen:
        for a, b in PAIRS:
            if a in block and b in block:
                yield block[a], block[b]


def _kind(weight: Weight) -> str:
    return weight.name.rpartition(".")[2]


def _rounded(source: Model, statistics: Statistics, weight: Weight, plan: Plan) -> Callable[[], Any]:
    from fewbits import kernels

    fmt = formats.get(plan[weight.name].format)
    parts = methods.get(plan[weight.name].method).quantize(source.load(weight), fmt, statistics.of(weight.name)).parts
    return lambda: kernels.decode(fmt, parts, weight.shape)


def _error(values: Sequence[float]) -> float:
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def _asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("-o", "--out", required=True)
    parser.add_argument("--size", default="4.5bpw")
    parser.add_argument("--data", action="append", default=[])
    parser.add_argument("--held-out", action="append", default=[])
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--blocks", type=int, default=4)
    return parser.parse_args()


if __name__ == "__main__":
    main()
