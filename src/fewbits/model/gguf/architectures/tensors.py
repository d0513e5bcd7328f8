"""Where each parameter is in a file: the name of its tensor (or of two), and the order of its rows."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fewbits.errors import InputError
from fewbits.model.gguf.architectures.table import attribute, of

_SUFFIXES = (".weight", ".bias")
_FUSED = "experts.gate_up_proj"  # transformers has the first two matrices of an expert as one, llama.cpp as two


@dataclass(frozen=True)
class Place:
    tensor: str
    rows: Sequence[int] | None = None  # row i of the tensor is row rows[i] of the parameter (in each expert); None: all rows in order
    added: float = 0.0  # value in the file minus value of the parameter


class Places:
    def __init__(self, config: Any) -> None:
        import gguf

        self._config, self._row = config, of(config)
        arch = next(member for member, name in gguf.MODEL_ARCH_NAMES.items() if name == self._row.gguf)
        self._names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)

    def find(self, parameter: str) -> tuple[Place, ...] | None:
        """None: llama.cpp has no such tensor."""
        names = self.names(parameter)
        if len(names) == 2:
            width = int(attribute(self._config, "moe_intermediate_size") or self._config.intermediate_size)
            return Place(names[0], range(width)), Place(names[1], range(width, 2 * width))
        added = 1.0 if self._row.unit_norms and parameter.endswith("norm.weight") else 0.0
        return (Place(names[0], self._order(parameter), added),) if names else None

    def __call__(self, parameter: str) -> tuple[Place, ...]:
        places = self.find(parameter)
        if places is None:
            raise self.unknown(parameter)
        return places

    def unknown(self, parameter: str) -> InputError:
        return InputError(f"`{parameter}` has no place in llama.cpp's {self._row.gguf}", "choose another target")

    def names(self, parameter: str) -> tuple[str, ...]:
        """Names of the tensors that the parameter is written to."""
        fused = parameter.endswith(_FUSED)
        halves = [parameter.replace("gate_up_proj", half) for half in ("gate_proj", "up_proj")] if fused else [parameter]
        return tuple(name for half in halves if (name := self._name(half)) is not None)

    def _name(self, parameter: str) -> str | None:
        module, suffix = next(((parameter.removesuffix(s), s) for s in _SUFFIXES if parameter.endswith(s)), (parameter, ".weight"))
        known = self._row.names.get(module) or self._names.get_name(module)
        return None if known is None else f"{known}{suffix}"

    def _order(self, parameter: str) -> list[int] | None:
        asked = re.search(r"\.self_attn\.([qk])_proj(\.|$)", parameter)
        if not self._row.interleaved or not asked:
            return None
        heads = int(attribute(self._config, "num_attention_heads" if asked[1] == "q" else "num_key_value_heads"))
        width = int(attribute(self._config, "head_dim"))
        return [head * width + pair + half for head in range(heads) for pair in range(width // 2) for half in (0, width // 2)]


def tensor_names(config: Any) -> Callable[[str], str]:
    """From `model.layers.0.mlp.up_proj.weight` to `blk.0.ffn_up.weight`; the first one if there are two."""
    places = Places(config)

    def rename(parameter: str) -> str:
        names = places.names(parameter)
        if not names:
            raise places.unknown(parameter)
        return names[0]

    return rename
