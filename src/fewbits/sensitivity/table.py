"""The result of measuring: for every weight and format the KL that it is predicted to cost. Plain data; loads no torch."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fewbits import formats
from fewbits.errors import InputError
from fewbits.model.weights import Weight
from fewbits.sensitivity.curve import Curve, through
from fewbits.store import untrusted
from fewbits.store.files import Staged
from fewbits.store.untrusted import read_text

SCHEMA = 1
_BLOCK = "block"
_CELL = {"kl", "spread", "method", "scores"}
_HINT = "make it anew with `fewbits measure`"


@dataclass(frozen=True, slots=True)
class Scores:
    """Simpler measures of the same errors; each ignores something that the next one takes into account."""

    weight: float  # squared error of the weight
    output: float  # squared error of its output: from the inputs, without the loss
    gradient: float  # inputs and gradients by channel, all tokens alike
    diagonal: float  # tokens weighted by their share in the loss too; channels assumed independent


@dataclass(frozen=True, slots=True)  # a mixture of experts has a million of them
class Cell:
    kl: float  # predicted
    spread: float  # relative standard error of the prediction, because only some rows were looked at
    method: str  # that chose the codes
    scores: Scores


@dataclass(frozen=True)
class Factor:
    """Measured over predicted KL of single weights of one kind: corrects for what the second-order expansion misses."""

    factor: float  # geometric mean
    spread: float  # one standard deviation of its logarithm over the weights
    weights: int


@dataclass(frozen=True)
class Container:
    """What a target's file holds beside the planned weights, from a dry run of the target."""

    overhead: int  # bytes of header, graph, tokenizer, norms, padding; with a plan whose text is long, so that none takes more


@dataclass(frozen=True)
class Sensitivity:
    model: str  # name of the folder or file
    model_sha256: str
    runs: tuple[dict[str, Any], ...]  # the texts that the statistics are of
    method: str
    weights: tuple[Weight, ...]
    rows: dict[str, dict[str, Cell]]  # weight -> format -> cell
    config: dict[str, Any] = field(default_factory=dict)  # the model's, for the memory that a context takes
    containers: dict[str, Container] = field(default_factory=dict)  # by target
    factors: dict[str, Factor] = field(default_factory=dict)  # by kind of weight
    activations: dict[str, dict[str, float]] = field(default_factory=dict)  # weight -> activation -> predicted KL of rounding its input
    kv: dict[str, float] = field(default_factory=dict)  # format of the KV cache -> KL, measured
    curve: Curve = field(default_factory=Curve)  # what the sum of these predictions will be when measured
    kinds: dict[str, float] = field(default_factory=dict)  # kind of text -> measured KL on it, over that on the text of `runs`
    predicts: bool = True  # False: without gradients; `kl` of a cell is then a relative error, which orders formats and predicts no KL

    def kl(self, weight: Weight, fmt: str) -> float:
        """Predicted, and corrected by the factor measured for this kind of weight."""
        factor = self.factors.get(weight.kind)
        return self.rows[weight.name][fmt].kl * (factor.factor if factor else 1.0)

    def runtime_kl(self, weight: Weight, block: int | None) -> float:
        """Of a runtime that rounds this weight's input to 8 bits, with a scale for every `block` columns; None: it does not round. Where
        that block size was not measured, the next smaller one is taken."""
        known = self.activations.get(weight.name, {})
        if block is None or not known:
            return 0.0
        measured = [int(name.removeprefix(_BLOCK)) for name in known if name.startswith(_BLOCK)]
        largest = max((size for size in measured if size <= block), default=None)
        return 0.0 if largest is None else known[runtime_block(largest)]

    def to_dict(self) -> dict[str, object]:
        return {"schema": SCHEMA, **asdict(self)}

    def save(self, path: Path) -> None:
        head = {key: value for key, value in self.to_dict().items() if key != "rows"}
        lines = ",\n".join(
            f"  {json.dumps(name)}: {json.dumps({fmt: asdict(cell) for fmt, cell in row.items()})}" for name, row in self.rows.items()
        )
        with Staged(path) as staged:
            staged.write_text(json.dumps(head, indent=1)[:-2] + f',\n "rows": {{\n{lines}\n }}\n}}\n')


