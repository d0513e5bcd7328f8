"""Where mlx-lm has every row of a model's matrices. No table: both packages are asked, with row numbers in place of values.

transformers' rules are applied backwards, which gives the tensors under the names in which the model is published, and mlx-lm's `sanitize`
makes its own of those: it renames, stacks experts, splits gate from up, turns matrices. What comes out says where each row went. A tensor
into which whole rows go can be quantized as planned. Every other one (a norm to which 1 is added, a matrix that is turned) is made by the
same two steps from its values, and stays in float.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from fewbits.errors import InputError
from fewbits.store.untrusted import first_line
from fewbits.targets.mlx import package
from fewbits.targets.mlx.arrays import to_mlx, to_torch
from fewbits.targets.mlx.probes import Experts, Probes, Rows

if TYPE_CHECKING:
    from torch import Tensor

_ELSEWHERE = "use another `--to`, or a newer mlx-lm"


class How(NamedTuple):
    """The form in which a model is given to mlx-lm."""

    narrow: bool = True  # experts have few columns
    prefixed: bool = True  # names begin with that of the base model
    experts: Experts = "apart"  # each a tensor, or those of a layer one, or that in the blocks in which gpt-oss is published


@dataclass(frozen=True)
class Layout:
    settings: Mapping[str, Any]  # of config.json
    probes: Probes
    how: How
    shapes: dict[str, tuple[int, ...]]  # of every tensor, as mlx-lm has it in float
    rows: dict[str, tuple[Rows, ...]]  # of the tensors that are made of whole rows
    by_value: frozenset[str]  # parameters with matrices that other tensors are made of
    holds_quantized: frozenset[str]  # layers

    def layer(self, tensor: str) -> str | None:
        """The layer of a tensor that can be quantized; None: it stays in float."""
        name = tensor.removesuffix(".weight")
        return name if tensor in self.rows and name in self.holds_quantized else None

    def in_float(self) -> dict[tuple[str, int | None], str]:
        """The matrices that cannot be quantized, by parameter and expert, and why."""
        kept: dict[tuple[str, int | None], str] = {}
        for tensor, parts in self.rows.items():
            if self.layer(tensor) is None:
                kept |= {(part.parameter, part.expert): f"mlx-lm holds `{tensor}` in float only" for part in parts}
        return kept | {(name, None): "mlx-lm changes this matrix by more than moving its rows" for name in self.by_value}

    def share_in_float(self) -> float:
        """Of all matrices, by their numbers."""
        sizes = {name: math.prod(self.probes.shapes[name]) for name in self.probes.matrices}
        return sum(sizes[name] for name in {name for name, _ in self.in_float()}) / sum(sizes.values())

    def values(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors that are not made of rows, from the parameters without matrices and those of `by_value`."""
        made = _made(self.settings, self.probes, self.how, self.probes.tensors("rows", self.how.narrow) | dict(tensors)).tensors
        return {name: _looked_at(tensor).contiguous() for name, tensor in made.items() if name not in self.rows}


def layout_of(settings: Mapping[str, Any], config: Any) -> Layout:
    """`settings`: of config.json, as settings.py makes them. An InputError: mlx-lm does not take the model."""
    package.needed()
    return _layout(json.dumps(settings, sort_keys=True), config.to_json_string(), _Unhashed(config))


class _Unhashed(NamedTuple):
    """A config that the cache below does not compare: its JSON stands for it."""

    content: Any

    def __hash__(self) -> int:
        return 0

    def __eq__(self, other: object) -> bool:
        return True


@lru_cache(maxsize=4)
def _layout(settings: str, _: str, config: _Unhashed) -> Layout:
    said, probes = json.loads(settings), Probes(config.content)
    try:
        return _followed(said, probes, How())
    except InputError as failure:
        # perhaps it looks at the columns of experts, or reads them in another form, or names without the prefix of the base model
        for how in (How(narrow=False), How(experts="together"), How(experts="in blocks"), How(prefixed=False)):
            with suppress(InputError):
                return _followed(said, probes, how)
        raise failure


