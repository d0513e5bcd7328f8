"""`fewbits fit`: the memory that each format of a model takes on a device, whether it fits, its speed, and changes that make it fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from fewbits import formats as known_formats
from fewbits import planning, targets
from fewbits.devices import catalogue, groups, host
from fewbits.devices.catalogue import Device
from fewbits.devices.units import parse_tokens, size
from fewbits.errors import InputError
from fewbits.inspection.capacity import caches, sources, speed
from fewbits.inspection.capacity.offload import Held, Offload, offload
from fewbits.inspection.capacity.speed import Range
from fewbits.planning import footprint, recipes
from fewbits.planning.footprint import Memory, Use
from fewbits.planning.mixes import OTHER_NAMES
from fewbits.planning.speed import share
from fewbits.targets.gguf import layout
from fewbits.targets.mlx import schemes

if TYPE_CHECKING:
    from fewbits.formats import Format
    from fewbits.inspection.capacity.outline import OutlineWeight
    from fewbits.inspection.capacity.sources import Source

Verdict = Literal["fits", "tight", "offloads", "does not fit"]
CONTEXT = 4096
# llama.cpp's mixes, as its files are named; a name that is a type too means both (`_sized`)
FORMATS = ("fp16", "q8_0", "q6_k", "q5_k_m", "q4_k_m", "iq4_xs", "q3_k_m", "iq3_xxs", "q2_k", "iq2_m", "iq2_xxs")
STORED = "as stored"
PURE = " pure"  # behind the name of a type that all weights have, where llama.cpp has a mix of that name
_TIGHT = 0.1  # of the total: measured memory is within this share of what is counted
_TABLES = ("embedding", "output")
_STEP = 256  # tokens: llama.cpp's cache grows in such steps


@dataclass(frozen=True)
class FormatFit:
    """One format of the model on the device."""

    format: str
    mix: bool  # llama.cpp's, in which some tensors have better types; else one type for all
    bits_per_weight: float
    memory: Memory
    margin: int  # bytes left; negative: missing
    verdict: Verdict
    largest_context: int  # at most the context that the model was made for
    decode: Range | None
    prefill: Range | None
    changes: tuple[str, ...] = ()  # each alone makes it fit
    others: str = ""  # weights whose shape does not suit this format, and the formats they get
    offload: Offload | None = None  # layers in the GPUs and the others in system memory

    @property
    def label(self) -> str:
        return _label(self.format, self.mix)

    @property
    def fits(self) -> bool:
        return self.verdict != "does not fit"


@dataclass(frozen=True)
class Fit:
    model: str
    assumed: str
    exact: bool  # the bytes of weights are those of the file, to the byte
    parameters: int
    device: Device
    asked: bool  # the user named a device or a size
    context: int
    batch: int
    kv: str
    runtime: str
    longest: int  # the context that the model was made for
    rows: tuple[FormatFit, ...]
    how: str = speed.HOW

    @property
    def passed(self) -> bool:
        """Some format fits, or the user named no device."""
        return not self.asked or any(row.fits for row in self.rows)

    def __str__(self) -> str:
        fitting = [row for row in self.rows if row.fits]
        best = max(fitting, key=lambda row: row.bits_per_weight, default=None)
        speed = f", {best.decode.low:.3g} to {best.decode.high:.3g} tokens/s" if best and best.decode else ""
        most = f"{best.label} is the largest: {size(best.memory.total)}, {best.verdict}{speed}" if best else "none of them"
        fits = ", ".join(row.label for row in fitting) or "nothing"
        return f"{self.model} on {self.device.name}, {self.context} tokens of context, {self.runtime}\nwhat fits: {fits}\n{most}"

    def to_dict(self) -> dict[str, object]:
        content = asdict(self)
        for row, fit in zip(content["rows"], self.rows, strict=True):
            row["memory"]["total"] = fit.memory.total
        return content | {"passed": self.passed}


def fit(
    model: str | Path | None = None,
    *,
    params: str | None = None,
    device: str | None = None,
    memory: str | None = None,
    context: str | int | None = None,
    batch: int = 1,
    kv: str = "float",
    formats: str | Sequence[str] = (),
    runtime: str = footprint.LLAMA_CPP,
    offline: bool = False,
    ram: str | None = None,
) -> Fit:
    """From a config or a header alone. `device`: one, or several (`2x3090`), or with system memory behind them (`rtx 3060 + 32GB`), which
    `ram` says too. Without a device or a memory: on this machine, as it is now. Without a context: 4096, or what the
    model was made for if that is less."""
    source = sources.find(model, params, offline)
    place, asked = _place(device, memory)
    if ram is not None:
        place = groups.with_memory(place, ram)
    use = _use(min(CONTEXT, source.longest) if context is None else parse_tokens(context), batch, kv, runtime, place)
    names = [name.lower() for name in known_formats.names_of(formats)]
    sized = list(_sized(source, names))
    judge = _Judge(source, use, place, sized)
    return Fit(
        model=source.name,
        assumed=source.assumed,
        exact=source.outline.exact,
        parameters=source.outline.numbers + source.outline.kept,
        device=place,
        asked=asked,
        context=use.context,
        batch=batch,
        kv=use.kv.name,
        runtime=use.runtime,
        longest=source.longest,
        rows=tuple(judge.row(each) for each in sized),
    )


def _place(device: str | None, memory: str | None) -> tuple[Device, bool]:
    if device is not None and memory is not None:
        raise InputError("`--device` and `--memory` are two answers to one question", "give one of them")
    if memory is not None:
        return catalogue.memory(memory, "--memory"), True
    if device is not None:
        return groups.place(device, "--device"), True
    return host.this(), False


def _use(context: int, batch: int, cache: str, runtime: str, place: Device) -> Use:
    use = Use(
        context, batch, caches.get(cache), runtime=footprint.runtime(runtime), reserved=place.reserves, devices=len(place.parts or (place,))
    )
    caches.check(use.kv, use.runtime)
    if use.runtime == footprint.FEWBITS and place.is_gpu:
        raise InputError(f"fewbits' own runtime generates on CPUs, and `{place.name}` is a GPU", "leave `--runtime` out")
    footprint.check(use)
    return use


@dataclass(frozen=True)
class Sized:
    """A format of the model, in bytes."""

    name: str
    weights: int  # all tensors
    read: float  # of them, for one token
    bits: float
    quantized: bool
    beside: int  # of `weights`, the embedding and the output
    read_beside: float  # of `read`
    mix: bool = False
    kernels: float = 1.0  # the share of the bandwidth at which a CPU of few cores reads it
    others: str = ""


def _sized(source: Source, names: list[str]) -> Iterator[Sized]:
    if source.stored is not None and not names:
        numbers = source.outline.numbers
        share = sum(each.numbers * each.read for each in source.outline.matrices) / numbers
        bits = 8 * (source.stored - 4 * source.outline.kept) / numbers
        tables = [each for each in source.outline.matrices if each.weight.kind in _TABLES]
        beside = (sum(each.numbers for each in tables) / numbers, sum(each.numbers * each.read for each in tables) / numbers)
        yield Sized(
            STORED, source.stored, source.stored * share, bits, bits < 15, round(source.stored * beside[0]), source.stored * beside[1]
        )
    for name in names or FORMATS:
        try:
            yield from _named(source, name, alone=bool(names))
        except InputError:  # a mix that llama.cpp itself refuses for this shape
            if names:
                raise


def _named(source: Source, name: str, alone: bool) -> Iterator[Sized]:
    """llama.cpp's mix, or one type for all; both where they have one name and differ, if the user gave it."""
    plain = name.removesuffix(PURE)
    is_type, is_mix = plain in known_formats.all(), plain in recipes.known() or plain in OTHER_NAMES
    if plain == name and (is_mix or not is_type):
        mix = _by_recipe(source, name)
        yield mix
        if not (alone and is_type) or _by_format(source, known_formats.get(plain)).weights == mix.weights:
            return
    yield _by_format(source, known_formats.get(plain))


