"""What measuring found: for every weight and format the KL that it is predicted to cost. Plain data; loads no torch."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fewbits import formats
from fewbits.checkpoints import limits
from fewbits.checkpoints.folder import read_text
from fewbits.errors import InputError
from fewbits.files import Staged
from fewbits.model import Weight

SCHEMA = 1
_BLOCK = "block"
_CELL = {"kl", "spread", "method", "scores"}
_HINT = "make it anew with `fewbits measure`"


@dataclass(frozen=True, slots=True)
class Scores:
    """Simpler measures of the same errors, each without what the next one knows."""

    weight: float  # squared error of the weight
    output: float  # of its output: inputs known, the loss not
    gradient: float  # inputs and loss known by channel, tokens not
    diagonal: float  # tokens by their share in the loss too; channels still taken to be independent


@dataclass(frozen=True, slots=True)  # a mixture has a million of them
class Cell:
    kl: float  # predicted
    spread: float  # of the prediction, relative, from the rows that were not looked at
    method: str  # that chose the codes
    scores: Scores


@dataclass(frozen=True)
class Factor:
    """Measured over predicted KL of single weights of one kind: what the expansion misses."""

    factor: float  # geometric mean
    spread: float  # one standard deviation of its logarithm over the weights
    weights: int


@dataclass(frozen=True)
class Container:
    """What a target's file holds beside the planned weights, by its dry run."""

    overhead: int  # header, graph, tokenizer, norms, padding; of a plan with a long text, so that no other takes more


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

    def kl(self, weight: Weight, fmt: str) -> float:
        """Predicted, and corrected by what was measured of its kind."""
        factor = self.factors.get(weight.kind)
        return self.rows[weight.name][fmt].kl * (factor.factor if factor else 1.0)

    def runtime_kl(self, weight: Weight, block: int | None) -> float:
        """Of the 8 bits to which a runtime rounds this weight's input, with a scale for every `block` columns; None: it does not. Where
        that block was not measured, the next smaller one."""
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
    if (count := limits.values_in(text)) > limits.TABLES:
        raise InputError(f"`{path}` holds {count:,} values, more than {limits.TABLES:,}", "no honest file of this kind is so large")
    try:
        found: Any = json.loads(text, object_hook=_made)
        if found["schema"] != SCHEMA:
            raise InputError(f"`{path}` has schema {found['schema']}, this fewbits reads schema {SCHEMA}", _HINT)
        return _checked(
            Sensitivity(
                model=str(found["model"]),
                model_sha256=str(found["model_sha256"]),
                runs=tuple(found["runs"]),
                method=str(found["method"]),
                weights=tuple(Weight(**{**row, "shape": (row["shape"][0], row["shape"][1])}) for row in found["weights"]),
                rows={name: _row(row) for name, row in found["rows"].items()},
                config=dict(found["config"]),
                containers={name: Container(**row) for name, row in found["containers"].items()},
                factors={kind: Factor(**row) for kind, row in found["factors"].items()},
                kv={name: float(kl) for name, kl in found["kv"].items()},
                activations={name: {key: float(kl) for key, kl in row.items()} for name, row in found["activations"].items()},
            )
        )
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, RecursionError) as failure:
        raise InputError(f"`{path}` is no table of sensitivities: {failure!r}", _HINT) from failure


def _made(row: dict[str, Any]) -> Any:
    """Cells as they are parsed: as dicts first, a million of them took 400 MB more."""
    return cell_of(row) if row.keys() == _CELL else row


def _row(row: dict[str, Any]) -> dict[str, Cell]:
    if not all(isinstance(cell, Cell) for cell in row.values()):
        raise ValueError(f"a cell has {', '.join(sorted(_CELL))}")
    return row


def runtime_block(columns: int) -> str:
    """The name of an activation in blocks of so many columns."""
    return f"{_BLOCK}{columns}"


def rounded(cell: Cell) -> Cell:
    """To five digits, of which a prediction has two: as it is made, so that a table read from a file gives the very same plan."""
    scores = Scores(**{key: _digits(value) for key, value in asdict(cell.scores).items()})
    return Cell(_digits(cell.kl), _digits(cell.spread), cell.method, scores)


def _digits(value: float) -> float:
    return float(f"{value:.5g}")


def _checked(table: Sensitivity) -> Sensitivity:
    """What a plan relies on."""
    names = [weight.name for weight in table.weights]
    if len(set(names)) < len(names) or set(names) != set(table.rows):
        raise ValueError("its weights and its rows are not the same")
    for weight in table.weights:
        formats.get(weight.dtype)
        if not all(isinstance(side, int) and 0 < side <= 1 << 31 for side in weight.shape):
            raise ValueError(f"`{weight.name}` has the shape {weight.shape}")
    if not all(isinstance(each.overhead, int) and each.overhead >= 0 for each in table.containers.values()):
        raise ValueError("a container's overhead is a number of bytes")
    if not all(math.isfinite(each.factor) and each.factor > 0 for each in table.factors.values()):
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
