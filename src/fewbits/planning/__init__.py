"""A table of sensitivities, a target and a budget in; a plan out: the format of every weight, with its size and the reason.

Loads no torch and reads no files but JSON. This file holds `Plan` itself, with the plans that need no budget (one format for all, no
quantization, a plan.json).

decision.py       budget and constraints -> plan              constraints.py  formats, overrides, groups and speed that the user asks for
allocation.py     the options of each weight -> plan of least damage, and the frontier of sizes
solver.py         the multiple-choice knapsack                by_thresholds.py  the textbook strategy, to compare with
budgets.py        `--size` in bytes                           recipes.py      llama.cpp's mixes (mixes.py), as a size to match
footprint.py      memory that a model takes while it runs     speed.py        tokens per second that a plan would generate
accuracy.py       how accurate a file must be                 rounds.py       the search for the smallest plan that is accurate enough
rules.py          `--override`                                explanation.py  why a weight got its format
target.py         what planning asks of a target              uninformed.py   what is refused where nothing says which columns matter
rounded_inputs.py which inputs are rounded, and which cost too much
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from fewbits import formats, methods
from fewbits.devices.units import size
from fewbits.errors import InputError
from fewbits.formats.runtime import activations, kv
from fewbits.model.weights import TOWER
from fewbits.planning import rules

if TYPE_CHECKING:
    from fewbits.formats import Format
    from fewbits.formats.runtime.activations import Activation
    from fewbits.model.weights import Weight
    from fewbits.planning.target import Target

SCHEMA = 1
IN_A_TOWER = "part of a vision or audio tower: text alone cannot judge it"
_ROW_LENGTH = 8192  # characters for one weight at most: a hundred times what fewbits writes


@dataclass(frozen=True)
class Step:
    """Another format for one weight: the change in bytes and in KL if it were taken."""

    format: str
    nbytes: int
    kl: float


@dataclass(frozen=True)
class Entry:
    """One weight of a plan."""

    weight: str
    shape: tuple[int, int]
    format: str
    method: str
    reason: str
    nbytes: int  # in the target's file
    fallback: bool = False  # got another format than was asked for
    activation: Activation | None = None  # what its input is rounded to; None: float
    kl: float | None = None  # predicted; None: not measured
    up: Step | None = None  # the next better format
    down: Step | None = None  # the next smaller one


@dataclass(frozen=True)
class OnKind:
    """What a plan is predicted to cost on one kind of text."""

    name: str
    kl: float


@dataclass(frozen=True)
class Plan:
    """The format of every weight. One that stays in float is listed too, with the reason."""

    target: str
    entries: tuple[Entry, ...]
    kv: str | None = None  # format of the KV cache; None: as the runtime keeps it
    kinds: tuple[OnKind, ...] = ()  # of text, the worst first; none: predicted is the KL on the text of calibration alone

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries)

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.nbytes / sum(entry.shape[0] * entry.shape[1] for entry in self.entries)

    @property
    def kl(self) -> float | None:
        """Predicted, as the sum over single weights. None: some were not measured."""
        known = [entry.kl for entry in self.entries if entry.kl is not None]
        return math.fsum(known) if len(known) == len(self.entries) else None

    def kinds_text(self) -> str:
        """The forecast by kind of text, for a person."""
        each = (f"{kind.name} {kind.kl:.2g}" for kind in self.kinds)
        first, *others = each if len(self.kinds) else ("",)
        return ", ".join([f"{first} (worst)", *others]) if others else first

    @property
    def fallbacks(self) -> tuple[Entry, ...]:
        return tuple(entry for entry in self.entries if entry.fallback)

    @property
    def activations(self) -> dict[str, Activation]:
        """Of the weights whose input is rounded, by the weight's name."""
        return {entry.weight: entry.activation for entry in self.entries if entry.activation}

    @cached_property
    def _by_name(self) -> dict[str, Entry]:
        return {entry.weight: entry for entry in self.entries}

    def __getitem__(self, weight: str) -> Entry:
        return self._by_name[weight]

    def formats_text(self) -> str:
        """How many weights have which format, the commonest first."""
        return ", ".join(f"{count} in {name}" for name, count in Counter(entry.format for entry in self.entries).most_common())

    def __str__(self) -> str:
        predicted = "no KL predicted" if self.kl is None else f"KL {self.kl:.4g} predicted"
        predicted += f" ({self.kinds_text()})" if self.kinds else ""
        cache = f", KV cache in {self.kv}" if self.kv else ""
        return f"{self.target}: {size(self.nbytes)}, {self.bits_per_weight:.3g} bits per weight\n{self.formats_text()}\n{predicted}{cache}"

    def to_json(self) -> str:
        weights = {entry.weight: _to_dict(entry) for entry in self.entries}
        bits = round(self.bits_per_weight, 4)
        head: dict[str, object] = {"schema": SCHEMA, "target": self.target, "bytes": self.nbytes, "bits_per_weight": bits}
        # summed over the rounded numbers, so that reading the plan and writing it again gives the same text
        written = [_digits(entry.kl) for entry in self.entries if entry.kl is not None]
        head |= {"predicted_kl": _digits(math.fsum(written))} if self.kl is not None else {}
        head |= {"predicted_kl_by_kind": {kind.name: _digits(kind.kl) for kind in self.kinds}} if self.kinds else {}
        head |= {"kv": self.kv} if self.kv else {}
        rows = ",\n".join(f"    {json.dumps(name)}: {json.dumps(row)}" for name, row in weights.items())
        lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items())
        return f'{{\n{lines},\n  "weights": {{\n{rows}\n  }}\n}}\n'


