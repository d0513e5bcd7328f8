"""config.json as mlx-lm reads it: what a source says, the older names of what transformers 5 renamed, and how each layer is quantized."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fewbits.targets.mlx.schemes import Scheme

_OLDER = {"rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor", "rope_scaling": "rope_scaling"}
_FULL, _SLIDING = "full_attention", "sliding_attention"


def settings_for(content: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """`content`: of config.json. What mlx-lm reads and the file leaves out is added, as transformers knows it: its own default may be
    another one, or it may have none."""
    from fewbits.targets.mlx.package import asked_for

    settings = {key: value for key, value in content.items() if key not in ("quantization", "quantization_config")}
    _add_older_names(settings)
    if isinstance(text := settings.get("text_config"), dict):
        known = json.loads(config.get_text_config().to_json_string(use_diff=False))
        settings["text_config"] = {key: value for key, value in known.items() if value is not None} | dict(text)
        _add_older_names(settings["text_config"])
        settings["text_config"].setdefault("rope_scaling", None)
    text_config = config.get_text_config()
    for key, needed in asked_for(settings).items():
        if settings.get(key) is not None or key == "quantization":
            continue
        stored = [each for each in (config, text_config) if needed or key in each.to_dict() or key in each.attribute_map]
        said = [getattr(each, key, None) for each in stored]  # not what is only computed: transformers could not read it back
        value = next((each for each in said if isinstance(each, bool | int | float | str | list | dict)), None)
        if key in _OLDER:
            value = settings.get(_OLDER[key])
        elif key == "head_dim" and value is None:
            value = text_config.hidden_size // text_config.num_attention_heads
        if value is not None or (needed and key not in settings and (key == "rope_scaling" or hasattr(config, key))):
            settings[key] = value
    return settings


def _add_older_names(settings: dict[str, Any]) -> None:
    """transformers 5 keeps all about rotary positions in `rope_parameters`; a third of mlx-lm's models read the names from before, and
    would take their defaults in silence."""
    said = settings.get("rope_parameters")
    if not isinstance(said, dict):
        return
    if isinstance(said.get(_FULL), dict):
        if isinstance(sliding := said.get(_SLIDING), dict) and "rope_theta" in sliding:
            settings.setdefault("rope_local_base_freq", sliding["rope_theta"])
        said = said[_FULL]
    for key in ("rope_theta", "partial_rotary_factor"):
        if key in said and settings.get(key) is None:
            settings[key] = said[key]
    if said.get("rope_type", "default") != "default" and settings.get("rope_scaling") is None:
        settings["rope_scaling"] = {key: value for key, value in said.items() if key != "rope_theta"} | {"type": said["rope_type"]}


def quantization(layers: Mapping[str, Scheme]) -> dict[str, Any] | None:
    """The entry of config.json: the commonest scheme for all, and the layers that differ. None: nothing is quantized.

    Layers without scales stay in float: mlx-lm looks for the tensor.
    """
    if not layers:
        return None
    usual = Counter(layers.values()).most_common(1)[0][0]
    return usual.arguments() | {name: scheme.arguments() for name, scheme in layers.items() if scheme != usual}