class _Made(NamedTuple):
    tensors: dict[str, Any]  # a tensor of torch that mlx-lm took as it is, or an array of MLX that is not computed yet
    shapes: dict[str, tuple[int, ...]]  # that mlx-lm's model has
    holds_quantized: frozenset[str]


def _made(settings: Mapping[str, Any], probes: Probes, how: How, tensors: dict[str, Tensor]) -> _Made:
    """transformers' parameters through both packages. What mlx-lm's model has no place for, or lacks, is an error."""
    from mlx.utils import tree_flatten

    model = package.empty_model(settings)
    published = probes.published(tensors, how.prefixed, how.experts)
    given = {name: to_mlx(tensor) for name, tensor in published.items()}
    kept = list(given.values())  # so that no other array gets the address of one of these
    unchanged = {id(given[name]): tensor for name, tensor in published.items()}
    try:
        made = model.sanitize(given) if hasattr(model, "sanitize") else given
    except Exception as failure:
        raise InputError(f"mlx-lm cannot take its tensors: {first_line(failure)}", _ELSEWHERE) from failure
    shapes = {name: tuple(array.shape) for name, array in tree_flatten(model.parameters())}
    for names, what in ((shapes.keys() - made.keys(), "asks for"), (made.keys() - shapes.keys(), "has no place for")):
        if names:
            raise InputError(f"mlx-lm {what} `{min(names)}` ({len(names)} tensors in all)", _ELSEWHERE)
    layers = frozenset(name for name, module in model.named_modules() if hasattr(module, "to_quantized"))
    found = {}
    for name, array in made.items():
        tensor = unchanged.get(id(array))
        found[name] = array if tensor is None or _touched(array, tensor) else tensor
    del kept
    return _Made(found, shapes, layers)


def _touched(array: Any, tensor: Tensor) -> bool:
    """Whether an array was changed in its place (`array *= 2` leaves it the same object). Its corners tell, and its type: factors that
    are no whole numbers make floats of numbers of rows."""
    if str(array.dtype).rpartition(".")[2] != str(tensor.dtype).removeprefix("torch.") or not tensor.dim():
        return True
    corners = [(0,) * tensor.dim(), tuple(size - 1 for size in tensor.shape)]
    return any(array[corner].item() != tensor[corner].item() for corner in corners)


def _looked_at(tensor: Any) -> Tensor:
    import torch

    return tensor if isinstance(tensor, torch.Tensor) else to_torch(tensor)


def _followed(settings: Mapping[str, Any], probes: Probes, how: How) -> Layout:
    by_row = _made(settings, probes, how, probes.tensors("rows", how.narrow))
    by_column = _made(settings, probes, how, probes.tensors("columns", how.narrow)).tensors
    rows: dict[str, tuple[Rows, ...]] = {}
    turned = False  # a tensor is made of a matrix in another way
    for name, wanted in by_row.shapes.items():
        numbers = _looked_at(by_row.tensors[name])
        found = probes.found(numbers, _looked_at(by_column[name]))
        if found is None:
            turned |= numbers.dim() > 1 and bool((numbers != 0).any())
            continue
        cols = {probes.matrix_shape(part.parameter)[1] for part in found}
        if (*numbers.shape[:-1], *cols) != wanted:
            raise InputError(f"mlx-lm wants `{name}` as {wanted}, the model has {(*numbers.shape[:-1], *cols)}", _ELSEWHERE)
        rows[name] = found
    count = Counter[str]()
    for parts in rows.values():
        for part in parts:
            count[part.parameter] += len(part.rows)
    partly = {name for name in probes.matrices if count[name] < probes.rows_of(name) and (count[name] or turned)}
    whole = {name: parts for name, parts in rows.items() if not any(part.parameter in partly for part in parts)}
    return Layout(settings, probes, how, by_row.shapes, whole, frozenset(partly), by_row.holds_quantized)
