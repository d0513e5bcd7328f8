"""What the config.json of a compressed-tensors folder says of its layers: bits and scales, by name, by pattern or by class."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fewbits.errors import InputError
from fewbits.model.checkpoints.encoded import DAMAGED
from fewbits.model.checkpoints.layer_patterns import LayerPatterns

_FORMATS = (
    "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized",
    "mxfp8-quantized", "mixed-precision",
)  # fmt: skip
_SMALL = {4: "fp4 e2m1", 8: "fp8 e4m3"}


@dataclass(frozen=True)
class Group:
    targets: tuple[str, ...]
    kind: str  # int, float
    bits: int
    strategy: str  # tensor, channel, group, tensor_group (with a factor for the whole weight), block
    size: tuple[int, int] | None  # rows and columns of a group or block
    symmetric: bool

    def block(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Rows and columns under one scale."""
        rows, cols = (max(side, 1) for side in shape)
        return self.size or ((rows, cols) if self.strategy == "tensor" else (1, cols))

    def grid(self, shape: tuple[int, int]) -> tuple[int, int]:
        """The shape of the scales."""
        (rows, cols), (tall, wide) = shape, self.block(shape)
        return -(-rows // tall), -(-cols // wide)

    @property
    def about(self) -> str:
        name = f"int{self.bits}{'' if self.symmetric else ' with zero points'}" if self.kind == "int" else _SMALL[self.bits]
        if self.size is None:
            return f"{name}, a scale per {'tensor' if self.strategy == 'tensor' else 'row'}"
        tall, wide = self.size
        return f"{name}, {f'{tall} x {wide} blocks' if tall > 1 else f'{wide} columns per scale'}"


def groups_of(said: Mapping[str, Any]) -> list[Group]:
    rotations = said.get("transform_config")
    if isinstance(rotations, dict) and rotations.get("config_groups"):
        raise InputError("config.json rotates inputs while the model runs (`transform_config`), which is not read", "give the float model")
    try:
        return [_group(group, said.get("format")) for group in said["config_groups"].values() if group.get("weights")]
    except (KeyError, TypeError, ValueError, AttributeError) as failure:
        raise InputError(f"config.json does not say how its weights are quantized: {repr(failure)[:200]}", DAMAGED) from failure


def _group(group: Any, layout: Any) -> Group:
    layout = group.get("format") or layout
    if layout not in _FORMATS:
        raise InputError(f"weights in the format `{str(layout)[:100]}` are not read", f"these are: {', '.join(_FORMATS)}")
    weights, targets = group["weights"], group["targets"]
    kind, bits, symmetric = weights.get("type", "int"), weights.get("num_bits", 8), weights.get("symmetric", True)
    columns, sides = weights.get("group_size"), weights.get("block_structure")
    strategy = weights.get("strategy") or ("tensor" if columns is None else "group" if columns > 0 else "channel")
    size = tuple(sides) if strategy == "block" else (1, columns) if strategy in ("group", "tensor_group") else None
    if type(bits) is not int or bits not in {"int": range(1, 9), "float": _SMALL}.get(kind, ()):
        raise ValueError(f"{kind} of {bits} bits")
    if strategy not in ("tensor", "channel", "group", "tensor_group", "block") or type(symmetric) is not bool:
        raise ValueError(f"strategy {strategy}, symmetric {symmetric}")
    if size is not None and (len(size) != 2 or not all(type(side) is int and side > 0 for side in size)):
        raise ValueError(f"groups of {size}")
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise ValueError("targets that are no names")
    return Group(tuple(targets), kind, bits, strategy, size, symmetric)


def group_of(layer: str, groups: list[Group], patterns: LayerPatterns) -> Group:
    """The group that names the layer most closely: by its name, then by a pattern, then by its class."""
    matching = [(target, group) for group in groups for target in group.targets if patterns.match(target, layer)]
    if not matching and len(groups) == 1:  # by another class, or by the name that the layer has in the module
        return groups[0]
    if not matching:
        raise InputError(f"`{layer}` is quantized, but no group of config.json names it", DAMAGED)
    closeness = {layer: 0, "Linear": 2}
    return min(matching, key=lambda match: closeness.get(match[0], 1))[1]
