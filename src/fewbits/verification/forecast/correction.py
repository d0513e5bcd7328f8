"""What runs of a damaged copy of the model say of a plan's forecast: a table of predictions in, the same table with its corrections out.

large_damage.py   a curve, where the plan's damage is large: KL is then no sum of predictions for single weights
by_kind.py        a factor for each kind of text, where the plan is judged on other text than that of calibration
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fewbits import formats
from fewbits.calibration.shards import split_samples
from fewbits.sensitivity.curve import FROM
from fewbits.store.cache import hash_of
from fewbits.verification.forecast import by_kind
from fewbits.verification.forecast.large_damage import measure_curve

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fewbits.calibration.folder import Statistics
    from fewbits.calibration.split import Text
    from fewbits.calibration.text.samples import Samples
    from fewbits.model import Model
    from fewbits.planning import Plan
    from fewbits.progress import Progress
    from fewbits.sensitivity.table import Sensitivity
    from fewbits.store.cache import Cache

_STEP = "kinds"


def tokens_run(text: Text, held_out: bool, shards: int = 1) -> int:
    """Of the forecast by kind of text; 0: there will be none."""
    if not text.samples or not by_kind.worth_asking(text.domains, held_out):
        return 0
    other, windows = _texts(text, text.samples, shards)
    return sum(len(window) for each in (other, *windows.values()) for window in each)


def _texts(text: Text, samples: Samples, shards: int) -> tuple[list[Sequence[int]], dict[str, list[Sequence[int]]]]:
    """Of calibration's text and of each kind that is judged, some windows."""
    judged: dict[str, list[Sequence[int]]] = {}
    for window, name in zip(text.windows, text.domains, strict=True):
        judged.setdefault(name, []).append(window)
    # every second sample of a shard: those that error feedback is not fitted to where it is judged (`model/walk.py`)
    other = [ids for part in split_samples(samples, shards) for ids in part.ids[1::2]]
    return by_kind.some(other, 2 * by_kind.TOKENS), {name: by_kind.some(each, by_kind.TOKENS) for name, each in judged.items()}


@dataclass(frozen=True, kw_only=True)
class Correction:
    source: Model
    statistics: Statistics
    text: Text  # to calibrate with, and to judge on
    calibrated: bool  # the statistics are of that text; False: of one that is not here
    held_out: bool  # text to judge on was given
    shards: int
    tuned: bool  # scales will be
    memory: int
    cache: Cache
    progress: Progress[Any]

    def of(self, table: Sensitivity, plan: Plan) -> Sensitivity:
        if (plan.kl or 0.0) >= FROM:
            samples = self.text.samples.ids if self.text.samples else self.text.windows
            curve = measure_curve(self.source, self.statistics, plan, samples, self.memory, self.progress, tuned=self.tuned)
            table = replace(table, curve=curve)
        if self.calibrated and self.text.samples and by_kind.worth_asking(self.text.domains, self.held_out):
            table = replace(table, kinds=self._kinds(table, plan, self.text.samples))
        return table

    def _kinds(self, table: Sensitivity, plan: Plan, samples: Samples) -> dict[str, float]:
        other, windows = _texts(self.text, samples, self.shards)
        chosen = {entry.weight: (entry.format, table.rows[entry.weight][entry.format].method) for entry in plan.entries}
        cache = self.cache.of(source=self.source.fingerprint, statistics=self.statistics.digest)
        versions = {name: formats.get(name).version for name, _ in chosen.values()}
        key = {"plan": hash_of([chosen, versions]), "text": hash_of([windows, other])}
        if not (known := cache.find(_STEP, **key)):
            fed_back = {weight for weight, (_, method) in chosen.items() if method == "gptq"}
            factors = by_kind.measure_kinds(self.source, self.statistics, plan, fed_back, other, windows, self.memory, self.progress)
            known = cache.keep(_STEP, {"factors": factors}, {}, **key)
        return dict(known.values["factors"])
