"""Products of couplings with errors, whose sums have one order: a BLAS sums in an order of its own, by processor, threads and shape, and
then the codes would depend on all three.

A sum is cut into parts of 192 terms, or into halves where it has up to twice that, as MKL cuts it. Each part is added up term by term with
fused multiply-adds, beginning with zero; the parts are added one after the other. In float64 no code hangs on the order, and torch
multiplies.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fewbits.devices import processor

TERMS = 192  # of a part (kernels/native/search/product.h holds the same number)


def added(base: Tensor | None, coupling: Tensor, errors: Tensor, isa: str | None) -> Tensor:
    """base (rows, lanes) + coupling (rows, terms) @ errors (terms, lanes); base None: zeros."""
    if errors.dtype != torch.float32:
        return coupling @ errors if base is None else torch.addmm(base, coupling, errors)
    if not coupling.shape[1]:
        return errors.new_zeros(len(coupling), errors.shape[1]) if base is None else base.clone()
    if isa is None:
        return _reference(base, coupling, errors)
    out = torch.empty(len(coupling), errors.shape[1])
    start = None if base is None else base.contiguous().numpy()
    processor.native().product(isa, coupling.numpy(), errors.contiguous().numpy(), start, out.numpy())
    return out


def _reference(base: Tensor | None, coupling: Tensor, errors: Tensor) -> Tensor:
    terms = len(errors)
    part = terms // 2 if TERMS < terms <= 2 * TERMS else min(terms, TERMS)
    starts = torch.arange(0, terms, part)
    sums = torch.zeros(len(starts), len(coupling), errors.shape[1])
    for step in range(part):  # of all parts side by side; the last may be shorter
        at = starts[starts + step < terms] + step
        sums[: len(at)] = fused(coupling[:, at].T.unsqueeze(2), errors[at].unsqueeze(1), sums[: len(at)])
    total = torch.zeros_like(sums[0]) if base is None else base
    for each in sums:
        total = total + each
    return total


def fused(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a * b + c in float32, rounded once. In float64 the product is exact; the sum is rounded to the odd neighbour, so that rounding it
    again gives what rounding the exact sum would."""
    product, c = a.double() * b.double(), c.double()
    total = product + c
    before = total - product
    missing = (product - (total - before)) + (c - before)
    even = (total.view(torch.int64) & 1) == 0
    return torch.where((missing != 0) & even, total.nextafter(missing * torch.inf), total).float()
