"""What a tiny model of the zoo is, and the sizes that most of them share."""

from __future__ import annotations

from dataclasses import dataclass, field
from inspect import signature
from typing import Any, Literal

import transformers

VOCABULARY = 2048  # of the embedded model's tokenizer; the ids beyond it, which no text contains, stand for images and padding
SIZES: dict[str, Any] = {
    **{"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"head_dim": 64, "vocab_size": VOCABULARY + 16, "max_position_embeddings": 1024},
    **{"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None},
}


@dataclass(frozen=True)
class Tiny:
    name: str
    cls: str  # a model class of transformers
    settings: dict[str, Any] = field(default_factory=dict)  # of its config, over SIZES
    kind: Literal["decoder", "encoder"] = "decoder"
    dtype: str = "bfloat16"  # float16 for mixtures: llama.cpp rounds activations to the type of the file, and tokens change experts
    renames: dict[str, str] = field(default_factory=dict)  # parts of the names of tensors that transformers saves otherwise than published
    published: Literal["", "mxfp4", "fp8"] = ""  # how its weights are stored if not as transformers holds them
    extra: dict[str, Any] = field(default_factory=dict)  # keys of config.json that are published otherwise than saved; `...`: not at all
    logits: float = 1.0  # factor on the output matrix: architectures scale or cap their logits differently
    embedding: float = 1.0  # factor on embeddings that are not tied to the output matrix: some architectures multiply them
    final: float = 1.0  # factor on the last norm, divided out of the output matrix: makes embeddings that are tied to it small
    residual: float = 0.5  # factor on matrices that write into the hidden state
    factors: dict[str, float] = field(default_factory=dict)  # on parameters, by how their names end
    notes: str = ""

    def config(self) -> Any:
        return config(getattr(transformers, self.cls).config_class, **self.settings)


def config(cls: Any, **settings: Any) -> Any:
    """A config with those of the shared sizes that it knows; those of its language part, if it has one, are there."""
    if "text_config" in settings:
        text = settings["text_config"]
        of_text = transformers.CONFIG_MAPPING[text["model_type"]]
        return cls(**{**settings, "text_config": config(of_text, **{key: text[key] for key in text if key != "model_type"}).to_dict()})
    aliases = getattr(cls, "attribute_map", {})
    names = {*signature(cls.__init__).parameters, *aliases}
    shared = {key: value for key, value in SIZES.items() if key in names and aliases.get(key) not in settings}
    return cls(**{**shared, **settings})