def _label(name: str, mix: bool) -> str:
    return name if mix or not (name in recipes.known() or name in OTHER_NAMES) else f"{name}{PURE}"


class _Held:
    """The sum over tensors; what is not quantized is in float32."""

    def __init__(self, source: Source) -> None:
        self.outline = source.outline
        self.nbytes = 4 * self.outline.kept
        self.beside, self.read_beside = 0, 0.0
        self.read = self.waited = 4.0 * self.outline.kept  # bytes for one token; and over the share of the bandwidth at which they come

    def add(self, matrix: OutlineWeight, nbytes: int, fmt: Format) -> None:
        read = matrix.count * nbytes * matrix.read
        self.nbytes, self.read, self.waited = self.nbytes + matrix.count * nbytes, self.read + read, self.waited + read / share(fmt)
        if matrix.weight.kind in _TABLES:
            self.beside, self.read_beside = self.beside + matrix.count * nbytes, self.read_beside + read

    def sized(self, name: str, quantized: bool, others: str = "", mix: bool = False) -> Sized:
        bits = 8 * (self.nbytes - 4 * self.outline.kept) / self.outline.numbers
        return Sized(name, self.nbytes, self.read, bits, quantized, self.beside, self.read_beside, mix, self.read / self.waited, others)


def _by_format(source: Source, fmt: Format) -> Sized:
    """As `quantize --format` would write it: weights whose columns do not divide get the next format that fits."""
    target = targets.get("gguf" if layout(fmt) or isinstance(schemes.of(fmt), str) else "mlx")
    held, other = _Held(source), dict[str, int]()
    priced = dict[tuple[int, int], tuple[int, str]]()
    for each in source.outline.matrices:
        shape = each.weight.shape
        if shape not in priced:
            entry = planning.priced(each.weight, target, fmt, "", "rtn")
            priced[shape] = (entry.nbytes, entry.format)
        nbytes, got = priced[shape]
        held.add(each, nbytes, known_formats.get(got))
        if got != fmt.name:
            other[got] = other.get(got, 0) + each.count
    count = sum(each.count for each in source.outline.matrices)
    told = ", ".join(f"{number} of {count} weights as {name}" for name, number in other.items())
    return held.sized(fmt.name, not fmt.is_cast, told)