def _to_dict(entry: Entry) -> dict[str, object]:
    row: dict[str, object] = {"format": entry.format, "method": entry.method, "granularity": formats.granularity(entry.format)}
    row |= {"reason": entry.reason, "shape": list(entry.shape), "bytes": entry.nbytes}
    row |= {"fallback": True} if entry.fallback else {}
    row |= {"activation": entry.activation.to_dict()} if entry.activation else {}
    # `kl_of` names the format that was measured: if a person edits `format`, `read` sees that the KL no longer belongs to it
    row |= {"kl": _digits(entry.kl), "kl_of": entry.format} if entry.kl is not None else {}
    for name, step in (("up", entry.up), ("down", entry.down)):
        row |= {name: {"format": step.format, "bytes": step.nbytes, "kl": _digits(step.kl)}} if step else {}
    return row


def _digits(value: float) -> float:
    return float(f"{value:.4g}")


def uniform(
    weights: Iterable[Weight],
    target: Target,
    wanted: Format,
    overrides: Sequence[str] = (),
    method: str = "rtn",
    activation: Activation | None = None,
    kv: str | None = None,
) -> Plan:
    """One format for all weights, except those that an override names. The format `keep` leaves a weight unquantized.

    `activation` applies to every matmul with a quantized weight, except the output layer.
    """
    weights = list(weights)
    chosen = rules.parse_all(overrides, weights)
    if bound := next((rule for rule in chosen if rule.how != "="), None):
        raise InputError(f"`{bound.text}` leaves a choice, and one format for all has none", "use `=`, or give a size instead of a format")
    entries = []
    for weight in weights:
        fmt, reason = wanted, f"--format {wanted.name}"
        for rule in chosen:  # the last one that matches wins
            if rule.names(weight):
                fmt, reason = rule.of(weight), f"--override {rule.text}"
        entry = priced(weight, target, fmt, reason, method)
        entries.append(_reading(entry, weight, target, activation) if activation and takes_activation(weight, entry) else entry)
    return checked(Plan(target.name, tuple(entries), kv), weights, target)


def unquantized(weights: Iterable[Weight], target: Target) -> Plan:
    """Every weight in the type of the checkpoint. The error of a runtime itself is measured with such a file."""
    return Plan(target.name, tuple(priced(w, target, formats.get(w.dtype), "kept as in the checkpoint", "rtn") for w in weights))


def with_activations(plan: Plan, chosen: Mapping[str, Activation]) -> Plan:
    """The same plan with these activations, by weight, whose scales calibration has found."""
    return replace(plan, entries=tuple(replace(e, activation=chosen.get(e.weight, e.activation)) for e in plan.entries))


