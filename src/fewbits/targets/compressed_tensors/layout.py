"""Where a checkpoint has each parameter: under the names in which the model is published, and experts one by one, as vLLM reads them.

transformers 5 renames tensors when it loads them and stacks the experts of a layer into one parameter. Its own rules are applied backwards
here, to row numbers in place of values: what comes out says which rows of which expert a tensor of the checkpoint holds.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from fewbits.model.weights import Weight

_HALVES = {"gate_up_proj": ("gate_proj", "up_proj")}  # what llm-compressor calls the halves, and vLLM reads


class Place(NamedTuple):
    """A layer of the checkpoint and the rows of a weight that it holds."""

    layer: str
    rows: slice


@dataclass(frozen=True)
class Layout:
    shapes: dict[str, tuple[int, ...]]  # of every parameter and buffer, as transformers has it
    names: dict[str, str]  # of every parameter and buffer that is stored whole: its name in the checkpoint
    experts: dict[str, list[tuple[Place, ...]]]  # of a parameter that stacks experts: the layers of each
    turned: frozenset[str]  # those of them whose experts lie as (cols, rows)
    stacked: dict[str, str]  # of such a parameter that transformers does not assemble from quantized experts: why

    def layer(self, module: str) -> str:
        return self.names.get(f"{module}.weight", module).removesuffix(".weight")

    def places(self, weight: Weight) -> tuple[Place, ...]:
        if weight.expert is None:
            return (Place(self.layer(weight.name), slice(0, weight.shape[0])),)
        return self.experts[weight.parameter][weight.expert]

    def pattern(self, parameter: str) -> str:
        """A target that names every expert of this layer, under any prefix: vLLM calls the model's parts by other names."""
        return pattern_of(self.experts[parameter][0][0].layer)


def pattern_of(layer: str) -> str:
    """For `model.layers.0.mlp.experts.5.up_proj`: `re:.*[.]layers[.]0[.]mlp[.]experts[.][0-9]+[.]`."""
    parts = layer.split(".")[:-2]
    block = next((i for i, part in enumerate(parts) if part.isdigit()), 1)
    return "re:.*" + "".join(f"[.]{re.escape(part)}" for part in parts[max(block - 1, 0) :]) + "[.][0-9]+[.]"


def skeleton(config: Any) -> Any:
    """The module on the meta device."""
    import torch

    from fewbits.model.experts import with_eager_experts
    from fewbits.model.module import empty_module

    with torch.device("meta"):
        return empty_module(with_eager_experts(config))


def layout_of(config: Any, module: Any = None) -> Layout:
    """Of a model's checkpoint. Experts for which there is no layout are left out of `experts`. `module`: its skeleton, if there is one."""
    from fewbits.model import experts

    module = skeleton(config) if module is None else module
    rules, found, why = _Rules(module), {}, {}
    stacks = experts.find(module, config)
    for parameter, transposed in stacks.items():
        count, *sides = module.get_parameter(parameter).shape
        rows = sides[1] if transposed else sides[0]
        if places := rules.split(parameter, count, rows, transposed):
            found[parameter] = places
        elif places := _linear(module, parameter, count, rows):
            found[parameter] = places
            if not _patched(module, parameter):
                why[parameter] = f"transformers has no rule that puts the experts of {config.model_type} together"
    shapes = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    names = {name: rules.published(name) for name in shapes if name not in stacks}
    return Layout(shapes, names, found, frozenset(name for name, transposed in stacks.items() if transposed), why)


class _Rules:
    """transformers' rules for this model, backwards."""

    def __init__(self, module: Any) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import PrefixChange, WeightConverter, WeightRenaming

        self._module, names = module, list(module.state_dict())
        self._known = dict.fromkeys((*names, *map(_packed, names)), True)
        rules = [rule for rule in get_model_conversion_mapping(module, add_legacy=False) if not isinstance(rule, PrefixChange)]
        self._renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        self._converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        self._back = [rule.reverse_transform() for rule in reversed(self._renamings)]

    def published(self, name: str) -> str:
        """The published name, if transformers finds its way back from it; else the module's own."""
        from transformers.core_model_loading import apply_renamings, rename_source_key

        found: str = apply_renamings(name, self._back)
        rules = (self._renamings, self._converters, self._module.base_model_prefix, self._known)
        ways = [(found, name), *([(_packed(found), _packed(name))] if name.endswith("weight") else [])]
        return found if all(rename_source_key(stored, *rules)[0] == wanted for stored, wanted in ways) else name

    def split(self, parameter: str, count: int, rows: int, transposed: bool) -> list[tuple[Place, ...]] | None:
        """The layers of each expert; None if transformers has no rule with one tensor per expert."""
        import torch
        from transformers.core_model_loading import revert_weight_conversion

        numbers = torch.arange(count * rows).reshape(count, rows, 1)
        try:
            parts = revert_weight_conversion(self._module, {parameter: numbers.mT if transposed else numbers})
        except Exception:  # an operation that needs the real sizes, or parameters beside this one
            return None
        if len(parts) < count or not all(name.endswith(".weight") for name in parts):
            return None
        found: list[list[Place]] = [[] for _ in range(count)]
        for name, part in parts.items():
            which = part.flatten()
            expert, first = divmod(int(which[0]), rows)
            if not torch.equal(which, torch.arange(len(which)) + int(which[0])) or first + len(which) > rows:
                return None
            found[expert].append(Place(name.removesuffix(".weight"), slice(first, first + len(which))))
        return [tuple(sorted(places, key=lambda place: place.rows.start)) for places in found]


def _packed(name: str) -> str:
    return re.sub("weight$", "weight_packed", name)


def _linear(module: Any, parameter: str, count: int, rows: int) -> list[tuple[Place, ...]] | None:
    """The layers that llm-compressor makes of experts in transformers' standard form: gate above up, no biases."""
    owner, _, leaf = parameter.rpartition(".")
    experts = module.get_submodule(owner)
    standard = getattr(experts, "is_concatenated", False) and not getattr(experts, "has_bias", True)
    if not (standard or _patched(module, parameter)):
        return None
    parts = _HALVES.get(leaf, (leaf,))
    step = rows // len(parts)
    return [
        tuple(Place(f"{owner}.{expert}.{part}", slice(i * step, (i + 1) * step)) for i, part in enumerate(parts)) for expert in range(count)
    ]


def _patched(module: Any, parameter: str) -> bool:
    """Whether transformers replaces the module by a list of experts, each with layers of its own, when weights are quantized."""
    from transformers.quantizers.base import MODULES_TO_PATCH_FOR_QUANTIZATION

    return type(module.get_submodule(parameter.rpartition(".")[0])).__name__ in MODULES_TO_PATCH_FOR_QUANTIZATION
