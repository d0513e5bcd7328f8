"""What happens before codes are chosen: text is drawn and split, statistics are taken, channels rescaled, activations given scales."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fewbits import calibration, embedded, formats, methods, planning, texts
from fewbits.activations import Activation
from fewbits.calibration import Paths, sharding, storing
from fewbits.calibration.collecting import STEPS
from fewbits.calibration.coverage import Coverage, coverage
from fewbits.calibration.data import checksum, documents
from fewbits.calibration.importance_matrix import ImportanceMatrix
from fewbits.calibration.storing import Statistics
from fewbits.errors import InputError
from fewbits.files import sha256_of
from fewbits.kept import hash_of
from fewbits.progress import say

if TYPE_CHECKING:
    from fewbits.calibration.data import Samples
    from fewbits.calibration.statistics import WeightStatistics
    from fewbits.executors.crew import Crew
    from fewbits.kept import Kept
    from fewbits.model import Model
    from fewbits.planning import Plan
    from fewbits.progress import Progress
    from fewbits.rewrites import Rewrite

REWRITES = ("none", "auto", "awq", "smoothquant")


@dataclass(frozen=True)
class Text:
    """Samples to calibrate with (None: nothing to calibrate) and windows to judge on: never the same text."""

    samples: Samples | None
    windows: list[texts.Window]


@dataclass(frozen=True)
class Prepared:
    model: Model  # with its channels rescaled, if that was asked for
    plan: Plan  # with the scales of static activations
    statistics: Rescaled | Statistics | ImportanceMatrix | None
    coverage: Coverage | None
    rewrites: tuple[dict[str, object], ...] = ()  # every place where channels could be rescaled, and what it did


@dataclass(frozen=True)
class Rescaled:
    """Statistics of a rewritten model, without running it: those of the original, rescaled."""

    original: Statistics
    rewrite: Rewrite

    def of(self, weight: str) -> WeightStatistics:
        from fewbits import rewrites

        return rewrites.rewritten(self.original.of(weight), weight, self.rewrite)


def needs_calibration(plan: Plan, rewrite: str) -> bool:
    return rewrite != "none" or _needs_ranges(plan) or any(methods.get(entry.method).needs_statistics for entry in plan.entries)


def split(source: Model, data: Paths, held_out: Paths, samples: int, length: int | Literal["data"] | None, seed: int, tokens: int) -> Text:
    """`samples` 0: nothing is calibrated. Without text to judge on, a part of the data is set aside for it."""
    if held_out or not data:
        windows = held_out_windows(source, held_out, None if length == "data" else length, tokens)
        return Text(calibration.draw(source, data, samples, length, seed) if samples else None, windows)
    wanted = max(1, tokens // (texts.window_length(source.config, None if length == "data" else length) - 1))
    drawn = calibration.draw(source, data, samples + wanted, length, seed)
    windows = [list(ids) for ids in drawn.ids]
    if not samples:
        return Text(None, windows[:wanted])
    if len(windows) < 2:
        raise InputError("the data gives a single sample", "give more text with `--data`, or other text with `--held-out`")
    aside = max(1, min(wanted, len(windows) // 4))
    some = slice(aside, aside + samples)
    ids = drawn.ids[some]
    return Text(replace(drawn, ids=ids, sources=drawn.sources[some], digest=checksum(ids)), windows[:aside])


def held_out_windows(source: Model, data: Paths, length: int | None, tokens: int) -> list[texts.Window]:
    if not data:
        text = embedded.verification_text()
    else:
        text = "\n\n".join(document.text for document in documents(calibration.listed(data), source.tokenizer))
    windows = texts.windows(text, source.tokenizer, texts.window_length(source.config, length), tokens)
    texts.check_ids(windows, source.config)
    return windows


def prepare(
    source: Model,
    plan: Plan,
    text: Text,
    statistics: Statistics | ImportanceMatrix | None,
    *,
    rewrite: str,
    memory: int,
    work: Path,
    kept: Kept,
    progress: Progress[Any],
) -> Prepared:
    seen = coverage(text.samples, source.tokenizer, text.windows) if text.samples else None
    name = _rewrite(rewrite, plan)
    rows: Sequence[Any] = ()
    model = source
    known: Rescaled | Statistics | ImportanceMatrix | None = statistics
    if name != "none":
        if not isinstance(statistics, Statistics):
            raise InputError(f"{name} needs statistics of every input", "calibrate with `--data`, or leave `--rewrite` out")
        per: Literal["token", "tensor"] = "tensor" if any(a.static for a in plan.activations.values()) else "token"
        found, rows = _found(source, plan, statistics, name, per, kept, progress)
        model = source.rewritten(found)
        known = Rescaled(statistics, found)
    if _needs_ranges(plan):
        if name == "smoothquant" and isinstance(known, Rescaled):
            plan = _whole_ranges(plan, known)
        elif model is not source:  # a histogram cannot be rescaled channel by channel: the rewritten model is run once more
            if text.samples is None:
                raise InputError("static activations after a rewrite need text to run", "give `--data` instead of `--stats`")
            own = kept.of(source=source.fingerprint, statistics=digest(known))
            run = partial(
                calibration.collect, model, text.samples, work / "ranges",
                hessians=False, gradients=False, memory=memory, kept=own, progress=progress,
            )  # fmt: skip
            plan = _ranged(plan, _once("ranges", work / "ranges", own, {"text": hash_of(text.samples.ids)}, run, progress))
        else:
            plan = _ranged(plan, statistics)
    return Prepared(model, plan, known, seen, tuple(asdict(row) for row in rows))


def _found(
    source: Model, plan: Plan, statistics: Statistics, name: Any, per: Literal["token", "tensor"], kept: Kept, progress: Progress[Any]
) -> tuple[Rewrite, Sequence[Any]]:
    """The factors of a rewrite, from the work folder if they are there."""
    from fewbits import rewrites

    stored = {entry.weight: entry.format for entry in plan.entries}
    own: dict[str, Any] = {"source": source.fingerprint, "statistics": statistics.digest, "name": name, "per": per, "formats": stored}
    if done := kept.find("rewrite", **own):
        rows = [rewrites.Row(**row | {"consumers": tuple(row["consumers"])}) for row in done.values["rows"]]
        return rewrites.Rewrite.from_tensors(done.tensors), rows
    found, rows = rewrites.find_all(source, name, statistics.of, lambda weight: formats.get(stored[weight]), progress, activations=per)
    kept.keep("rewrite", {"rows": [asdict(row) for row in rows]}, found.to_tensors(), **own)
    return found, rows


def _rewrite(asked: str, plan: Plan) -> Any:
    if asked not in REWRITES:
        raise InputError(f"no rewrite is named `{asked}`", f"known rewrites: {', '.join(REWRITES)}")
    if asked != "auto":
        return asked
    return "smoothquant" if any(a.format == "int8" for a in plan.activations.values()) else "none"


def statistics_for(
    source: Model,
    stats: str | Path | None,
    drawn: Samples | None,
    memory: int,
    folder: Path,
    kept: Kept,
    progress: Progress[Any],
    shards: int = 1,
    crew: Crew | None = None,
) -> Statistics | ImportanceMatrix | None:
    """Those given (a folder, or llama.cpp's importance matrix), those of an earlier run over the same model and text, or new ones: in so
    many shards, which a crew takes apart."""
    if stats is not None and Path(stats).is_file():
        return ImportanceMatrix(Path(stats), source)
    if stats is not None:
        found = Statistics(Path(stats)).expect(source.weights)
        if found.model_sha256 != source.fingerprint:
            raise InputError(f"`{stats}` holds statistics of another model", "calibrate this one: leave `--stats` out")
        return found
    if drawn is None:
        return None
    own: dict[str, Any] = {"source": source.fingerprint, "text": hash_of(drawn.ids), "shards": shards}

    def collected() -> Statistics:
        if shards > 1:
            return sharding.collect(source, drawn, folder, shards, kept=kept, crew=crew, memory=memory, progress=progress)
        return calibration.collect(source, drawn, folder, memory=memory, kept=kept, progress=progress)

    found = _once("statistics", folder, kept, own, collected, progress)
    sharding.forget(kept)
    return found


def _once(
    step: str, folder: Path, kept: Kept, own: dict[str, Any], collect: Callable[[], Statistics], progress: Progress[Any]
) -> Statistics:
    """Those in the folder, if they are what an earlier run made of the same; else new ones. Either way the states between blocks go."""
    done = kept.find(step, **own)
    if done is not None and (folder / storing.ABOUT).is_file():
        with suppress(InputError):  # damaged: made anew
            found = Statistics(folder)
            if found.digest == done.values["digest"]:
                say(progress, "going on: the statistics of this text were there")
                return found
    found = collect()
    kept.keep(step, {"digest": found.digest}, {}, **own)
    for each in STEPS:  # what is of use is in the folder now
        kept.drop_step(each)
    return found


def digest(statistics: Rescaled | Statistics | ImportanceMatrix | None) -> str | None:
    """What codes were fitted to: other statistics give other codes."""
    if isinstance(statistics, Rescaled):
        factors = statistics.rewrite.to_tensors()
        return hash_of([statistics.original.digest, {name: factor.tolist() for name, factor in factors.items()}])
    if isinstance(statistics, ImportanceMatrix):
        return sha256_of(statistics.path)
    return statistics.digest if statistics else None


def _needs_ranges(plan: Plan) -> bool:
    return any(activation.static and activation.scale is None for activation in plan.activations.values())


def _whole_ranges(plan: Plan, known: Rescaled) -> Plan:
    """From the least to the greatest value of every input: SmoothQuant chose its factors for scales that clip nothing."""
    chosen = {}
    for name, activation in plan.activations.items():
        if activation.static and activation.scale is None:
            seen = known.of(name).input
            if seen is None:  # calibration never reached it: scaled as it comes
                chosen[name] = Activation(activation.format)
            else:
                chosen[name] = replace(activation, range="minmax").calibrated(float(seen.low.min()), float(seen.high.max()))
    return planning.with_activations(plan, chosen)


def _ranged(plan: Plan, statistics: Statistics | ImportanceMatrix | None) -> Plan:
    """The same plan with every static activation's scale, estimated from the histogram of its input."""
    from fewbits import ranges

    if not isinstance(statistics, Statistics):
        raise InputError("static activations need the inputs' histograms", "calibrate with `--data`, or use dynamic ones")
    chosen = {}
    for name, activation in plan.activations.items():
        if activation.static and activation.range:
            levels = ranges.LEVELS[activation.format if activation.symmetric else f"{activation.format}_asymmetric"]
            seen = statistics.of(name).input
            if seen is None:  # calibration never reached it: scaled as it comes
                chosen[name] = Activation(activation.format)
            else:
                found = seen.range(activation.range, levels)
                chosen[name] = activation.calibrated(found.low, found.high)
    return planning.with_activations(plan, chosen)