def checked(plan: Plan, weights: Sequence[Weight], target: Target | None) -> Plan:
    """The same plan; an error if it contradicts itself or if the target cannot hold its activations, KV cache or formats together."""
    elsewhere = "leave it out, or use `--to fewbits`"
    if plan.kv is not None:
        plan = replace(plan, kv=kv.get(plan.kv).name)
        if target and (why_not := target.accepts_kv(str(plan.kv))):
            raise InputError(f"{target.name} cannot say that the KV cache is {plan.kv}: {why_not}", elsewhere)
    for weight in weights:
        entry = plan[weight.name]
        if entry.activation is None:
            continue
        if weight.kind == "embedding" and not weight.tied_to:
            raise InputError(f"`{weight.name}` is looked up, not multiplied: it has no activation", "leave it out of the plan")
        if target and (why_not := target.accepts_activation(weight, formats.get(entry.format), entry.activation)):
            raise InputError(f"{target.name} does not round the input of `{weight.name}` to {entry.activation.name}: {why_not}", elsewhere)
    if target and (why_not := target.accepts_plan(plan, weights)):
        raise InputError(f"{target.name} cannot hold this plan: {why_not}", "change the plan, or use another `--to`")
    return plan


def read(text: str, weights: Iterable[Weight], target: Target | None = None) -> Plan:
    """A plan.json, perhaps edited by hand: every name and format is checked, and every size computed again. Without a target (when an
    artifact is opened) sizes are taken as written."""
    weights = list(weights)
    if len(text) > (most := _ROW_LENGTH * (len(weights) + 16)):
        raise InputError(f"the plan has {len(text):,} characters for {len(weights)} weights, more than {most:,}", "is it a plan at all?")
    try:
        content: Any = json.loads(text)
        schema, rows = content["schema"], dict(content["weights"])
        made_for = str(content["target"])
        chosen = {str(name): _parsed(row) for name, row in rows.items()}
        cache = None if content.get("kv") is None else str(content["kv"])
        kinds = tuple(OnKind(str(name), _finite(kl)) for name, kl in content.get("predicted_kl_by_kind", {}).items())
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as failure:
        raise InputError(f"this is not a plan: {failure!r}", "`fewbits quantize` writes one as plan.json") from failure
    if schema != SCHEMA:
        raise InputError(f"the plan has schema {schema}, this fewbits reads schema {SCHEMA}", "make the plan anew, or update fewbits")
    known = {weight.name for weight in weights}
    for name in chosen:
        if name not in known:
            raise InputError(f"the plan names `{name}`, which the model does not have", "is it the plan of another model?")
    entries = []
    for weight in weights:
        if weight.name not in chosen:
            raise InputError(f"the plan leaves out `{weight.name}`", 'every weight needs a row; use "format": "fp16" to keep one in float')
        row = chosen[weight.name]
        if row.method.lower() not in methods.all():  # by name: `methods.get` would load torch
            raise InputError(f"the plan gives `{weight.name}` the method `{row.method}`", f"known methods: {', '.join(methods.all())}")
        fmt = formats.get(weight.dtype if row.format.lower() == "keep" else row.format)
        if why_not := refuses(weight, target, fmt) if target else fmt.fits(weight.shape):
            raise InputError(f"the plan gives `{weight.name}` {fmt.name}: {why_not}", "choose another format for it in the plan")
        if target:
            entry = _reading(priced(weight, target, fmt, row.reason, row.method), weight, target, row.activation)
        else:
            nbytes = fmt.nbytes(weight.shape) if row.nbytes is None else row.nbytes
            entry = Entry(weight.name, weight.shape, fmt.name, row.method, row.reason, nbytes, activation=row.activation)
        other_size = row.nbytes is not None and (target is None or made_for == target.name) and row.nbytes != entry.nbytes
        edited = other_size or (row.kl_of is not None and row.kl_of != fmt.name)
        if edited:  # reason and prediction belong to the old format
            entries.append(replace(entry, reason="edited in plan.json"))
        else:
            entries.append(replace(entry, fallback=row.fallback, kl=row.kl, up=row.up, down=row.down))
    plan = Plan(target.name if target else made_for, tuple(entries), cache)
    return checked(plan if plan.kl is None else replace(plan, kinds=kinds), weights, target)


