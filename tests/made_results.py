"""A results.json as a run would leave it, from a made-up table of sensitivities: no model is run, and every part is there."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import numpy as np
from tables import ELEMENTS, GGUF, table_of

from fewbits.planning.accuracy import Thresholds
from fewbits.planning.decision import Budget, decide
from fewbits.reporting.results import frontiers
from fewbits.reporting.results.distributions import BINS
from fewbits.reporting.schema import Distribution, Gathered, Hash, Histogram, Input, KernelUse, MemoryUse, Reproduction, Source
from fewbits.targets.running import Command, HowToRun
from fewbits.verification import metrics
from fewbits.verification.answers import Answer
from fewbits.verification.forecast.block_errors import Accumulation, BlockError
from fewbits.verification.metrics import MeasuredLogits

SIZE = "4.5bpw"


def results(limits: Thresholds | None = None) -> dict[str, Any]:
    """A copy of its own for everybody."""
    found: dict[str, Any] = json.loads(_results(limits or Thresholds(max_kl=0.5)))
    return found


@cache
def _results(limits: Thresholds, seed: int = 0) -> str:
    rng = np.random.default_rng(seed)
    decision = decide(table_of(seed), GGUF, Budget(size=SIZE))
    plan = decision.plan
    kl = rng.gamma(0.5, 2 * (plan.kl or 0.0), 2048)
    base = rng.gamma(2, 1.7, 2048)
    measured = MeasuredLogits(
        kl.tolist(), (base + rng.normal(0.002, 0.05, 2048)).tolist(), base.tolist(), (rng.random(2048) < 0.97).tolist(), 0.8
    )
    verdict = metrics.judge(
        measured, limits, nbytes=plan.nbytes + 90_000, bits_per_weight=plan.bits_per_weight, runtime="llama.cpp",
        runtime_version="xllamacpp 1", kl_floor=2e-7,
        domains=metrics.figures_by_domain(
            {"file": measured}, [[0] * 257] * 8, ["prose", "code", "chat", "prose", "code", "long", "prose", "long"]
        ),
    )  # fmt: skip
    gathered = Gathered(
        source=Source("tiny-llama", "llama", ELEMENTS, 2 * ELEMENTS, "fp16"),
        reproduction=Reproduction(
            ("fewbits quantize tiny-llama -o tiny.gguf --size 4.5bpw",),
            (Hash("the model `tiny-llama`", "ab" * 32), Hash("`tiny.gguf`", "cd" * 32, 7)),
            {"fewbits": "0.1.0", "python": "3.11"},
        ),
        frontier_plans=frontiers.of(decision),
        accumulation=_accumulated(decision.plan.kl or 0.0),
        distributions=tuple(_spread(rng, entry.weight, entry.format) for entry in plan.entries),
        memory=tuple(MemoryUse(n, kv, plan.nbytes, 20 * n, 9_000_000, 18_000_000) for n in (2048, 8192) for kv in ("float", "int8")),
        kernels=(KernelUse("q4_k", "native-avx2", 3, 1000),),
        how_to_run=HowToRun((Command("a chat in the terminal", "llama-cli -m out/tiny.gguf -c 2048"),), 2048),
        answers=(Answer("Once upon a", " time there was", " time there lived", 2),),
        for_size="fewbits quantize tiny-llama -o tiny.gguf --size SIZE",
    )  # fmt: skip
    made = {
        "file": "out/tiny.gguf", "artifact": "out/tiny.gguf.work/artifact", "plan": json.loads(plan.to_json()),
        "verdict": verdict.to_dict(), "coverage": _coverage(),
        "outcomes": {entry.weight: {"method": "gptq"} for entry in plan.entries}, "rewrites": [],
        "decision": decision.to_dict(), "rounds": [],
    }  # fmt: skip
    return json.dumps(made | gathered.to_dict())


def comparison() -> dict[str, Any]:
    """Of `fewbits compare FILE... --against MODEL`: the first of three files is beaten, and one more could not be run."""
    rows = []
    for name, bits, kl in (("theirs.gguf", 4.4, 0.02), ("ours.gguf", 4.3, 0.006), ("large.gguf", 8.5, 1e-4)):
        figures = {"bits_per_weight": bits, "bytes": round(bits * ELEMENTS / 8), "kl_mean": kl, "kl_ci95": [0.9 * kl, 1.1 * kl]}
        apart = {"to": "large.gguf", "kl": kl - 1e-4, "ci95": [0.9 * kl, 1.1 * kl]} if kl > 1e-4 else None
        beaten = {"to": "ours.gguf", "kl": 0.014, "ci95": [0.013, 0.015]} if name == "theirs.gguf" else None
        verdict = results(Thresholds())["verdict"] | figures
        rows.append({"name": name, "verdict": verdict, "tokens_per_second": 20.0, "to_best": apart, "beaten_by": beaten})
    refused = [{"file": "x.bin", "reason": "no runtime takes `x.bin`"}]
    return {"model": "tiny-llama", "tokens": 2048, "machine": "a processor", "compared": rows, "refused": refused}


def demonstration() -> dict[str, Any]:
    """The same as one of the files of `fewbits demo`."""
    detail = results(Thresholds())
    rows = []
    for name, bits, kl in (("q8_0", 8.5, 1e-4), ("q4_k", 4.5, 0.006), ("4.5bpw", 4.5, 0.0025), ("3bpw", 3.0, 0.03)):
        figures = {"bits_per_weight": bits, "bytes": round(bits * ELEMENTS / 8), "kl_mean": kl, "kl_ci95": [0.9 * kl, 1.1 * kl]}
        check = {"kl": 1e-6, "explained": 1e-6, "floor": 1e-7, "limit": 4e-6, "agrees": True}
        rows.append(detail["verdict"] | figures | {"format": name, "target": "gguf", "file": f"{name}.gguf", "crosscheck": check})
    detail["file"] = "out/4.5bpw.gguf"
    return {"model": "embedded", "folder": "out", "rows": rows, "skipped": [], "passed": True, "detail": detail}


def kernel_bench() -> dict[str, Any]:
    spread = {"median": 0.7, "low": 0.6, "high": 0.8}
    result = {
        "name": "fewbits", "bound": "read", "share_of_limit": spread, "gigabytes_per_second": 8.0, "gigaoperations_per_second": 30.0,
    }  # fmt: skip
    cases = [
        {"format": name, "k": 4096, "n": 4096, "rows": rows, "results": [result]} for name in ("q4_k", "q6_k", "mxfp4") for rows in (1, 64)
    ]
    return {"machine": {"processor": "a processor"}, "limits": {"threads": 2, "all": []}, "cases": cases, "skipped": []}


def _accumulated(total: float) -> Accumulation:
    parts = [total * share for share in (0.1, 0.3, 0.45, 0.7, 1.0)]
    return Accumulation(511, tuple(BlockError(i - 1, 7, total / 5, kl, 1.05 * kl, 1e-3 * (i + 1)) for i, kl in enumerate(parts)))


def _spread(rng: np.random.Generator, weight: str, fmt: str) -> Distribution:
    x = np.linspace(-4, 4, BINS)
    counts = (1e6 * np.exp(-0.5 * x**2) + rng.integers(0, 3, BINS)).astype(int).tolist()
    values = Histogram(-0.4, 0.4, tuple(counts))
    seen = Input(Histogram(-8.0, 8.0, tuple(counts)), -8.0, 8.0, (-5.0, 5.0), "int8:static, by mse", 1, 256)
    return Distribution(weight, fmt, 1000, values, values, -0.4, 0.4, 0.1, 1e-4, 2e-3, 0.05, seen if "embed" not in weight else None)


def _coverage() -> dict[str, Any]:
    return {
        "samples": 16, "tokens": 8192, "lengths": {"least": 512, "median": 512, "p90": 512, "most": 512, "histogram": [[512, 16]]},
        "vocabulary": 2048, "vocabulary_seen": 0.8,
        "sources": [
            {"name": "a.txt", "samples": 12, "tokens": 6144, "share": 0.75}, {"name": "b.txt", "samples": 4, "tokens": 2048, "share": 0.25},
        ],
        "missing_in_evaluation": {"occurrences": 0.004, "distinct": 0.01, "most_frequent": [{"id": 7, "text": "dom", "count": 18}]},
        "overlap": {"n": 13, "share": 0.03, "longest": 149, "example": "text"}, "warnings": ["8,192 tokens are few"], "notes": [],
    }  # fmt: skip
