"""Checks statistics from a file before anything is fitted to them: shapes and types, finite values, sums of squares not below zero.

A NaN in one Hessian would otherwise show up much later, as wrong codes of other weights, with nothing to say where it came from.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fewbits.calibration.triangles import Triangles
from fewbits.errors import InputError

HINT = "make it anew with `fewbits calibrate`"
# field -> type and shape; letters are sizes that must agree within a weight
_INPUT = {
    "count": (torch.int64, "2"), "total": (torch.float64, "2c"), "square": (torch.float64, "2c"), "low": (torch.float32, "2c"),
    "high": (torch.float32, "2c"), "first": (torch.float32, "sc"), "first_half": (torch.uint8, "s"), "extremes": (torch.float32, "b2"),
    "some": (torch.float16, "tc"), "some_half": (torch.uint8, "t"), "moment": (torch.float32, "2cc"),
    "histogram_counts": (torch.int64, "h"), "histogram_reach": (torch.float64, "1"),
}  # fmt: skip
_GRADIENT = {
    "sensitivity": (torch.float64, "22"), "gradient_square": (torch.float64, "2r"), "fisher_square": (torch.float64, "2c"),
    "fisher": (torch.float32, "2cc"), "outputs": (torch.float32, "2rk"), "usage": (torch.int64, "r"),
}  # fmt: skip
_FIELDS = {"input": _INPUT, "gradient": _GRADIENT}
_NEEDED = {"input": set(_INPUT) - {"moment", "histogram_counts", "histogram_reach"}, "gradient": set[str]()}
_SQUARES = {"count", "square", "sensitivity", "gradient_square", "fisher_square", "usage"}


def check(kind: str, fields: Mapping[str, Any], name: str, shape: tuple[int, int] | None = None) -> None:
    """Checks the fields of one weight or input; `shape` is the weight's, where it is known. An InputError names what is wrong."""
    known = _FIELDS[kind]
    if wrong := (set(fields) - set(known)) or (_NEEDED[kind] - set(fields)):
        raise InputError(f"the statistics of `{name}` have the wrong fields: {', '.join(sorted(wrong))}", HINT)
    sizes: dict[str, int] = {} if shape is None else {"r": shape[0], "c": shape[1]}
    for field, tensor in fields.items():
        dtype, letters = known[field]
        wanted = [int(letter) if letter.isdigit() else sizes.get(letter) for letter in letters]
        shape_of = list(tensor.shape)
        fits = len(shape_of) == len(wanted) and all(w in (None, size) for w, size in zip(wanted, shape_of, strict=True))
        if tensor.dtype != dtype or not fits:
            expected = " x ".join("any" if w is None else str(w) for w in wanted)
            raise InputError(f"{field} of `{name}` is {tensor.dtype} {tuple(shape_of)}, not {dtype} {expected}", HINT)
        sizes |= {letter: size for letter, size in zip(letters, shape_of, strict=True) if not letter.isdigit()}
    if kind == "input" and not int(fields["count"].sum()) and not len(fields["first"]):
        return  # no token was seen: extremes still have their initial, infinite values
    for field, tensor in fields.items():
        _check_values(field, tensor, name)


def _check_values(field: str, values: Tensor | Triangles, name: str) -> None:
    tensor = values.stored if isinstance(values, Triangles) else values
    if not tensor.numel():
        return
    if field == "some":  # in float16 a massive activation is infinite
        if bool(tensor.isnan().any()):
            raise InputError(f"{field} of `{name}` is not all numbers", HINT)
        return
    least, most = (float(extreme) for extreme in tensor.aminmax())
    if not (torch.isfinite(torch.tensor([least, most])).all()):
        raise InputError(f"{field} of `{name}` is not finite: {least} to {most}", HINT)
    if field in _SQUARES and least < 0:
        raise InputError(f"{field} of `{name}` is {least}, and no sum of squares is below zero", HINT)
    if field in ("first_half", "some_half") and most > 1:
        raise InputError(f"{field} of `{name}` is {most:g}, and there are two halves", HINT)
    diagonal = values.diagonal() if isinstance(values, Triangles) else values.diagonal(dim1=1, dim2=2) if values.dim() == 3 else None
    if diagonal is not None and bool((diagonal < 0).any()):
        raise InputError(f"{field} of `{name}` has a diagonal below zero: it is no second moment", HINT)
