"""Hostile config.json: numbers that are multiplied, looped over and allocated, and names that are looked up."""

from __future__ import annotations

from pathlib import Path

from benign import Benign
from cases import case
from folder_cases import configured, copied


@case("folder")
def long_number_in_json(folder: Path, benign: Benign) -> None:
    """a number of a million digits, which takes quadratic time to read"""
    (copied(folder, benign) / "config.json").write_text('{"model_type": "llama", "hidden_size": 1' + "0" * 1_000_000 + "}")


@case("folder", passes=("inspect",))
def vast_hidden_size(folder: Path, benign: Benign) -> None:
    """a config that says 2^40 columns"""
    configured(folder, benign, hidden_size=1 << 40, head_dim=1 << 38)


@case("folder", passes=("inspect",))
def vast_vocabulary(folder: Path, benign: Benign) -> None:
    """a config that says 2^62 tokens of 64 columns: 2^70 bytes"""
    configured(folder, benign, vocab_size=1 << 62)


@case("folder", passes=("inspect",))
def billion_layers(folder: Path, benign: Benign) -> None:
    """a config that says a billion blocks: a loop of days"""
    configured(folder, benign, num_hidden_layers=10**9)


@case("folder", passes=("inspect",))
def billion_layer_types(folder: Path, benign: Benign) -> None:
    """an architecture whose config makes a list of a billion entries when it is read"""
    configured(folder, benign, model_type="qwen3", architectures=["Qwen3ForCausalLM"], num_hidden_layers=10**9)


@case("folder", passes=("inspect",))
def billion_experts(folder: Path, benign: Benign) -> None:
    """a mixture of a billion experts"""
    configured(folder, benign, model_type="mixtral", architectures=["MixtralForCausalLM"], num_local_experts=10**9)


@case("folder", passes=("inspect",))
def thousands_of_layers(folder: Path, benign: Benign) -> None:
    """a config that says 200,000 blocks, each a module of its own"""
    configured(folder, benign, num_hidden_layers=200_000)


@case("folder", passes=("inspect", "verify"))
def no_heads_in_config(folder: Path, benign: Benign) -> None:
    """no attention heads, to divide by"""
    configured(folder, benign, num_attention_heads=0, head_dim=None)


@case("folder", passes=("inspect",))
def negative_layers(folder: Path, benign: Benign) -> None:
    """a config that says -2 blocks"""
    configured(folder, benign, num_hidden_layers=-2)


@case("folder", passes=("inspect",))
def text_for_a_size(folder: Path, benign: Benign) -> None:
    """a config with a text where a number belongs"""
    configured(folder, benign, hidden_size="wide")


@case("folder")
def list_for_a_config(folder: Path, benign: Benign) -> None:
    """a config that is a list"""
    (copied(folder, benign) / "config.json").write_text("[]")


@case("folder")
def deep_config(folder: Path, benign: Benign) -> None:
    """a config of 100,000 brackets"""
    (copied(folder, benign) / "config.json").write_text('{"model_type": "llama", "x": ' + "[" * 100_000 + "]" * 100_000 + "}")


@case("folder")
def not_a_number_in_config(folder: Path, benign: Benign) -> None:
    """a config whose norm adds NaN: nothing that it computes is a number"""
    configured(folder, benign, rms_norm_eps=float("nan"))


@case("folder", passes=("inspect",))
def billion_labels(folder: Path, benign: Benign) -> None:
    """a number that is no size: the config makes two tables of as many names when it is read"""
    configured(folder, benign, num_labels=10**9)


@case("folder", passes=("inspect",))
def billion_patches(folder: Path, benign: Benign) -> None:
    """a count in a part of the config that a mixture of text and pictures has"""
    configured(folder, benign, vision_config={"num_channels": 3, "num_patch_groups": 10**9})


@case("folder", passes=("inspect",))
def blocks_of_experts(folder: Path, benign: Benign) -> None:
    """a thousand blocks with four thousand experts each: either is sound, together they are four million modules"""
    configured(
        folder, benign, model_type="jetmoe", architectures=["JetMoeForCausalLM"], num_hidden_layers=1000, num_local_experts=4000,
        num_experts_per_tok=2, kv_channels=16, num_key_value_heads=2,
    )  # fmt: skip


# transformers, which verifies a folder, does not look at `architectures`


@case("folder", passes=("inspect", "verify"))
def architecture_that_is_no_model(folder: Path, benign: Benign) -> None:
    """a name of transformers that is no model: a function of it would be called with the config"""
    configured(folder, benign, architectures=["logging"])


@case("folder", passes=("inspect", "verify"))
def architecture_that_is_a_config(folder: Path, benign: Benign) -> None:
    """a class of transformers that is no model"""
    configured(folder, benign, architectures=["LlamaConfig"])


@case("folder", passes=("inspect", "verify"))
def architectures_of_numbers(folder: Path, benign: Benign) -> None:
    """architectures that are numbers"""
    configured(folder, benign, architectures=[7, None])


@case("folder", passes=("inspect", "verify"))
def architectures_that_are_a_text(folder: Path, benign: Benign) -> None:
    """architectures that are one text: its letters would be names"""
    configured(folder, benign, architectures="LlamaForCausalLM")
