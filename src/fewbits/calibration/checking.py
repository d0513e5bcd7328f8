"""Statistics from a file, before anything is fitted to them: the right shapes, finite, and what is a sum of squares not below zero.

A NaN in one Hessian would end as a NaN in every code that it moves, weights later and with no name to it.
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
    "count": (torch.int64, "2"), "total": (torch.float64, "2c"), "square": (torch.float64, "2c"), "low": (torch.float32, "c"),
    "high": (torch.float32, "c"), "first": (torch.float32, "sc"), "first_half": (torch.uint8, "s"), "extremes": (torch.float32, "b2"),
    "some": (torch.float16, "tc"), "some_half": (torch.uint8, "t"), "moment": (torch.float32, "2cc"),
    "histogram_counts": (torch.int64, "h"), "histogram_reach": (torch.float64, "1"),
}  # fmt: skip
_GRADIENT = {
    "sensitivity": (torch.float64, "22"), "gradient_square": (torch.float64, "2r"), "fisher_square": (torch.float64, "2c"),
    "fisher": (torch.float32, "2cc"), "usage": (torch.int64, "r"),
}  # fmt: skip
_FIELDS = {"input": _INPUT, "gradient": _GRADIENT}
_NEEDED = {"input": set(_INPUT) - {"moment", "histogram_counts", "histogram_reach"}, "gradient": set[str]()}
_SQUARES = {"count", "square", "sensitivity", "gradient_square", "fisher_square", "usage"}


def check(kind: str, fields: Mapping[str, Any], name: str, shape: tuple[int, int] | None = None) -> None:
    """Of one weight or input; `shape`: the weight's, where it is known. Raises an InputError that names it."""
    known = _FIELDS[kind]
    if wrong := (set(fields) - set(known)) or (_NEEDED[kind] - set(fields)):
        raise InputError(f"the statistics of `{name}` have the wrong fields: {', '.join(sorted(wrong))}", HINT)
    sizes: dict[str, int] = {} if shape is None else {"r": shape[0], "c": shape[1]}
    for field, tensor in fields.items():
        dtype, letters = known[field]
        wanted = [int(letter) if letter.isdigit() else sizes.get(letter) for letter in letters]
        found = list(tensor.shape)
        if tensor.dtype != dtype or len(found) != len(wanted) or any(w is not None and w != f for w, f in zip(wanted, found, strict=True)):
            said = " x ".join("any" if w is None else str(w) for w in wanted)
            raise InputError(f"{field} of `{name}` is {tensor.dtype} {tuple(found)}, not {dtype} {said}", HINT)
        sizes |= {letter: size for letter, size in zip(letters, found, strict=True) if not letter.isdigit()}
    if kind == "input" and not int(fields["count"].sum()) and not len(fields["first"]):
        return  # no token was seen: extremes are as they began
    for field, tensor in fields.items():
        _check_values(field, tensor, name)


def _check_values(field: str, found: Tensor | Triangles, name: str) -> None:
    tensor = found.stored if isinstance(found, Triangles) else found
    if not tensor.numel():
        return
    if field == "some":  # kept in float16, where a massive activation is infinite
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
    diagonal = found.diagonal() if isinstance(found, Triangles) else found.diagonal(dim1=1, dim2=2) if found.dim() == 3 else None
    if diagonal is not None and bool((diagonal < 0).any()):
        raise InputError(f"{field} of `{name}` has a diagonal below zero: it is no second moment", HINT)
