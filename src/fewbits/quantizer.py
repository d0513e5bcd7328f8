"""How transformers loads an artifact: `import fewbits`, then `AutoModelForCausalLM.from_pretrained(FOLDER)`.

config.json names the method `fewbits`; importing this module registers who serves it. transformers then does the loading itself: the
parts lie in its shards under the names of the buffers that `layers.install` makes. `fewbits.registration` imports this as soon as
transformers' own registry is there, so nothing of its model code may be imported here at the top.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers.quantizers import auto
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from fewbits.errors import InputError, MissingError
from fewbits.manifest import METHOD

if TYPE_CHECKING:
    from fewbits.artifact import Artifact

_CHOOSES = ("auto", "balanced", "balanced_low_0", "sequential")  # device maps that leave the choice to transformers


@auto.register_quantization_config(METHOD)
class FewbitsConfig(QuantizationConfigMixin):  # type: ignore[misc]  # transformers is untyped
    """`exact`: inputs of matmuls are not rounded to int8 on the way in: slower, and the values of torch up to float32's rounding."""

    def __init__(self, exact: bool = False, **about: Any) -> None:
        """`about`: what config.json says beside it, kept as it is."""
        self.__dict__.update(about)
        self.quant_method, self.exact = METHOD, exact

    def get_loading_attributes(self) -> dict[str, Any]:
        return {"exact": self.exact}


# Whose `from_pretrained(..., quantization_config=...)` is heard beside what config.json says.
auto.LOADING_ATTRIBUTES_CONFIG_TYPES = (*auto.LOADING_ATTRIBUTES_CONFIG_TYPES, FewbitsConfig)


@auto.register_quantizer(METHOD)
class FewbitsQuantizer(HfQuantizer):  # type: ignore[misc]
    requires_calibration = True  # transformers refuses to quantize with it while loading: `fewbits quantize` does that
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
        from fewbits import stacks

        return stacks.looping(config)  # experts one by one, each with the kernel of its own format

    def _process_model_before_weight_loading(self, model: Any, checkpoint_files: list[str] | None = None, **_: Any) -> None:
        from fewbits import layers

        artifact = _opened(checkpoint_files)
        self._name, self._kv = artifact.path.name, artifact.plan.kv
        layers.install(model, artifact, model.config.dtype, self.quantization_config.exact)

    def update_weight_conversions(self, weight_conversions: list[Any], model: Any) -> list[Any]:
        return []  # an artifact has the module's own names, whatever the source called them

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        from fewbits import layers

        for matrix in layers.matrices(model):
            matrix.restore_types()
        if self._kv is not None:
            model.register_forward_pre_hook(_Caching(self._kv), with_kwargs=True)
        return model.requires_grad_(False)  # the kernels have no gradients: asking for some fails instead of giving a part of them

    def is_serializable(self) -> bool:
        raise InputError(
            "a packed model is not saved from memory: its plan, hashes and verdicts would be lost",
            f"copy the folder `{self._name}`, or write it for another runtime with `fewbits export`",
        )

    @property
    def is_trainable(self) -> bool:
        return False


class _Caching:
    """Before the first tokens go in: the plan's KV cache in the place of the float one that transformers makes by itself.

    Keys and values are rounded, not packed: the cache computes what a quantized one would, and takes the memory of a float one. A cache
    that the user chose is left alone. The tokens of one call see each other in float, as they do wherever a prompt is taken in at once.
    """

    def __init__(self, kv: str) -> None:
        self.kv = kv

    def __call__(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        from transformers.cache_utils import DynamicCache

        from fewbits import kv
        from fewbits.kv_cache import QuantizedCache

        given = kwargs.get("past_key_values")
        wanted = kwargs.get("use_cache")
        if (getattr(model.config, "use_cache", False) if wanted is None else wanted) and (given is None or _is_empty(given, DynamicCache)):
            kwargs = kwargs | {"past_key_values": QuantizedCache(kv.get(self.kv)), "use_cache": True}
        return args, kwargs


def _is_empty(cache: Any, kind: Any) -> bool:
    return type(cache) is kind and cache.get_seq_length() == 0


def _opened(checkpoint_files: list[str] | None) -> Artifact:
    from fewbits.artifact import Artifact

    folder = Path((checkpoint_files or [""])[0]).parent
    if not (folder / "fewbits.json").is_file():
        hint = "give the whole folder: of a model on the hub, what `hf download NAME` prints"
        raise InputError(f"`{folder}` has weights of fewbits, but no fewbits.json that says what they are", hint)
    return Artifact(folder)
