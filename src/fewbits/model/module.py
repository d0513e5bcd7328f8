"""The transformers module of a config: on the meta device (`skeleton_of`), with memory for its values, or filled with them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits.errors import InputError
from fewbits.model import limits
from fewbits.model.weights import Weight
from fewbits.store.untrusted import first_line

if TYPE_CHECKING:
    from torch import Tensor, nn


def empty_module(config: Any) -> nn.Module:
    """The float32 module with its weights not yet set: the random initialisation costs more time than loading, and is skipped."""
    import torch
    from transformers.initialization import no_init_weights

    with no_init_weights(), torch.no_grad():
        module = _model_class(config)(config)
    module.tie_weights()
    floats: nn.Module = module.float()
    return floats


def filled_module(config: Any, matrices: Iterable[tuple[Weight, Tensor]], rest: Iterable[tuple[str, Tensor]]) -> nn.Module:
    """The float32 module with these weights and these other tensors in it, taken one at a time."""
    import torch

    module = empty_module(config)
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    with torch.no_grad():
        for weight, matrix in matrices:
            weight.view(tensors[weight.parameter]).copy_(matrix)
        for name, tensor in rest:
            if tensor.shape != tensors[name].shape:  # `copy_` would broadcast
                shapes = f"{tuple(tensor.shape)} in the weights and {tuple(tensors[name].shape)} by config.json"
                raise InputError(f"`{name}` is {shapes}", "the two do not belong together")
            tensors[name].copy_(tensor)
    return module.eval()


def check_fit(config: Any, weights: Iterable[Weight], rest: Iterable[str], path: Path) -> None:
    """Checks that a module of this config has these weights and no others, before memory is allocated for the sizes in the config."""
    weights, rest = list(weights), list(rest)
    skeleton = skeleton_of(config, path, len(weights) + len(rest))
    parameters = dict(skeleton.named_parameters())
    known, hint = set(rest), "the two do not belong together"
    for weight in weights:
        known.add(weight.parameter)
        try:
            shape: tuple[int, ...] | None = tuple(weight.view(parameters[weight.parameter]).shape)
        except (LookupError, TypeError, RuntimeError):  # no such parameter, no such expert in it, or not enough dimensions
            shape = None
        if shape != weight.shape:
            raise InputError(f"`{weight.name}` is {weight.shape} in `{path}` and {shape or 'not there'} by its config.json", hint)
    if unknown := next((name for name in parameters if name not in known), None):
        raise InputError(f"`{path}` does not hold `{unknown}`, which its config.json asks for", hint)


def skeleton_of(config: Any, path: Path, tensors: int) -> nn.Module:
    """The module on the meta device. `tensors`: how many the file has, which bounds how large the module may become."""
    import torch

    from fewbits.model import experts

    config = experts.with_eager_experts(config)
    kind = _model_class(config)
    try:
        with torch.device("meta"), limits.building(tensors):
            skeleton: nn.Module = kind(config)
    except Exception as failure:  # sizes that contradict each other raise another error in every architecture
        reason = f"{type(failure).__name__}: {first_line(failure)}"
        raise InputError(f"`{path}` describes no {kind.__name__} that can be built: {reason}", "its config is damaged") from failure
    return skeleton


def _model_class(config: Any) -> Any:
    import transformers
    from torch import nn

    names = config.architectures or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise InputError("the architectures of config.json are no list of names", "its config is damaged")
    for name in names:
        try:
            model_class = getattr(transformers, name, None)
        except Exception as failure:  # transformers imports on demand, and may name what is not installed
            raise InputError(f"transformers cannot load `{name}`: {first_line(failure)}", "is it the name of a model's class?") from failure
        if model_class is not None:
            if not (isinstance(model_class, type) and issubclass(model_class, nn.Module)):
                raise InputError(f"`{name}` is no model of transformers", "the architectures of config.json are damaged")
            return model_class
    try:
        return transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    except KeyError:
        named = ", ".join(names) or config.model_type
        raise InputError(
            f"the installed transformers knows no architecture `{named}`", "update transformers; remote code is never run"
        ) from None
