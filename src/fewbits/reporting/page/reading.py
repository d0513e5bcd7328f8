"""results.json as the page reads it. It may come from anywhere: every field is checked for its type, and what is missing stays missing."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from fewbits.checkpoints import limits
from fewbits.checkpoints.folder import read_json
from fewbits.errors import InputError
from fewbits.reporting.page.contents import (
    Block,
    Choice,
    Distribution,
    File,
    Hash,
    Histogram,
    Input,
    Kernel,
    Made,
    Mark,
    Point,
    Results,
    Row,
    Source,
    Use,
    Verdict,
    Weight,
)

T = TypeVar("T")
_FIGURES = ("kl_mean", "kl_p99", "kl_max", "ppl", "ppl_base", "ppl_ratio", "top1_agreement", "max_logit_diff", "bits_per_weight")
_HINT = "`fewbits quantize` writes one into the folder OUT.work, `fewbits demo` into its own"


def read(path: Path) -> Results:
    content: Any = read_json(path, _HINT, limits.TABLES)
    return guarded(path, lambda: _demo(content) if "rows" in content else Results(_made(content)))


def guarded(path: Path, parse: Callable[[], T]) -> T:
    try:
        return parse()
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError) as failure:
        why = f"it has no {failure}" if isinstance(failure, KeyError) else str(failure)
        raise InputError(f"`{path}` holds no results of a run: {why}", _HINT) from failure


def _demo(content: Row) -> Results:
    files = tuple(
        File(text(row["format"]), text(row["target"]), text(row["file"]), verdict(row), bool(row["crosscheck"]["agrees"]),
             number(row["crosscheck"]["kl"]))
        for row in content["rows"]
    )  # fmt: skip
    detail = content.get("detail")
    return Results(_made(detail) if detail else None, files, text(content["model"]), tuple(map(text, content["skipped"])))


def _made(content: Row) -> Made:
    plan = content["plan"]
    weights = tuple(_weight(text(name), row) for name, row in plan["weights"].items())
    decision, added = content.get("decision") or {}, content.get("accumulation") or {}
    threshold = decision.get("threshold_plan")
    elements = sum(weight.elements for weight in weights)
    frontier, uniform = _frontier(content.get("frontier_plans"), decision.get("frontier") or (), weights)
    again = content.get("reproduction") or {}
    return Made(
        file=text(content["file"]),
        target=text(plan["target"]),
        weights=weights,
        bytes=whole(plan["bytes"]),
        bits_per_weight=number(plan["bits_per_weight"]),
        kl=maybe(plan.get("predicted_kl"), number),
        kv=maybe(plan.get("kv"), text),
        verdict=maybe(None if "cosine_mean" in (content.get("verdict") or {}) else content.get("verdict"), verdict),  # not an encoder's
        coverage=maybe(content.get("coverage"), dict),
        methods=_methods(content.get("outcomes") or {}),
        frontier=frontier,
        uniform=uniform,
        threshold=Mark("thresholds", 8 * whole(threshold["bytes"]) / elements, number(threshold["kl"]), whole(threshold["bytes"]))
        if threshold and threshold["kl"] is not None
        else None,
        rounds=tuple((number(row["predicted"]), verdict(row["verdict"])) for row in content.get("rounds") or ()),
        blocks=tuple(map(_block, added.get("rows") or ())),
        block_tokens=whole(added.get("tokens") or 0),
        distributions=tuple(map(_distribution, content.get("distributions") or ())),
        memory=tuple(_use(row) for row in content.get("memory") or ()),
        kernels=tuple(
            Kernel(text(row["format"]), text(row["backend"]), whole(row["weights"]), whole(row["bytes"]))
            for row in content.get("kernels") or ()
        ),
        source=maybe(content.get("source"), _source),
        commands=tuple(map(text, again.get("commands") or ())),
        hashes=tuple(Hash(text(row["what"]), text(row["sha256"]), maybe(row.get("bytes"), whole)) for row in again.get("hashes") or ()),
        versions={text(name): text(value) for name, value in (again.get("versions") or {}).items()},
        machine={text(name): str(value) for name, value in (again.get("machine") or {}).items()},
        caveat=text(again.get("caveat") or ""),
        notes={text(note): tuple(map(text, weights)) for note, weights in (content.get("notes") or {}).items()},
        left_out={text(name): text(value) for name, value in (content.get("left_out") or {}).items()},
    )


def _weight(name: str, row: Row) -> Weight:
    rows, cols = row["shape"]
    method, granularity, reason = (text(row.get(key, "")) for key in ("method", "granularity", "reason"))
    stored = whole(row["bytes"]), maybe(row.get("kl"), number)
    return Weight(name, whole(rows), whole(cols), text(row["format"]), method, granularity, reason, *stored)


def _frontier(plans: Row | None, points: Any, weights: tuple[Weight, ...]) -> tuple[tuple[Point, ...], tuple[Mark, ...]]:
    if plans is None:
        bare = (Point(whole(row["nbytes"]), number(row["bits_per_weight"]), number(row["kl"])) for row in points)
        return tuple(bare), ()
    place = {text(name): index for index, name in enumerate(plans["weights"])}
    order = [place[weight.name] for weight in weights]
    options = [[Choice(text(o["format"]), whole(o["bytes"]), number(o["kl"])) for o in row] for row in plans["options"]]
    found = []
    for row in plans["points"]:
        chosen = tuple(options[index][whole(row["choice"][index])] for index in order)
        found.append(Point(whole(row["bytes"]), number(row["bits_per_weight"]), number(row["kl"]), chosen))
    marks = tuple(
        Mark(text(row["format"]), number(row["bits_per_weight"]), number(row["kl"]), whole(row["bytes"])) for row in plans["uniform"]
    )
    return tuple(found), marks


def verdict(row: Row) -> Verdict:
    kl_low, kl_high = row["kl_ci95"]
    ratio_low, ratio_high = row["ppl_ratio_ci95"]
    failures, figures = tuple(map(text, row["failures"])), [row[name] for name in _FIGURES] + [kl_low, kl_high, ratio_low, ratio_high]
    if not failures and not all(math.isfinite(number(value)) for value in figures):
        failures = ("a figure is not finite",)  # whatever the file says of itself
    return Verdict(
        tokens=whole(row["tokens"]), kl=number(row["kl_mean"]), kl_low=number(kl_low), kl_high=number(kl_high),
        kl_p99=number(row["kl_p99"]), kl_max=number(row["kl_max"]), kl_floor=maybe(row["kl_floor"], number), ppl=number(row["ppl"]),
        ppl_base=number(row["ppl_base"]), ppl_ratio=number(row["ppl_ratio"]), ppl_ratio_low=number(ratio_low),
        ppl_ratio_high=number(ratio_high), agreement=number(row["top1_agreement"]), max_logit_diff=number(row["max_logit_diff"]),
        bytes=whole(row["bytes"]), bits_per_weight=number(row["bits_per_weight"]), runtime=text(row["runtime"]),
        runtime_version=text(row["runtime_version"]), failures=failures, passed=not failures and row.get("passed", True) is True,
        limits={text(name): number(value) for name, value in row["thresholds"].items() if value is not None},
    )  # fmt: skip


def _methods(outcomes: Row) -> dict[str, int]:
    found: dict[str, int] = {}
    for row in outcomes.values():
        name = text(row.get("method", "cast"))
        found[name] = found.get(name, 0) + 1
    return found


def _block(row: Row) -> Block:
    name = "embedding, output" if whole(row["block"]) < 0 else str(whole(row["block"]))
    return Block(name, maybe(row["predicted_so_far"], number), number(row["measured_so_far"]), number(row["hidden_error"]))


def _distribution(row: Row) -> Distribution:
    return Distribution(
        text(row["weight"]), text(row["format"]), whole(row["sampled"]), _histogram(row["before"]), _histogram(row["after"]),
        number(row["low"]), number(row["high"]), number(row["std"]), number(row["far"]), maybe(row["clipped"], number),
        maybe(row["error"], number), maybe(row["input"], _input),
    )  # fmt: skip


def _input(row: Row) -> Input:
    chosen = row["chosen"]
    ends = None if chosen is None else (number(chosen[0]), number(chosen[1]))
    plain = _histogram(row["values"]), number(row["low"]), number(row["high"])
    return Input(*plain, ends, text(row["how"]), whole(row["massive"]), whole(row["channels"]))


def _histogram(row: Row) -> Histogram:
    return Histogram(number(row["low"]), number(row["high"]), tuple(map(whole, row["counts"])))


def _use(row: Row) -> Use:
    return Use(
        whole(row["context"]), text(row["kv"]), whole(row["weights"]), whole(row["kv_cache"]), whole(row["activations"]),
        whole(row["overhead"]),
    )  # fmt: skip


def _source(row: Row) -> Source:
    return Source(
        text(row["name"]), text(row["architecture"]), whole(row["elements"]), whole(row["float_bytes"]), text(row["float_format"])
    )


def number(value: Any) -> float:
    """JSON has no word for what is not finite: results.json says null."""
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"`{value}` is no number")
    return float(value)


def whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"`{value}` is no whole number")
    float(value)  # one that no float holds is refused here
    return value


def text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"`{value}` is no text")
    return value


def maybe(value: Any, of: Callable[[Any], T]) -> T | None:
    return None if value is None else of(value)
