"""The entry of config.json for a plan: a group for each scheme and rounding of inputs, with the exact names of its layers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from fewbits import formats
from fewbits.targets.compressed_tensors import schemes
from fewbits.targets.compressed_tensors.schemes import Scheme

if TYPE_CHECKING:
    from fewbits.model.weights import Weight
    from fewbits.planning import Plan
    from fewbits.targets.compressed_tensors.layout import Layout


def scheme_of(plan: Plan, weight: Weight) -> Scheme | None:
    """None: the weight is not quantized."""
    entry = plan[weight.name]
    fmt = formats.get(entry.format)
    if fmt.is_cast:
        return None
    scheme = schemes.of(fmt)
    assert isinstance(scheme, Scheme), scheme
    return scheme.beside(entry.activation)


def quantization_config(plan: Plan, weights: Iterable[Weight], unplanned: Iterable[str], layout: Layout) -> dict[str, Any] | None:
    """None: nothing is quantized, and the folder is a plain checkpoint. `unplanned`: further layers that are no weights of the plan.

    vLLM wants to find every layer, quantized or ignored, and fuses some: q, k and v, gate and up must then share a group. transformers
    looks for layers by its own names and vLLM by those of the checkpoint: where they differ, both are said.
    """
    groups: dict[str, dict[str, Any]] = {}
    ignored: dict[str, None] = {}
    for weight in weights:
        scheme, activation = scheme_of(plan, weight), plan[weight.name].activation
        names = [layout.pattern(weight.parameter)] if weight.parameter in layout.experts else _names(weight.name, layout)
        if scheme is None:
            tied = _names(weight.tied_to, layout) if weight.tied_to else []
            ignored |= dict.fromkeys([*([] if weight.kind == "embedding" else names), *tied])
            continue
        inputs = schemes.rounded_inputs(activation) if activation else None
        group = {"weights": scheme.arguments(), "input_activations": inputs, "output_activations": None, "format": scheme.layout}
        groups.setdefault(repr(group), {"targets": {}, **group})["targets"] |= dict.fromkeys(names)
    if not groups:
        return None
    layouts = {group["format"] for group in groups.values()}
    return {
        "quant_method": "compressed-tensors",
        "version": schemes.VERSION,
        "quantization_status": "compressed",
        "format": layouts.pop() if len(layouts) == 1 else "mixed-precision",
        "config_groups": {f"group_{i}": group | {"targets": list(group["targets"])} for i, group in enumerate(groups.values())},
        "ignore": list(ignored | dict.fromkeys(each for name in unplanned for each in _names(name, layout))),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def _names(module: str, layout: Layout) -> list[str]:
    return list(dict.fromkeys((module, layout.layer(module))))


def layers_that_differ(plan: Plan, weights: Iterable[Weight]) -> str | None:
    """Why vLLM, which takes one format for all experts of a layer, cannot load this plan; None if it can."""
    first: dict[str, Weight] = {}
    for weight in weights:
        if weight.expert is None:
            continue
        other = first.setdefault(weight.parameter.rpartition(".")[0], weight)
        one, two = plan[other.name].format, plan[weight.name].format
        if (scheme_of(plan, other), scheme_of(plan, weight)) != (None, None) and scheme_of(plan, other) != scheme_of(plan, weight):
            return f"the experts of a layer need one format, and `{other.name}` has {one}, `{weight.name}` {two}"
    return None
