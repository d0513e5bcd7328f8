"""How transformers loads an artifact: `import fewbits`, then `AutoModelForCausalLM.from_pretrained(FOLDER)`.

config.json names the quantization method `fewbits`; importing this module registers the classes that serve it. transformers does the
loading itself: the artifact's shards hold the parts under the names of the buffers that `packed_weights.install` makes.
`fewbits.inference.registration` imports this module as soon as transformers' registry is loaded, in the middle of transformers' own
import, so that no model code of transformers may be imported at the top.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers.quantizers import auto
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from fewbits.artifact import stand_in
from fewbits.artifact.manifest import METHOD
from fewbits.errors import InputError, MissingError

if TYPE_CHECKING:
    from fewbits.artifact import Artifact

_CHOOSES = ("auto", "balanced", "balanced_low_0", "sequential")  # device maps that leave the choice to transformers


@auto.register_quantization_config(METHOD)
class FewbitsConfig(QuantizationConfigMixin):  # type: ignore[misc]  # transformers is untyped
    """`exact`: inputs of matmuls are not rounded to int8. Slower, and equal to torch up to the rounding of float32."""

    def __init__(self, exact: bool = False, **about: Any) -> None:
        """`about`: the other entries of config.json's quantization_config, left as they are."""
        self.__dict__.update(about)
        self.quant_method, self.exact = METHOD, exact

    def get_loading_attributes(self) -> dict[str, Any]:
        return {"exact": self.exact}


# Lets `from_pretrained(..., quantization_config=FewbitsConfig(...))` override what config.json says.
auto.LOADING_ATTRIBUTES_CONFIG_TYPES = (*auto.LOADING_ATTRIBUTES_CONFIG_TYPES, FewbitsConfig)


@auto.register_quantizer(METHOD)
class FewbitsQuantizer(HfQuantizer):  # type: ignore[misc]
    requires_calibration = True  # so that transformers does not try to quantize a float model while loading it
    quantization_config: FewbitsConfig

    def validate_environment(self, *_: Any, device_map: Any = None, **__: Any) -> None:
        named = device_map.values() if isinstance(device_map, dict) else [device_map] if device_map not in (None, *_CHOOSES) else []
        if elsewhere := [str(each) for each in named if str(each) != "cpu"]:
            raise MissingError(
                f"an artifact of fewbits cannot be loaded to {elsewhere[0]}: its kernels run on the CPU", "leave `device_map` out"
            )

    def update_device_map(self, device_map: Any) -> Any:
        return {"": "cpu"} if device_map in _CHOOSES else device_map

    def update_attn_implementation(self, config: Any) -> Any:
        from fewbits.model import experts

        return experts.with_eager_experts(config)  # one expert after the other, each with the kernel of its format

    def _process_model_before_weight_loading(self, model: Any, checkpoint_files: list[str] | None = None, **_: Any) -> None:
        from fewbits.inference.packed_weights import install

        artifact = _opened(checkpoint_files)
        self._name, self._kv = artifact.path.name, artifact.plan.kv
        install(model, artifact, model.config.dtype, self.quantization_config.exact)
        empty = {f"^{re.escape(name)}$" for name, file in artifact.manifest.shard_of.items() if file == stand_in.FILE}
        model._keys_to_ignore_on_load_unexpected = (model._keys_to_ignore_on_load_unexpected or set()) | empty

    def update_weight_conversions(self, weight_conversions: list[Any], model: Any) -> list[Any]:
        return []  # an artifact has the module's names, whatever the names in the source were

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        from fewbits.inference.packed_weights import packed_weights

        for matrix in packed_weights(model):
            matrix.restore_types()
        if self._kv is not None:
            model.register_forward_pre_hook(_GivesCache(self._kv), with_kwargs=True)
        return model.requires_grad_(False)  # the kernels have no gradients: asking for them must fail, not give a part of them

    def is_serializable(self) -> bool:
        raise InputError(
            "a packed model is not saved from memory: its plan, hashes and verdicts would be lost",
            f"copy the folder `{self._name}`, or write it for another runtime with `fewbits export`",
        )

    @property
    def is_trainable(self) -> bool:
        return False


class _GivesCache:
    """A hook that gives the module the plan's KV cache where transformers would make a float one.

    Keys and values are rounded, not packed: the cache computes what a quantized one would, in the memory of a float one. A cache that the
    user chose is left alone. The tokens of one call see each other in float, as always when a prompt is read at once.
    """

    def __init__(self, kv: str) -> None:
        self.kv = kv

    def __call__(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        from transformers.cache_utils import DynamicCache

        from fewbits.formats.runtime import kv
        from fewbits.inference.emulated_kv_cache import EmulatedKVCache

        given, wanted = kwargs.get("past_key_values"), kwargs.get("use_cache")
        wanted = getattr(model.config, "use_cache", False) if wanted is None else wanted
        if wanted and (given is None or (type(given) is DynamicCache and given.get_seq_length() == 0)):
            kwargs = kwargs | {"past_key_values": EmulatedKVCache(kv.get(self.kv)), "use_cache": True}
        return args, kwargs


def _opened(checkpoint_files: list[str] | None) -> Artifact:
    from fewbits.artifact import Artifact

    folder = Path((checkpoint_files or [""])[0]).parent
    if not (folder / "fewbits.json").is_file():
        hint = "give the whole folder: of a model on the hub, what `hf download NAME` prints"
        raise InputError(f"`{folder}` has weights of fewbits, but no fewbits.json that says what they are", hint)
    return Artifact(folder)