class _WrittenEntry(NamedTuple):
    """One weight of a plan.json, before it is checked."""

    format: str
    method: str
    reason: str
    fallback: bool
    nbytes: int | None
    activation: Activation | None
    kl: float | None
    kl_of: str | None
    up: Step | None
    down: Step | None


def _parsed(row: Any) -> _WrittenEntry:
    nbytes = row.get("bytes")
    plain = (str(row["format"]), str(row.get("method", "rtn")), str(row.get("reason", "")), bool(row.get("fallback", False)))
    activation = None if row.get("activation") is None else activations.from_dict(row["activation"])
    kl = None if row.get("kl") is None else _finite(row["kl"])
    up, down = (_step(row.get(name)) for name in ("up", "down"))
    return _WrittenEntry(*plain, nbytes if isinstance(nbytes, int) and nbytes >= 0 else None, activation, kl, row.get("kl_of"), up, down)


def _step(row: Any) -> Step | None:
    return None if row is None else Step(str(row["format"]), int(row["bytes"]), _finite(row["kl"]))


def _finite(value: Any) -> float:
    if not math.isfinite(number := float(value)):
        raise ValueError(f"a KL of {value} is not finite")
    return number


def takes_activation(weight: Weight, entry: Entry) -> bool:
    """Whether the input of this weight is worth rounding. A float matmul gains nothing from it. Neither does the output layer: its error
    goes straight into the logits (KL of int8 and fp8 rises by 10 to 24 % on the embedded model and SmolLM2), and it runs once per token,
    not once per block."""
    return not formats.get(entry.format).is_cast and weight.kind not in ("embedding", "output")


def refuses(weight: Weight, target: Target, fmt: Format) -> str | None:
    if weight.kind == TOWER and fmt.name not in (weight.dtype, "fp32"):
        return IN_A_TOWER
    return fmt.fits(weight.shape) or target.accepts(weight, fmt)


def priced(weight: Weight, target: Target, fmt: Format, reason: str, method: str) -> Entry:
    why_not = refuses(weight, target, fmt)
    if why_not:
        fmt, reason = _next_that_fits(weight, target, fmt, why_not)
    return Entry(weight.name, weight.shape, fmt.name, method, reason, target.nbytes(weight, fmt), fallback=bool(why_not))


def _reading(entry: Entry, weight: Weight, target: Target, activation: Activation | None) -> Entry:
    """The entry with this activation. Its size may change: targets store some weights in another layout for rounded inputs."""
    if activation is None or target.accepts_activation(weight, formats.get(entry.format), activation):
        return replace(entry, activation=activation)  # refused later, by `checked`
    return replace(entry, activation=activation, nbytes=target.nbytes(weight, formats.get(entry.format), activation))


def _next_that_fits(weight: Weight, target: Target, asked: Format, why_not: str) -> tuple[Format, str]:
    """The smallest format that this weight fits and that has at least the bits of the one asked for; and the reason, for the plan."""
    floor = asked.bits_per_weight((256, 256))  # a shape that every format fits
    keep = formats.get(weight.dtype)

    def cost(fmt: Format) -> tuple[int, bool, bool]:  # of equal size: unquantized first, then one packed like the one asked for
        return target.nbytes(weight, fmt), fmt != keep, fmt.parts((256, 256)).keys() != asked.parts((256, 256)).keys()

    # one scale for the whole weight loses more than the bits say (int8_tensor has 1.8 times int8_channel's error on heavy tails)
    known = [f for f in formats.all().values() if f.tensor_wide <= asked.tensor_wide]
    fitting = [f for f in known if f.bits_per_weight((256, 256)) >= floor and not refuses(weight, target, f)]
    if not fitting:
        raise InputError(f"`{weight.name}` fits no format of {target.name}: {refuses(weight, target, keep)}", "choose another target")
    fmt = min(fitting, key=cost)
    return fmt, f"{why_not}; {'no smaller format fits' if fmt.is_cast else 'the next that fits'}: {fmt.name}"
