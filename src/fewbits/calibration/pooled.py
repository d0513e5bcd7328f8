"""What the experts of a layer have in common, for those that saw few tokens.

An expert that 20 tokens were given to has second moments of rank 20: fitted to them, it fails on the next text. So each expert borrows:
the sums over all experts of its layer are added to its own, scaled to as many tokens as serve best. How many that is, is measured: the
moments of each expert in one half of the samples, with what is borrowed, are compared with its moments in the other half. Where experts
read much the same, many tokens are borrowed, and few where each has a world of its own; with thousands of tokens it hardly changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fewbits.calibration.triangles import Triangles, pack

if TYPE_CHECKING:
    from fewbits.model.weights import Weight
    from fewbits.store.cache import Result

PART = "pooled"  # of a block's statistics
_SUMS = ("count", "total", "square", "moment", "sensitivity", "gradient_square", "fisher_square", "fisher", "outputs")
_DRAWN = 4  # inputs of each expert that stand for the layer's, for one that has none
_MOST = 16  # the most that is borrowed is 2^16 tokens
_TINY = 1e-30

Fields = dict[str, Any]


def stacks_of(weights: Sequence[Weight]) -> dict[str, list[str]]:
    """The experts in each parameter."""
    found: dict[str, list[str]] = {}
    for weight in weights:
        if weight.expert is not None:
            found.setdefault(weight.parameter, []).append(weight.name)
    return found


def of(results: Sequence[Result], stacks: Mapping[str, Sequence[str]]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Values and tensors of a result: the sums of each stack, and how many tokens its experts borrow (of inputs; gradients follow)."""
    found: dict[str, Tensor] = {}
    for result in results:
        found |= result.tensors
    borrowed: dict[str, int] = {}
    tensors: dict[str, Tensor] = {}
    for stack, experts in stacks.items():
        seen = [fields for name in experts if (fields := _fields(found, name))]
        if not seen:
            continue
        pool = {key: _total([fields[key] for fields in seen]) for key in _SUMS if all(key in fields for fields in seen)}
        if "count" in pool:
            borrowed[stack] = strength(seen, pool)
            pool |= _beside(seen)
        tensors |= {f"{stack}:{key}": tensor for key, tensor in pool.items()}
    return {"borrowed": borrowed}, tensors


def lent(own: Fields, pool: Fields, tokens: int, pooled: Tensor) -> Fields:
    """The fields of an expert with so many of its layer's tokens added, half to each half of the samples. `pooled`: (2,) how many tokens
    the pool's sums are of."""
    if not pool:
        return own
    factors = torch.tensor([tokens / 2, tokens / 2]) / pooled.clamp(min=1)
    mixed = dict(own)
    for key in _SUMS:
        if key in own and key in pool and key != "count":
            mixed[key] = _added(own[key], pool[key], factors)
    if "count" in own:
        mixed["count"] = own["count"] + tokens // 2
        if not int(own["count"].sum()) and not len(own["first"]):  # ranges and real inputs of its own it has none
            mixed |= {key: pool[key] for key in ("low", "high", "some", "some_half")}
    return mixed


def strength(seen: Sequence[Fields], pool: Fields) -> int:
    """Tokens to borrow: those with which the moments of one half of the samples are nearest to those of the other, over all experts, each
    as its tokens in the other half say; in units of the pool's diagonal, so that no loud column decides alone."""
    key = "moment" if "moment" in pool else "square"
    scale = _scale(pool[key], key)
    whole = [pool[key][half].double() * scale / max(1, int(pool["count"][half])) for half in (0, 1)]
    strengths = torch.tensor([float(1 << power) for power in range(1, _MOST + 1)], dtype=torch.float64)
    errors = torch.zeros_like(strengths)
    for fields in seen:
        tokens = fields["count"].tolist()
        if not min(tokens):
            continue
        own = [fields[key][half].double() * scale / tokens[half] for half in (0, 1)]
        for fitted in (0, 1):
            judge, lender = own[1 - fitted], whole[fitted]
            share = strengths / (tokens[fitted] + strengths)
            miss, step = own[fitted] - judge, lender - own[fitted]  # the error at no share, and what a share of one adds
            products = [float((a * b).sum()) for a, b in ((miss, miss), (miss, step), (step, step))]
            errors += tokens[1 - fitted] * (products[0] + 2 * share * products[1] + share.square() * products[2])
    if not bool(errors.any()):  # no expert has tokens in both halves: as many as a matrix has columns make it regular
        columns: int = pool["total"].shape[1]
        return 1 << max(1, min(_MOST, (columns - 1).bit_length()))
    best: float = strengths[errors.argmin()].item()
    return round(best)


def _scale(sums: Tensor, key: str) -> Tensor:
    """What makes the pool's diagonal ones."""
    diagonal = Triangles(sums).diagonal().sum(0) if key == "moment" else sums.sum(0)
    root = diagonal.double().clamp(min=_TINY).rsqrt()
    if key != "moment":
        return root.square()
    outer = root.unsqueeze(1) * root
    return pack(torch.stack([outer, outer]))[0].clone()


def _fields(found: Mapping[str, Tensor], name: str) -> Fields:
    prefix = f"{name}:"
    return {key.removeprefix(prefix): tensor for key, tensor in found.items() if key.startswith(prefix)}


def _total(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def _beside(seen: Sequence[Fields]) -> Fields:
    """What inputs have beside sums. Positions are not told apart among tokens that are borrowed."""
    reached = [fields for fields in seen if len(fields["some"])] or seen[:1]
    return {
        "low": torch.stack([fields["low"] for fields in seen]).amin(0),
        "high": torch.stack([fields["high"] for fields in seen]).amax(0),
        "first": seen[0]["first"][:0],
        "first_half": seen[0]["first_half"][:0],
        "extremes": seen[0]["extremes"][:0],
        "some": torch.cat([fields["some"][:_DRAWN] for fields in reached]),
        "some_half": torch.cat([fields["some_half"][:_DRAWN] for fields in reached]),
    }


def _added(own: Any, pool: Any, factors: Tensor) -> Any:
    """In each half, `factors` of the pool's sums more."""
    if isinstance(own, Triangles):
        return Triangles(torch.addcmul(own.stored, pool.stored, factors.view(2, 1).to(own.dtype)))
    return torch.addcmul(own, pool, factors.view(2, *[1] * (own.dim() - 1)).to(own.dtype))
