"""What transformers cannot load of such a folder, although it is well formed and vLLM can; and the same weights decoded without its loader.

Three things were found in transformers 5.22: it decodes all experts by one scheme; it has no rule for the experts of some models; and where
a model's own code initializes a layer it reads `weight`, which a packed layer does not have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fewbits.errors import InputError
from fewbits.targets.compressed_tensors.layout import layout_of, skeleton

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fewbits.store.tensor_file import TensorFile
    from fewbits.targets.compressed_tensors.schemes import Scheme

_HINT = "write the folder anew with `fewbits export --to safetensors`"


def obstacle(config: Any, groups: Sequence[tuple[list[str], Scheme]]) -> str | None:
    """Why transformers cannot load a folder with these groups of layers; None if nothing is known against it."""
    module = skeleton(config)
    layout = layout_of(config, module)
    of_experts: set[Scheme] = set()
    for parameter in layout.experts:
        found = [scheme for targets, scheme in groups if layout.pattern(parameter) in targets]
        if found and parameter in layout.stacked:
            return layout.stacked[parameter]
        of_experts.update(found)
    if len(of_experts) > 1:
        return f"its experts are {' and '.join(sorted(scheme.type for scheme in of_experts))}, and transformers decodes all by one format"
    return _initializing(module, {name for targets, scheme in groups if "pack" in scheme.layout for name in targets})


def _initializing(module: Any, packed: set[str]) -> str | None:
    """Tries what transformers does after loading: every module is given to the model's `_init_weights`, packed layers too."""
    from torch import nn

    for name, part in module.named_modules():
        if name in packed and isinstance(part, nn.Linear):
            del part.weight
    try:
        module.initialize_weights()
    except AttributeError as failure:
        return f"transformers initializes a layer that is packed: {failure}"
    return None


def decoded_module(config: Any, quantization: Mapping[str, Any], files: Mapping[str, TensorFile]) -> nn.Module:
    """transformers' float module with the values that compressed-tensors decodes, one layer after the other. `files`: of each tensor."""
    import torch

    from fewbits.model.module import empty_module

    if rounded := next((each for each in quantization["config_groups"].values() if each.get("input_activations")), None):
        raise InputError(f"the inputs of `{rounded['targets'][0]}` are rounded, which only transformers' own loader does", _HINT)
    module, layout, reader = empty_module(config), layout_of(config), _Reader(quantization, files)
    tensors = dict(module.named_parameters()) | {name: each for name, each in module.named_buffers() if name in module.state_dict()}
    with torch.no_grad():
        for name, tensor in tensors.items():
            experts = layout.experts.get(name, [])
            if name in files or not experts:
                tensor.copy_(_same_shape(reader.whole(layout.names.get(name, name)), tensor, name))
                continue
            for expert, places in enumerate(experts):
                matrix = torch.cat([reader.layer(place.layer) for place in places])  # places are in the order of rows
                tensor[expert].copy_(_same_shape(matrix.T if name in layout.turned else matrix, tensor[expert], name))
    if left := files.keys() - reader.read:
        raise InputError(f"there is a `{min(left)}` that config.json does not ask for", "the two do not belong together")
    return module.eval()


class _Reader:
    def __init__(self, quantization: Mapping[str, Any], files: Mapping[str, TensorFile]) -> None:
        from compressed_tensors.quantization import QuantizationConfig

        self._schemes = list(QuantizationConfig.model_validate(dict(quantization)).config_groups.values())
        self._files, self.read = files, set[str]()
        self._parts: dict[str, dict[str, str]] = {}
        for name in files:
            layer, _, part = name.rpartition(".")
            self._parts.setdefault(layer, {})[part] = name

    def whole(self, name: str) -> Tensor:
        if name in self._files and f"{name}_scale" not in self._files:
            return self._tensor(name)
        return self.layer(name.removesuffix(".weight"))

    def layer(self, layer: str) -> Tensor:
        """(rows, cols), by the compressor that compressed-tensors has for its format."""
        from compressed_tensors.compressors import BaseCompressor
        from compressed_tensors.utils.match import match_name

        parts = {part: self._tensor(name) for part, name in self._parts.get(layer, {}).items() if part.startswith("weight")}
        scheme = next((each for each in self._schemes if any(match_name(layer, target) for target in each.targets)), None)
        if not parts or scheme is None:
            raise InputError(f"the folder has no weights for `{layer}`, or does not say how they are quantized", _HINT)
        if scheme.weights.type == "int" or scheme.weights.num_bits == 8:
            parts["weight_scale"] = parts["weight_scale"].float()  # as a model in float32 loads it
        values: Tensor = BaseCompressor.get_value_from_registry(scheme.format).decompress(parts, scheme)["weight"]
        return values.float()

    def _tensor(self, name: str) -> Tensor:
        self.read.add(name)
        return self._files[name].tensor(name)


def _same_shape(value: Tensor, wanted: Tensor, name: str) -> Tensor:
    if value.shape != wanted.shape:  # `copy_` would broadcast
        shapes = f"{tuple(value.shape)} in the weights and {tuple(wanted.shape)} by config.json"
        raise InputError(f"`{name}` is {shapes}", "the two do not belong together")
    return value