def read(path: Path) -> Sensitivity:
    text = read_text(path, "`fewbits measure` writes one")
    if (count := untrusted.values_in(text)) > untrusted.TABLES:
        raise InputError(f"`{path}` holds {count:,} values, more than {untrusted.TABLES:,}", "no honest file of this kind is so large")
    try:
        fields: Any = json.loads(text, object_hook=_made)
        if fields["schema"] != SCHEMA:
            raise InputError(f"`{path}` has schema {fields['schema']}, this fewbits reads schema {SCHEMA}", _HINT)
        return _checked(
            Sensitivity(
                model=str(fields["model"]),
                model_sha256=str(fields["model_sha256"]),
                runs=tuple(fields["runs"]),
                method=str(fields["method"]),
                weights=tuple(Weight(**{**row, "shape": (row["shape"][0], row["shape"][1])}) for row in fields["weights"]),
                rows={name: _row(row) for name, row in fields["rows"].items()},
                config=dict(fields["config"]),
                containers={name: Container(**row) for name, row in fields["containers"].items()},
                factors={kind: Factor(**row) for kind, row in fields["factors"].items()},
                predicts=bool(fields.get("predicts", True)),
                curve=through([(float(p), float(m)) for p, m in fields.get("curve", {"points": []})["points"]]),
                kinds={str(name): float(factor) for name, factor in fields.get("kinds", {}).items()},
                kv={name: float(kl) for name, kl in fields["kv"].items()},
                activations={name: {key: float(kl) for key, kl in row.items()} for name, row in fields["activations"].items()},
            )
        )
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, RecursionError) as failure:
        raise InputError(f"`{path}` is no table of sensitivities: {failure!r}", _HINT) from failure


def _made(row: dict[str, Any]) -> Any:
    """Makes cells while parsing: a million of them as dicts first took 400 MB more."""
    return cell_of(row) if row.keys() == _CELL else row


def _row(row: dict[str, Any]) -> dict[str, Cell]:
    if not all(isinstance(cell, Cell) for cell in row.values()):
        raise ValueError(f"a cell has {', '.join(sorted(_CELL))}")
    return row


def runtime_block(columns: int) -> str:
    """The name of an activation with a scale for every so many columns."""
    return f"{_BLOCK}{columns}"


def rounded(cell: Cell) -> Cell:
    """To five digits (a prediction is good to two), when the cell is made, so that a table read back from a file gives the same plan."""
    scores = Scores(**{key: in_digits(value) for key, value in asdict(cell.scores).items()})
    return Cell(in_digits(cell.kl), in_digits(cell.spread), cell.method, scores)


def in_digits(value: float) -> float:
    return float(f"{value:.5g}")


def _checked(table: Sensitivity) -> Sensitivity:
    """Raises where something that a plan relies on is wrong."""
    names = [weight.name for weight in table.weights]
    if len(set(names)) < len(names) or set(names) != set(table.rows):
        raise ValueError("its weights and its rows are not the same")
    for weight in table.weights:
        formats.get(weight.dtype)
        if not all(isinstance(side, int) and 0 < side <= 1 << 31 for side in weight.shape):
            raise ValueError(f"`{weight.name}` has the shape {weight.shape}")
    if not all(isinstance(each.overhead, int) and each.overhead >= 0 for each in table.containers.values()):
        raise ValueError("a container's overhead is a number of bytes")
    if not all(math.isfinite(factor) and factor > 0 for factor in (*table.kinds.values(), *(f.factor for f in table.factors.values()))):
        raise ValueError("a factor is finite and above 0")
    if not all(math.isfinite(kl) for row in (table.kv, *table.activations.values()) for kl in row.values()):
        raise ValueError("a KL is finite")
    return table


def cell_of(row: Mapping[str, Any]) -> Cell:
    numbers = {key: float(row[key]) for key in ("kl", "spread")}
    if not all(math.isfinite(value) and value >= 0 for value in numbers.values()):
        raise ValueError(f"a predicted KL is finite and not below 0, this is {row['kl']}")
    scores = {key: float(value) for key, value in row["scores"].items()}
    if not all(map(math.isfinite, scores.values())):
        raise ValueError(f"a score is finite, these are {scores}")
    return Cell(**numbers, method=sys.intern(str(row["method"])), scores=Scores(**scores))
