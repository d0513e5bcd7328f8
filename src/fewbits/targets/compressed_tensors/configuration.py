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


def scheme_of(plan: Plan, weight: Weight) -> Scheme | None:
    """None: the weight is not quantized."""
    entry = plan[weight.name]
    fmt = formats.get(entry.format)
    if fmt.levels is None:
        return None
    scheme = schemes.of(fmt)
    assert isinstance(scheme, Scheme), scheme
    return scheme.beside(entry.activation)


def quantization_config(plan: Plan, weights: Iterable[Weight], unplanned: Iterable[str]) -> dict[str, Any] | None:
    """None: nothing is quantized, and the folder is a plain checkpoint. `unplanned`: further layers that are no weights of the plan.

    vLLM wants to find every layer, quantized or ignored, and fuses some: q, k and v, gate and up must then share a group.
    """
    groups: dict[str, dict[str, Any]] = {}
    ignored: list[str] = []
    for weight in weights:
        scheme, activation = scheme_of(plan, weight), plan[weight.name].activation
        if scheme is None:
            ignored += [name for name in (weight.name, weight.tied_to) if name and not (name == weight.name and weight.kind == "embedding")]
            continue
        inputs = schemes.rounded_inputs(activation) if activation else None
        group = {"weights": scheme.arguments(), "input_activations": inputs, "output_activations": None, "format": scheme.layout}
        groups.setdefault(repr(group), {"targets": [], **group})["targets"].append(weight.name)
    if not groups:
        return None
    layouts = {group["format"] for group in groups.values()}
    return {
        "quant_method": "compressed-tensors",
        "version": schemes.VERSION,
        "quantization_status": "compressed",
        "format": layouts.pop() if len(layouts) == 1 else "mixed-precision",
        "config_groups": {f"group_{i}": group for i, group in enumerate(groups.values())},
        "ignore": [*ignored, *unplanned],
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }
