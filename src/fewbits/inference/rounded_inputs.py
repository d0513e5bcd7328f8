"""Rounds the inputs of matmuls as a plan says, by hooks on a float module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from fewbits.formats.runtime.activations import quantized

if TYPE_CHECKING:
    from torch import Tensor

    from fewbits.formats.runtime.activations import Activation


@contextmanager
def rounding_inputs(activations: Mapping[str, Activation], modules: Mapping[str, Any], experts: Mapping[str, Tensor]) -> Iterator[None]:
    """While entered, the inputs of these modules are rounded, and those of the experts in these three-dimensional parameters."""
    from fewbits.model.experts import Products

    def of_expert(parameter: str, expert: int, x: Tensor) -> Tensor:
        activation = activations.get(f"{parameter}.{expert}")
        return x if activation is None else quantized(x, activation)

    with ExitStack() as hooks:
        for name, module in modules.items():
            hooks.enter_context(module.register_forward_pre_hook(rounding_hook(activations[name])))
        if experts:
            hooks.enter_context(Products(experts, change=of_expert))
        yield


def rounding_hook(activation: Activation) -> Any:
    def rounded(module: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        if not hasattr(module, "kernel_size"):
            return quantized(inputs[0], activation), *inputs[1:]
        # a convolution: the channels of a place share a scale, as those of a token do
        channels = inputs[0].dim() - len(module.kernel_size) - 1
        return quantized(inputs[0].movedim(channels, -1), activation).movedim(-1, channels), *inputs[1:]

    return rounded
