"""The steps of `quantize`, with forecasts in seconds, as the parts that progress is told of while they are done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fewbits.progress import Part

# How the time of a step divides, by CPU time on the embedded model.
SHARES = {
    "calibrating": (("statistics, forward", 0.27), ("statistics, loss", 0.05), ("statistics, backward", 0.68)),
    "measuring": (("measuring", 1.0),),
    "forecasting": (("running side by side", 0.7), ("comparing outputs", 0.3)),
    "quantizing": (("quantizing", 1.0),),
    "tuning": (("tuning scales", 1.0),),
    "verifying": (("running the float model", 0.2), ("verifying", 0.8)),
}
_BY_WEIGHT, _UNCOUNTED = ("measuring", "quantizing"), ("verifying", "statistics, loss", "comparing outputs")  # the others go block by block
_EACH_ROUND = ("quantizing", "tuning", "verifying")


def parts_of(steps: Sequence[tuple[str, float]], weights: int, blocks: int, rounds: int) -> tuple[Part, ...]:
    """`rounds`: how many plans are made at most; the seconds of what each of them needs are of all."""
    once = [step for step in steps if step[0] not in _EACH_ROUND]
    again = [(name, seconds / rounds) for name, seconds in steps if name in _EACH_ROUND] * rounds
    return tuple(
        Part(what, weights if what in _BY_WEIGHT else 0 if what in _UNCOUNTED else blocks, share * seconds)
        for name, seconds in [*once, *again]
        for what, share in SHARES[name]
    )


def done_before(results: Mapping[str, int], weights: int, blocks: int) -> dict[str, float]:
    """The share of each step that lies in the work folder, by the number of results of each kind there. Whether they fit the request is
    seen when they are used."""
    passes = min(1.0, sum(results.get(kind, 0) for kind in ("input", "gradient")) / (2 * (blocks + 1)))
    return {
        "calibrating": 1.0 if results.get("statistics") else passes,
        "measuring": min(1.0, results.get("row", 0) / max(1, weights)),
        "quantizing": min(1.0, results.get("weight", 0) / max(1, weights)),
    }
