"""The tensors of a file. Each loads its bytes when it is written, one weight or one expert at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING

from fewbits import formats
from fewbits.errors import InputError
from fewbits.model.gguf import architectures
from fewbits.model.gguf.architectures import Place
from fewbits.targets.gguf.layouts import Layout, layout, octets

if TYPE_CHECKING:
    from torch import Tensor

    from fewbits.artifact import Artifact
    from fewbits.artifact.draft import Draft
    from fewbits.model.weights import Weight
    from fewbits.planning import Plan


_TYPES = {
    "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float64": "F64", "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64",
}  # fmt: skip


@dataclass(frozen=True)
class FileTensor:
    name: str
    type: str
    shape: tuple[int, ...]
    nbytes: int
    load: Callable[[], Iterable[Tensor]]  # uint8: piece by piece


def tensors(artifact: Artifact | Draft) -> Iterator[FileTensor]:
    if artifact.layout == "gguf":
        yield from _as_laid_out(artifact)
        return
    places = architectures.Places(artifact.config)
    if why_not := mixed_experts(artifact.plan, artifact.weights):
        raise InputError(why_not, "give all of them the same format")
    for parameter, together in groupby(artifact.weights, lambda weight: weight.parameter):
        weights = tuple(together)
        stored_as = _layout(artifact.plan, weights[0])
        for place in places(parameter):
            rows, cols = weights[0].shape if place.rows is None else (len(place.rows), weights[0].shape[1])
            shape = (rows, cols) if weights[0].expert is None else (len(weights), rows, cols)
            nbytes = len(weights) * stored_as.nbytes((rows, cols))
            yield FileTensor(place.tensor, stored_as.type, shape, nbytes, partial(_packed, artifact, weights, place))
    for name in artifact.rest:
        tensor = artifact.tensor(name)
        for place in places(name):
            yield FileTensor(place.tensor, "F32", tuple(tensor.shape), 4 * tensor.numel(), partial(_float32, artifact, name, place))
    for name, factors in architectures.factors(artifact.config).items():
        yield FileTensor(name, "F32", tuple(factors.shape), 4 * factors.numel(), partial(lambda values: [octets(values)], factors))


def _as_laid_out(artifact: Artifact | Draft) -> Iterator[FileTensor]:
    """Of weights that have the names and the order of rows of the file already."""
    if why_not := mixed_experts(artifact.plan, artifact.weights):
        raise InputError(why_not, "give all of them the same format")
    for parameter, together in groupby(artifact.weights, lambda weight: weight.parameter):
        weights = tuple(together)
        stored_as, one = _layout(artifact.plan, weights[0]), weights[0].shape
        shape = one if weights[0].expert is None else (len(weights), *one)
        packed = partial(_packed, artifact, weights, Place(parameter))
        yield FileTensor(parameter, stored_as.type, shape, len(weights) * stored_as.nbytes(one), packed)
    for name in artifact.rest:
        tensor = artifact.tensor(name)
        kind = _TYPES[str(tensor.dtype).removeprefix("torch.")]
        yield FileTensor(name, kind, tuple(tensor.shape), tensor.nbytes, partial(lambda name: [octets(artifact.tensor(name))], name))


def mixed_experts(plan: Plan, weights: Iterable[Weight]) -> str | None:
    """Why a plan cannot be written: the experts of one parameter are one tensor, of one type. None if it can."""
    for parameter, together in groupby(weights, lambda weight: weight.parameter):
        types = {_layout(plan, weight).type for weight in together}
        if len(types) > 1:
            return f"GGUF keeps the experts of `{parameter}` as one tensor, and the plan gives them {' and '.join(sorted(types))}"
    return None


def _layout(plan: Plan, weight: Weight) -> Layout:
    stored_as = layout(formats.get(plan[weight.name].format))
    assert stored_as, "the plan was made for another target"
    return stored_as


def _packed(artifact: Artifact | Draft, weights: tuple[Weight, ...], place: Place) -> Iterator[Tensor]:
    for weight in weights:
        yield _ordered(_layout(artifact.plan, weight).convert(artifact.parts(weight)), place).contiguous()


def _float32(artifact: Artifact | Draft, name: str, place: Place) -> list[Tensor]:
    return [octets(_ordered(artifact.tensor(name), place).float() + place.added)]


def _ordered(rows: Tensor, place: Place) -> Tensor:
    import torch

    return rows if place.rows is None else rows[torch.tensor(place.rows)]