def _by_recipe(source: Source, name: str) -> Sized:
    mix = _recipe_name(name)
    stored = {each.weight.name: each for each in source.outline.matrices}
    names = None if source.outline.named_by_transformers else str  # else names are those of a GGUF, with `.weight` at their end
    chosen = recipes.recipe(mix, [each.weight for each in stored.values()], source.config, names)
    held = _Held(source)
    for weight, fmt in chosen.items():
        held.add(stored[weight], fmt.nbytes(stored[weight].weight.shape), fmt)
    return held.sized(mix, quantized=True, mix=True)


def _recipe_name(name: str) -> str:
    try:
        return recipes.check(name)
    except InputError as failure:
        raise InputError(
            f"`{name}` is neither a format nor a mix of llama.cpp", f"`fewbits formats` lists formats; {failure.hint}"
        ) from failure


@dataclass(frozen=True)
class _Judge:
    source: Source
    use: Use
    device: Device
    sized: Sequence[Sized]

    def row(self, sized: Sized) -> FormatFit:
        counted = self._memory(sized, self.use)
        margin = self.device.usable - counted.total
        verdict: Verdict = "does not fit" if margin < 0 else "tight" if margin < _TIGHT * counted.total else "fits"
        missing = margin < 0 and self.device.behind is not None  # a part of it is in system memory, if it runs at all
        split = self._offload(sized) if missing else None
        return FormatFit(
            format=sized.name,
            mix=sized.mix,
            bits_per_weight=sized.bits,
            memory=counted,
            margin=margin,
            verdict="offloads" if split else verdict,
            largest_context=self._context(sized, self.use),
            decode=split.decode if split else None if missing else self._decode(sized),
            prefill=None if missing else speed.prefill(self._multiplied, sized.quantized, self.device),
            changes=tuple(self._changes(sized)) if margin < 0 else (),
            others=sized.others,
            offload=split,
        )

    def _decode(self, sized: Sized) -> Range | None:
        return speed.decode(self.source.shape, sized.read, self.use, self.device, sized.kernels)

    def _offload(self, sized: Sized) -> Offload | None:
        held = Held(sized.weights - sized.beside, sized.beside, sized.read - sized.read_beside, sized.read_beside)
        return offload(self.source.shape, held, self.use, self.device, sized.kernels)

    @cached_property
    def _multiplied(self) -> float:
        return sum(each.numbers * each.read for each in self.source.outline.matrices)

    def _memory(self, sized: Sized, use: Use) -> Memory:
        return footprint.memory(self.source.shape, sized.weights, use)

    def _fits(self, sized: Sized, use: Use) -> bool:
        return self._memory(sized, use).fits(self.device.usable)

    def _context(self, sized: Sized, use: Use) -> int:
        return footprint.largest_context(self.source.shape, sized.weights, self.device.usable, use, max(self.source.longest, use.context))

    def _changes(self, sized: Sized) -> Iterator[str]:
        """Single changes, the least felt first; if none is enough, a shorter context with a smaller cache."""
        enough = False
        smaller = [name for name in caches.SMALLER[self.use.runtime] if caches.get(name).bits < self.use.kv.bits]
        for name in smaller:
            if self._fits(sized, replace(self.use, kv=caches.get(name))):
                yield f"{name} KV cache"
                enough = True
                break
        lighter = [each for each in self.sized if each.weights < sized.weights and self._fits(each, self.use)]
        if lighter:
            best = max(lighter, key=lambda each: each.weights)
            yield f"{_label(best.name, best.mix)} instead of {_label(sized.name, sized.mix)}"
            enough = True
        if length := _rounded(self._context(sized, self.use)):
            yield f"context {length:,} instead of {self.use.context:,}"
            enough = True
        if not enough and smaller:
            tiny = replace(self.use, kv=caches.get(smaller[-1]))
            if length := _rounded(self._context(sized, tiny)):
                yield f"context {length:,} with KV cache in {smaller[-1]}"


def _rounded(context: int) -> int:
    """A context worth offering; 0: too short for any use."""
    return context // _STEP * _STEP
