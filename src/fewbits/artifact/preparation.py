"""A plan in; out come the model with rescaled channels, if asked for, and the plan with the scales of static activations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits import calibration, formats, methods, planning, rewrites
from fewbits.artifact import input_prices
from fewbits.calibration import ranges, reuse
from fewbits.calibration.folder import Statistics
from fewbits.calibration.importance_matrix import ImportanceMatrix
from fewbits.calibration.text.coverage import Coverage, coverage
from fewbits.errors import InputError
from fewbits.formats.runtime.activations import NVFP4, Activation
from fewbits.planning import rounded_inputs
from fewbits.rewrites.rescaling import RewrittenModel
from fewbits.rewrites.statistics import Rescaled, digest
from fewbits.store.cache import hash_of

if TYPE_CHECKING:
    from fewbits.calibration.split import Text
    from fewbits.model import Model
    from fewbits.planning import Plan
    from fewbits.planning.rounded_inputs import Choice
    from fewbits.planning.target import Target
    from fewbits.progress import Progress
    from fewbits.rewrites import Rewrite
    from fewbits.rewrites.smoothquant import Activations
    from fewbits.store.cache import Cache

REWRITES = ("none", "auto", "awq", "smoothquant")


@dataclass(frozen=True)
class Prepared:
    model: Model  # with rescaled channels, if asked for
    plan: Plan  # with the scales of static activations
    statistics: Rescaled | Statistics | ImportanceMatrix | None
    coverage: Coverage | None
    rewrites: tuple[dict[str, object], ...] = ()  # every place where channels could be rescaled, and the effect
    remarks: tuple[str, ...] = ()  # what a reader of the result should know


def needs_calibration(plan: Plan, rewrite: str | None) -> bool:
    return _rewrite(rewrite, plan) != "none" or _calibrates(plan)


def _calibrates(plan: Plan) -> bool:
    return any(a.static for a in plan.activations.values()) or any(methods.get(each.method).needs_statistics for each in plan.entries)


@dataclass(frozen=True, kw_only=True)
class Preparer:
    """Prepares the plans of one run, which share all that is here."""

    source: Model
    target: Target
    text: Text
    statistics: Statistics | ImportanceMatrix | None
    work: Path  # folder of statistics, artifacts and the cache, for this run and the next
    cache: Cache
    progress: Progress[Any]
    rewrite: str | None = "none"  # None: what pays for this plan
    activations_kl: float = math.inf  # that rounding inputs may cost; beyond it some are left as they are
    memory: int = 1 << 30

    def prepare(self, plan: Plan) -> Prepared:
        text, name = self.text, _rewrite(self.rewrite, plan)
        if self.rewrite is None and not isinstance(self.statistics, Statistics):
            name = "none"
        rows: Sequence[Any] = ()
        model = self.source
        statistics: Rescaled | Statistics | ImportanceMatrix | None = self.statistics
        if name != "none":
            if not isinstance(self.statistics, Statistics):
                raise InputError(f"{name} needs statistics of every input", "calibrate with `--data`, or leave `--rewrite` out")
            rewrite, rows = self._factors(plan, self.statistics, name)
            model, statistics = RewrittenModel(self.source, rewrite), Rescaled(self.statistics, rewrite)
        if _needs_ranges(plan):
            if name == "smoothquant" and isinstance(statistics, Rescaled):
                plan = _whole_ranges(plan, statistics)
            elif model is self.source:
                plan = _ranged(plan, self.statistics)
            else:
                plan = _ranged(plan, self._ranges(model, statistics))
        choice = self._choice(plan, model, statistics)
        if choice is not None:
            plan = choice.applied(plan, model.weights, self.target)
        if choice is not None and choice.exempt and name == "smoothquant" and isinstance(self.statistics, Statistics):
            # where an input is not rounded as asked, factors for that would only make its weights harder to round
            rewrite, rows = self._factors(plan, self.statistics, name, (rewrite, rows))
            model, statistics = RewrittenModel(self.source, rewrite), Rescaled(self.statistics, rewrite)
        remark = choice.remark() if choice else None
        covered = coverage(text.samples, self.source.tokenizer, text.windows) if text.samples else None
        return Prepared(model, plan, statistics, covered, tuple(asdict(row) for row in rows), (remark,) if remark else ())

    def _choice(self, plan: Plan, model: Model, statistics: object) -> Choice | None:
        """How every input is read; None: as the plan says."""
        limited = not math.isinf(self.activations_kl) or any(a.granularity == "tensor" for a in plan.activations.values())
        if not limited or not isinstance(statistics, Rescaled | Statistics):
            return None
        inputs = input_prices.priced(plan, model, statistics, self.target, self.progress)
        return rounded_inputs.choose(inputs, self.activations_kl) if inputs else None

    def _factors(
        self, plan: Plan, statistics: Statistics, name: Any, earlier: tuple[Rewrite, Sequence[Any]] | None = None
    ) -> tuple[Rewrite, Sequence[Any]]:
        """The factors of a rewrite, from the cache if they are there."""
        per: dict[str, Activations | None] = {}
        for entry in plan.entries:
            rounded = entry.activation
            per[entry.weight] = rounded.granularity if rounded else None if plan.activations else "token"
        stored = {entry.weight: entry.format for entry in plan.entries}
        key: dict[str, Any] = {"source": self.source.fingerprint, "statistics": statistics.digest}
        key |= {"name": name, "per": per, "formats": stored}
        if done := self.cache.find("rewrite", **key):
            rows = [rewrites.FoldRow(**row | {"consumers": tuple(row["consumers"])}) for row in done.values["rows"]]
            return rewrites.Rewrite.from_tensors(done.tensors), rows
        rewrite, rows = rewrites.find_all(
            self.source, name, statistics.of, lambda weight: formats.get(stored[weight]), self.progress, per.__getitem__, earlier
        )
        self.cache.keep("rewrite", {"rows": [asdict(row) for row in rows]}, rewrite.to_tensors(), **key)
        return rewrite, rows

    def _ranges(self, model: Model, statistics: Rescaled | Statistics | ImportanceMatrix | None) -> Statistics:
        """A histogram cannot be rescaled channel by channel: the rewritten model is run once more."""
        samples, folder = self.text.samples, self.work / "ranges"
        if samples is None:
            raise InputError("static activations after a rewrite need text to run", "give `--data` instead of `--stats`")
        cache = self.cache.of(source=self.source.fingerprint, statistics=digest(statistics))
        collect = partial(
            calibration.collect, model, samples, folder,
            hessians=False, gradients=False, memory=self.memory, cache=cache, progress=self.progress,
        )  # fmt: skip
        return reuse.once("ranges", folder, cache, {"text": hash_of(samples.ids)}, collect, self.progress)


def _rewrite(asked: str | None, plan: Plan) -> Any:
    if asked is not None and asked not in REWRITES:
        raise InputError(f"no rewrite is named `{asked}`", f"known rewrites: {', '.join(REWRITES)}")
    if asked not in ("auto", None):
        return asked
    pays = any(a.format == "int8" for a in plan.activations.values()) and (asked == "auto" or _calibrates(plan))
    return "smoothquant" if pays else "none"


def _needs_ranges(plan: Plan) -> bool:
    return any(activation.static and activation.scale is None for activation in plan.activations.values())


def _whole_ranges(plan: Plan, statistics: Rescaled) -> Plan:
    """Scales for the whole range of every input: SmoothQuant chose its factors for scales that clip nothing."""
    chosen = {}
    for name, activation in plan.activations.items():
        if activation.static and activation.scale is None:
            seen = statistics.of(name).input
            if seen is None:  # calibration never reached it: dynamic instead
                chosen[name] = Activation(activation.format)
            else:
                chosen[name] = replace(activation, range="minmax").calibrated(float(seen.low.min()), float(seen.high.max()))
    return planning.with_activations(plan, chosen)


def _ranged(plan: Plan, statistics: Statistics | ImportanceMatrix | None) -> Plan:
    """The same plan with every static activation's scale, estimated from the histogram of its input."""
    if not isinstance(statistics, Statistics):
        raise InputError("static activations need the inputs' histograms", "calibrate with `--data`, or use dynamic ones")
    chosen = {}
    for name, activation in plan.activations.items():
        if activation.static and activation.range:
            seen = statistics.of(name).input
            if seen is None:  # calibration never reached it: dynamic instead
                chosen[name] = activation.calibrated(-448, 448) if activation.format == NVFP4 else Activation(activation.format)
            elif activation.format == NVFP4:  # its scales follow the values: the factor only has to keep them in reach
                chosen[name] = activation.calibrated(float(seen.low.min()), float(seen.high.max()))
            else:
                levels = ranges.LEVELS[activation.format if activation.symmetric else f"{activation.format}_asymmetric"]
                span = seen.range(activation.range, levels)
                chosen[name] = activation.calibrated(span.low, span.high)
    return planning.with_activations(plan, chosen)
